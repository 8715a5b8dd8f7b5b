"""Shipped weights of auxiliary losses give routers the gradient that they have in the code they were published for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from recipes.config import AuxLossScope, Config
from recipes.logical import moe_layers
from recipes.pretrain import compose
from tests.ranks import forked

SEQUENCE, BATCH = 12, 3
TOKENS = SEQUENCE * BATCH


@dataclass(frozen=True)
class Source:
    """A model of transformers, its coefficient, and by how much its own loss function exceeds that of its training."""

    option: str
    family: str
    coefficient: float
    excess: float = 1.0


SOURCES = {
    "Mixtral": Source("mixtral_8x7b", "mixtral", 0.02),
    "Qwen3Moe": Source("qwen3_30b_a3b", "qwen3_moe", 0.001),
    "Olmoe": Source("olmoe_1b_7b", "olmoe", 0.01, excess=8.0),  # its shares add up to 8, those of megablocks to 1
}


def recipe(option: str, **weights: float) -> Config:
    """As shipped, but of small batches, and with these weights in place of its own."""
    config = compose([f"model={option}", f"moe={option}", "model.vocab_size=64"])
    config.model.seq_length, config.moe.aux_loss_scope = SEQUENCE, AuxLossScope.micro_batch
    config.train.global_batch_size = config.train.micro_batch_size = BATCH
    for name, value in weights.items():
        setattr(config.moe, name, value)
    return config


def our_gradient(config: Config, x_TH: torch.Tensor, router_EH: torch.Tensor) -> torch.Tensor:
    """Of the router of one layer, from the auxiliary losses alone."""
    from recipes.groups import enter
    from recipes.moe.context import MoeContext
    from recipes.moe.router import route, router_logits
    from recipes.topology import Layout

    weight_EH = router_EH.clone().requires_grad_()
    routing = route(router_logits(x_TH, weight_EH), config.moe)
    context = MoeContext(config, enter(Layout(1)))
    out = context.auxiliary(torch.zeros(TOKENS, 1), context.layers[0], routing, (SEQUENCE, BATCH))
    out.sum().backward()
    assert weight_EH.grad is not None
    return weight_EH.grad


def tiny_router(name: str, config: Config) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The module of a family, and what the second router of a tiny model of it is shown, and its weights."""
    module = importlib.import_module(f"transformers.models.{SOURCES[name].family}.modeling_{SOURCES[name].family}")
    transformers = importlib.import_module("transformers")
    experts = {"Mixtral": "num_local_experts"}.get(name, "num_experts")
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 16}
    sizes |= {experts: config.moe.num_moe_experts, "num_experts_per_tok": config.moe.moe_router_topk}
    torch.manual_seed(0)
    model = getattr(module, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**sizes, initializer_range=0.3)
    )
    gate, shown = model.model.layers[1].mlp.gate, []
    gate.register_forward_hook(lambda _module, inputs, _output: shown.append(inputs[0].detach().reshape(-1, 32)))
    model(torch.randint(0, 64, (BATCH, SEQUENCE)))
    return module, shown[0], gate.weight.detach()


@pytest.mark.parametrize("name", SOURCES)
@forked
def test_the_router_gradient_is_that_of_transformers_own_function(name):
    """All layers of the recipe's depth alike, since its function mixes the loads of unlike ones."""
    source = SOURCES[name]
    config = recipe(source.option, moe_z_loss_coeff=0.0)
    module, x_TH, router_EH = tiny_router(name, config)
    weights = [router_EH.clone().requires_grad_() for _ in moe_layers(config)]
    logits = tuple(x_TH @ weight_EH.t() for weight_EH in weights)
    experts, topk = config.moe.num_moe_experts, config.moe.moe_router_topk
    (source.coefficient * module.load_balancing_loss_func(logits, experts, topk)).backward()
    expected = weights[0].grad / source.excess
    found = our_gradient(config, x_TH, router_EH)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    config.moe.moe_aux_loss_coeff = source.coefficient
    assert our_gradient(config, x_TH, router_EH).norm() > 5 * expected.norm(), "without conversion"


@pytest.mark.parametrize("name", SOURCES)
@forked
def test_each_layer_has_its_part_of_that_function(name):
    """Of layers that differ: the mean over layers of its function of one layer."""
    config = recipe(SOURCES[name].option, moe_z_loss_coeff=0.0)
    module, x_TH, router_EH = tiny_router(name, config)
    layers, topk = len(moe_layers(config)), config.moe.moe_router_topk
    for shown_TH in (x_TH, x_TH.flip(1)):
        weight_EH = router_EH.clone().requires_grad_()
        loss = module.load_balancing_loss_func((shown_TH @ weight_EH.t(),), config.moe.num_moe_experts, topk)
        (SOURCES[name].coefficient * loss / layers / SOURCES[name].excess).backward()
        found = our_gradient(config, shown_TH, router_EH)
        assert (found - weight_EH.grad).norm() <= 1e-5 * weight_EH.grad.norm()


@forked
def test_losses_of_olmoe_are_those_of_its_training():
    """Both are divided by layers, tokens and experts per token, the balance loss of counts and mean scores times experts."""
    config = recipe("olmoe_1b_7b")
    experts, topk, layers = 64, 8, 16
    torch.manual_seed(1)
    x_TH, router_EH = torch.randn(TOKENS, 32), 0.3 * torch.randn(experts, 32)
    weight_EH = router_EH.clone().requires_grad_()
    logits_TE = x_TH @ weight_EH.t()
    scores_TE = logits_TE.softmax(1)
    counts_E = torch.bincount(scores_TE.topk(topk).indices.reshape(-1), minlength=experts)
    balance = experts / (layers * TOKENS * topk) * (counts_E * scores_TE.mean(0)).sum()
    z = logits_TE.exp().sum(1).log().square().sum() / (layers * TOKENS * topk)
    (0.01 * balance + 0.001 * z).backward()
    found = our_gradient(config, x_TH, router_EH)
    assert (found - weight_EH.grad).norm() <= 1e-5 * weight_EH.grad.norm()
    config.moe.moe_z_loss_coeff = 0.001
    assert (our_gradient(config, x_TH, router_EH) - weight_EH.grad).norm() > weight_EH.grad.norm(), "without conversion"
