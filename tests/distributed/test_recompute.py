"""Recomputed activations: the same gradients and counts, bit for bit with dropout, and less that is kept."""

from __future__ import annotations

import copy
import itertools
import os
from typing import Any

import pytest
import torch

from recipes.config import Config, MoeBackend, Recompute
from tests.distributed.test_gradients import check
from tests.distributed.workers import tiny_tokens
from tests.tiny import tiny_config, tiny_moe_config

pytestmark = pytest.mark.distributed
HERE = "tests.distributed.test_recompute"
CHOICES: list[tuple[Recompute | None, list[str]]] = [
    (None, []),
    (Recompute.selective, ["core_attn"]),
    (Recompute.selective, ["layernorm"]),
    (Recompute.selective, ["mlp", "moe"]),
    (Recompute.selective, ["core_attn", "layernorm"]),
    (Recompute.full, []),
]


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, {"expert_model_parallel_size": 2}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    ],
)
def test_layouts(run_ranks, world_size, parallel):
    cases = []
    for (granularity, modules), backend in itertools.product(CHOICES[1:], MoeBackend):
        config = tiny_moe_config(model__num_layers=3, moe__backend=backend, train__micro_batch_size=1)
        config.model.recompute_granularity, config.model.recompute_modules = granularity, modules
        for key, value in parallel.items():
            setattr(config.parallel, key, value)
        config.zero.stage = 1
        cases.append({"config": config})
    check(run_ranks("gradient_cases", world_size, cases), bound=2e-5)


def one_step(rank: int, world_size: int, configs: list[Config]) -> list[dict[str, Any]]:
    """Gradients with dropout of one process, bytes kept for the backward pass, and counts."""
    from recipes.launcher import rank_environment
    from recipes.model.gpt import GPT, registry
    from recipes.train.job import start_process

    start_process(configs[0], rank_environment(os.environ))
    state, results = torch.get_rng_state(), []
    for config in configs:
        torch.set_rng_state(state)
        from megatron.core import tensor_parallel

        tensor_parallel.model_parallel_cuda_manual_seed(1)
        model, tokens = GPT(config), tiny_tokens(config)
        kept: dict[int, int] = {}
        parameters = {parameter.data_ptr() for parameter in model.parameters()}

        def pack(tensor: torch.Tensor, kept=kept, parameters=parameters) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).sum() / tokens[:, 1:].numel()
        loss.backward()
        grads = {p.name: p.read(e.parameter.grad).clone() for e in registry(model, config) for p in e.pieces}
        report = {} if model.moe is None else model.moe.finish_step()
        results.append({"grads": grads, "kept": sum(kept.values()), "moe": report})
    return results


@pytest.mark.parametrize("make", [tiny_config, tiny_moe_config])
def test_dropout_is_drawn_again_and_less_is_kept(run_ranks, make):
    configs = []
    choices = CHOICES + [(Recompute.selective, ["moe_act"])] * (make is tiny_moe_config)
    for granularity, modules in choices:
        config = make(model__hidden_dropout=0.2, model__attention_dropout=0.2, model__num_layers=3)
        config.model.recompute_granularity, config.model.recompute_modules = granularity, modules
        configs.append(copy.deepcopy(config))
    plain, *others = run_ranks(f"{HERE}:one_step", 1, configs)[0]
    for (granularity, modules), result in zip(choices[1:], others, strict=True):
        for name, grad in plain["grads"].items():
            assert torch.equal(result["grads"][name], grad), (granularity, modules, name)
        assert result["moe"] == plain["moe"], "counted twice"
        assert result["kept"] < plain["kept"], (granularity, modules)
    assert others[CHOICES.index((Recompute.full, [])) - 1]["kept"] < 0.6 * plain["kept"]
