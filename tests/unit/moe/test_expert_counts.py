"""Layers with unlike numbers of experts: what each is built of, balanced and counted by; nobody takes one number for all.

`test_pairwise` compares a layer whose neighbour has more or fewer experts with the oracle, under every pair of options.
"""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest
import torch

from recipes.config import AuxLossScope, Config, MoeBackend, RouterType
from recipes.logical import expert_counts, logical_tensors
from recipes.plan.size import active_parameters, flops_per_token, plan, total_parameters
from tests.ranks import forked
from tests.tiny import tiny_config, tiny_moe_config
from tests.unit.moe import oracle
from tests.unit.moe.comparing import compare
from tests.unit.moe.layers import layer_config

ROOT = Path(__file__).parents[3]
# Who may read or set the one number that all layers have: the schema, what gives every layer its own, what checks it, and
# comparisons with peers that have no other.
ONE_NUMBER = {
    "recipes/checkpoint/trainer.py",  # bounds it before anything is counted
    "recipes/config.py",
    "recipes/logical.py",
    "recipes/validation/experts.py",
    "recipes/validation/limits.py",
    "tools/bench/moe_peers.py",
    "tools/bench/moe_skew.py",
    "tools/bench/train_step.py",
    "tools/conformance/shrink.py",
    "tools/scaling.py",
}


def unlike_config(*counts: int, **changes) -> Config:
    """The tiny model with so many experts in each of its layers, each 24 wide, top-2."""
    sizes = {"model__num_layers": len(counts), "moe__moe_layer_freq": 1, "moe__num_moe_experts": None}
    return tiny_moe_config(**{**sizes, "moe__num_moe_experts_per_layer": list(counts), **changes})


def test_nobody_else_asks_for_the_one_number_of_all_layers():
    found = set()
    for path in (path for folder in ("recipes", "tools") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "num_moe_experts":
                found.add(path.relative_to(ROOT).as_posix())
    assert "recipes/logical.py" in found and found <= ONE_NUMBER, found - ONE_NUMBER


def test_names_and_shapes_of_each_layer():
    config = unlike_config(3, 6, 2, moe__moe_layer_pattern=[1, 0, 1, 1], model__num_layers=4)
    assert expert_counts(config) == {0: 3, 2: 6, 3: 2}
    tensors = logical_tensors(config)
    for layer, count in expert_counts(config).items():
        assert tensors[f"layers.{layer}.moe.router.weight"].shape == (count, 32)
        held = {int(name.split(".")[4]) for name in tensors if name.startswith(f"layers.{layer}.moe.experts.")}
        assert held == set(range(count))
    assert not [name for name in tensors if name.startswith("layers.1.moe.")]
    assert expert_counts(tiny_moe_config(model__num_layers=4)) == {0: 4, 2: 4} and expert_counts(tiny_config()) == {}


@forked
def test_planned_parameters_are_those_of_the_built_model():
    from recipes.model.gpt import GPT

    config = unlike_config(3, 6, 2, moe__moe_use_residual=True, moe__moe_shared_expert_intermediate_size=16)
    for backend in MoeBackend:
        config.moe.backend = backend
        padding = 4 * 32  # rows of the vocabulary, 60 padded to 64
        assert sum(p.numel() for p in GPT(config).parameters()) == total_parameters(config) + padding
    expert = 3 * 32 * 24
    sizes = plan(config, 1)
    assert sizes["total_params"] - sizes["active_params"] == (3 + 6 + 2 - 3 * 2) * expert
    assert (sizes["num_moe_layers"], sizes["num_moe_experts_per_layer"]) == (3, [3, 6, 2])
    alike = unlike_config(3, 3, 3, moe__moe_use_residual=True, moe__moe_shared_expert_intermediate_size=16)
    routers = 32 * (6 + 2 - 3 - 3)
    assert active_parameters(config) - active_parameters(alike) == routers
    assert flops_per_token(config) - flops_per_token(alike) == 6 * routers


@pytest.mark.parametrize("backend", MoeBackend)
@forked
def test_layers_of_a_pyramid_are_the_oracles(backend):
    """Every layer of 3, 8 and 5 experts, with every scope of the balance loss, and what bounds an expert."""
    for seed, scope in enumerate(AuxLossScope):
        config = layer_config(
            model__num_layers=3,
            moe__num_moe_experts=None,
            moe__num_moe_experts_per_layer=[3, 8, 5],
            moe__moe_layer_freq=1,
            moe__aux_loss_scope=scope,
            moe__backend=backend,
        )
        if backend is MoeBackend.grouped:
            config.moe.moe_expert_capacity_factor = 1.0
        for layer, previous_E in enumerate(([3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3])):
            compare(config, seed=seed, previous_E=previous_E, number=layer)


@pytest.mark.parametrize("kind", [RouterType.hash, RouterType.random, RouterType.expert_choice])
@forked
def test_tables_and_chance_of_each_layer_have_its_own_experts(kind):
    config = layer_config(
        moe__num_moe_experts=None,
        moe__num_moe_experts_per_layer=[8, 3],
        moe__moe_layer_freq=1,
        moe__moe_router_type=kind,
        moe__moe_aux_loss_coeff=0.0,
        moe__moe_z_loss_coeff=0.0,
    )
    for layer in (0, 1):
        compare(config, number=layer)


@forked
def test_a_balance_loss_with_the_number_of_the_first_layer_is_caught():
    from recipes.moe import context

    config = layer_config(moe__num_moe_experts=None, moe__num_moe_experts_per_layer=[4, 8], moe__moe_layer_freq=1)
    right = context.balance_part
    context.balance_part = lambda probs_TE, *rest: right(probs_TE, *rest) * 4 / probs_TE.shape[1]
    compare(config, number=0)
    with pytest.raises(AssertionError, match="is off by"):
        compare(config, number=1)


@forked
def test_a_capacity_of_the_most_experts_is_caught():
    from recipes.moe import routing

    config = layer_config(moe__num_moe_experts=None, moe__num_moe_experts_per_layer=[4, 8], moe__moe_layer_freq=1)
    config.moe.moe_expert_capacity_factor = 1.0
    right = routing.capacity
    routing.capacity = lambda tokens, topk, experts, *rest: right(tokens, topk, 8, *rest)
    compare(config, number=1)
    with pytest.raises(AssertionError):
        compare(config, number=0)


def test_load_metrics_by_hand():
    """Two and four experts: loads 3 1 of mean 2, and 0 4 4 0 of mean 2."""
    from recipes.moe.context import load_metrics

    counts_NE = torch.tensor([[3.0, 1.0, 0.0, 0.0], [0.0, 4.0, 4.0, 0.0]])
    sums = {name: torch.tensor([4.0, 8.0]) for name in ("tokens", "dropped", "entropy")}
    gates_NE = torch.tensor([[3.0, 0.5, 0.0, 0.0], [0.0, 2.0, 1.0, 0.0]])
    previous_NE = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    metrics = load_metrics(counts_NE, gates_NE, sums, previous_NE, [2, 4])
    assert metrics["moe/max_vio"] == pytest.approx(4 / 2 - 1)  # of four experts in each the first would have 3 / 1 - 1
    assert metrics["moe/dead_experts"] == 2
    assert metrics["moe/tokens_per_expert"] == [[3, 1], [0, 4, 4, 0]]
    assert metrics["moe/gate_mean_per_expert"] == [[1.0, 0.5], [None, 0.5, 0.25, None]]
    assert metrics["moe/routing_change"] == pytest.approx((0.25 + 0.5) / 2)


@forked
def test_recorded_losses_are_means_over_layers_of_the_oracles():
    from recipes.model.gpt import GPT

    config = unlike_config(3, 6, 2)
    model, seen = GPT(config), dict[int, torch.Tensor]()
    for block in model.blocks:
        hook = lambda module, args, layer=block.layer: seen.update({layer: args[0].detach()})  # noqa: E731
        block.inner.mlp.register_forward_pre_hook(hook)
    ids = torch.randint(0, 60, (8, 17), generator=torch.Generator().manual_seed(0))
    model(ids[:, :-1], ids[:, 1:].contiguous())
    metrics, balances, counts = model.moe.finish_step(), [], []
    for layer, count in expert_counts(config).items():
        weights = model.blocks[layer].inner.mlp.routed.router.detach().double()
        assert len(weights) == count
        logits_TE = seen[layer].reshape(-1, 32).double() @ weights.t()
        chosen = logits_TE.topk(2, dim=1).indices.reshape(-1).tolist()
        counts.append([chosen.count(expert) for expert in range(count)])
        balances.append(oracle.balance(torch.softmax(logits_TE, 1), counts[-1]).item())
    assert metrics["load_balancing_loss"] == pytest.approx(sum(balances) / 3, rel=1e-5)
    assert metrics["moe/tokens_per_expert"] == counts
    assert metrics["moe/max_vio"] == pytest.approx(max(max(row) / (256 / len(row)) - 1 for row in counts))
    moved = [sum(abs(n / 256 - 1 / len(row)) for n in row) / 2 for row in counts]
    assert metrics["moe/routing_change"] == pytest.approx(sum(moved) / 3)  # from even loads
    assert model.moe.state()["previous_counts"] == counts


@forked
def test_biases_move_towards_the_mean_of_their_own_layer_and_come_back_from_json():
    from recipes.groups import enter
    from recipes.moe.context import MoeContext
    from recipes.topology import Layout

    config = unlike_config(2, 4, moe__moe_router_enable_expert_bias=True, moe__moe_router_bias_update_rate=0.25)
    first, second = MoeContext(config, enter(Layout(1))), MoeContext(config, enter(Layout(1)))
    assert first.state()["previous_counts"] == [[1, 1], [1, 1, 1, 1]]
    first.report[:, :4] = torch.tensor([[5, 3, 0, 0], [2, 2, 0, 4]])
    first.finish_step()
    moved = [[-0.25, 0.25], [0.0, 0.0, 0.25, -0.25]]
    assert first.state() == {"previous_counts": [[5, 3], [2, 2, 0, 4]], "bias": moved, "steps": 1}
    assert not first.bias_NE[0, 2:].any()
    second.load(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    assert [second.bias(layer).tolist() for layer in (0, 1)] == moved
    with pytest.raises(ValueError, match=r"bias of \[4, 4\] experts by layer, the model has \[2, 4\]"):
        second.load({"bias": [[0.0] * 4] * 2})


@forked
def test_learning_rates_of_experts_follow_the_number_in_their_layer():
    from recipes.engine.settings import make_optimizer
    from recipes.model.gpt import GPT, registry
    from recipes.topology import Layout

    config = unlike_config(2, 8, 2, moe__moe_expert_lr_scale=None)
    entries = registry(GPT(config), config)
    scales = {
        name: group["lr_scale"]
        for group in make_optimizer(config, entries, Layout(1)).param_groups
        for name in (entry.name for entry in entries if any(entry.parameter is p for p in group["params"]))
    }
    experts = {name: scale for name, scale in scales.items() if "w1_LGH" in name or "w2_LHF" in name}
    assert experts == {
        f"blocks.{layer}.inner.mlp.routed.{part}": pytest.approx(scale)
        for layer, scale in enumerate((1.0, math.sqrt(2 / 8), 1.0))
        for part in ("w1_LGH", "w2_LHF")
    }
    assert {scale for name, scale in scales.items() if name not in experts} == {1.0}
