"""bf16 under every kind of layout is as near to fp32 as bf16 in one process is."""

from __future__ import annotations

import statistics

import pytest
import torch

from recipes.config import Config, MoeBackend, Precision
from recipes.logical import initial_value, logical_tensors
from tests.distributed.test_gradients import merged, worst
from tests.tiny import tiny_config, tiny_moe_config

pytestmark = pytest.mark.distributed
CLIP = 0.5

LAYOUTS = {
    2: [
        {"zero__stage": 2},
        {"parallel__tensor_model_parallel_size": 2},
        {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True},
        {"parallel__pipeline_model_parallel_size": 2},
    ],
    4: [
        {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True, "zero__stage": 2},
        {
            "parallel__tensor_model_parallel_size": 2,
            "parallel__sequence_parallel": True,
            "parallel__pipeline_model_parallel_size": 2,
        },
        {"parallel__pipeline_model_parallel_size": 2},
    ],
}
EXPERTS = {
    2: [
        {"parallel__expert_model_parallel_size": 2, "zero__stage": 2},
        {"parallel__expert_model_parallel_size": 2, "zero__stage": 0},
        {"parallel__tensor_model_parallel_size": 2, "parallel__expert_model_parallel_size": 2},
    ],
    4: [{**LAYOUTS[4][1], "parallel__expert_model_parallel_size": 2}],
}


def errors(results: list, number: int) -> list[float]:
    """Relative error of each gradient against fp32; small tensors are measured against the RMS of all."""
    grads, reference = merged(results, number, "grads"), results[0][number]["reference"]["grads"]
    rms = torch.cat([tensor.flatten() for tensor in reference.values()]).square().mean().sqrt()
    scales = {name: max(t.norm(), 1e-3 * t.numel() ** 0.5 * rms) for name, t in reference.items()}
    return [float((grads[name] - reference[name]).norm() / scales[name]) for name in reference]


def case(make, world_size: int, changes: dict, backend: MoeBackend) -> dict:
    layout = {"parallel__expert_tensor_parallel_size": 1} if make is tiny_moe_config else {}
    config = make(**{"zero__stage": 1, "model__num_layers": 4, **layout, **changes})
    config.train.precision, config.moe.backend, config.optimizer.clip_grad = Precision.bf16, backend, CLIP
    if make is tiny_config:
        config.parallel.expert_tensor_parallel_size = None
    shared = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    config.train.micro_batch_size = 8 // (world_size // shared) // 2  # two micro-batches everywhere
    return {"config": config}


def check_update(config: Config, results: list, number: int) -> None:
    """The norm is that of all gradients, each once; the update is -lr x gradient, clipped by this norm."""
    grads, weights = (merged(results, number, key) for key in ("grads", "weights"))
    norm = torch.cat([grad.double().flatten() for grad in grads.values()]).norm().item()
    assert norm > 1.5 * CLIP
    assert [rank[number]["norm"] for rank in results] == pytest.approx([norm] * len(results), rel=1e-5)
    rate, seed = config.optimizer.lr * CLIP / norm, config.run.seed
    start = {name: initial_value(t, seed).bfloat16().float() for name, t in logical_tensors(config).items()}
    applied = {name: (start[name] - weights[name]) / rate for name in weights}
    error, name = worst(applied, grads)  # weights near 1 round small updates
    assert error <= 1e-2, f"the update of {name} is off by {error:.1e}"


@pytest.mark.parametrize("world_size", LAYOUTS)
@pytest.mark.parametrize(
    ("make", "backend"),
    [(tiny_config, MoeBackend.grouped), (tiny_moe_config, MoeBackend.grouped), (tiny_moe_config, MoeBackend.deepspeed)],
)
def test_layouts_err_as_one_process_does(run_ranks, make, backend, world_size):
    alone = errors(run_ranks("gradient_cases", 1, [case(make, 1, {}, backend)]), 0)
    assert 1e-4 < statistics.median(alone) < 0.05
    layouts = LAYOUTS[world_size] + (EXPERTS[world_size] if make is tiny_moe_config else [])
    cases = [case(make, world_size, changes, backend) for changes in layouts]
    results = run_ranks("gradient_cases", world_size, cases)
    for number, changes in enumerate(layouts):
        check_update(cases[number]["config"], results, number)
        found = errors(results, number)
        assert statistics.median(found) <= 2.5 * statistics.median(alone), changes
        assert max(found) <= 4 * max(alone), changes
