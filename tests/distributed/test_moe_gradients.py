"""Experts over ranks: gradients, norm, update, balance loss and counts are those of one process, in both backends."""

from __future__ import annotations

import itertools

import pytest

from recipes.config import AuxLossScope, MoeBackend
from tests.distributed.test_gradients import check, merged, worst
from tests.tiny import tiny_moe_config

pytestmark = pytest.mark.distributed


def case(world_size: int, accumulation: int = 1, **changes):
    return {"config": tiny_moe_config(train__micro_batch_size=8 // world_size // accumulation, **changes)}


@pytest.mark.parametrize("backend", MoeBackend)
@pytest.mark.parametrize(("world_size", "expert_parallel"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
def test_every_zero_stage_accumulation_and_bucket_size(run_ranks, world_size, expert_parallel, backend):
    changes = {"parallel__expert_model_parallel_size": expert_parallel, "moe__backend": backend}
    cases = [
        case(world_size, accumulation, zero__stage=stage, **changes)
        for stage, accumulation in itertools.product((0, 1, 2), (1, 2, 4))
        if world_size * accumulation <= 8
    ]
    for stage in (1, 2):  # buckets so small that tensors of experts and others alternate in them
        small = {"zero__reduce_bucket_size": 500, "zero__allgather_bucket_size": 500}
        cases.append(case(world_size, 2, zero__stage=stage, optimizer__clip_grad=0.05, **changes, **small))
    check(run_ranks("gradient_cases", world_size, cases), bound=1e-5)


@pytest.mark.parametrize("backend", MoeBackend)
def test_routing_scopes_and_shapes(run_ranks, backend):
    """Top-1 and top-3, every scope of the balance loss, a shared expert, experts in every layer, GELU."""
    cases = []
    for scope, topk in itertools.product(AuxLossScope, (1, 2, 3)):
        changes = {"moe__aux_loss_scope": scope, "moe__moe_router_topk": topk, "moe__moe_router_pre_softmax": topk == 1}
        cases.append(case(2, 2, zero__stage=1, parallel__expert_model_parallel_size=2, moe__backend=backend, **changes))
    cases[0]["config"].moe.moe_shared_expert_intermediate_size = 16
    cases[1]["config"].moe.moe_layer_freq = 1
    cases[2]["config"].zero.offload_optimizer = True
    cases[3]["config"].zero.stage, cases[3]["config"].optimizer.clip_grad = 0, 0.05
    cases[4]["masked"] = True
    check(run_ranks("gradient_cases", 2, cases), bound=1e-5)


UNLIKE = {"model__num_layers": 3, "moe__moe_layer_freq": 1, "moe__num_moe_experts": None}
UNLIKE |= {"moe__num_moe_experts_per_layer": [4, 8, 2], "moe__moe_use_residual": True}
UNLIKE |= {"moe__moe_shared_expert_intermediate_size": 16}


@pytest.mark.parametrize("backend", MoeBackend)
@pytest.mark.parametrize(("world_size", "expert_parallel"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_unlike_numbers_of_experts(run_ranks, world_size, expert_parallel, backend):
    """4, 8 and 2 experts in three layers: every ZeRO stage, every scope of the balance loss."""
    changes = UNLIKE | {"parallel__expert_model_parallel_size": expert_parallel, "moe__backend": backend}
    cases = [
        case(world_size, 2, zero__stage=stage, moe__aux_loss_scope=scope, **changes)
        for stage, scope in zip((0, 1, 2), AuxLossScope, strict=True)
    ]
    cases[0]["config"].optimizer.clip_grad = 0.05
    check(run_ranks("gradient_cases", world_size, cases), bound=1e-5)


def test_a_doubled_expert_gradient_is_caught_and_named(run_ranks):
    broken = case(2, zero__stage=1, parallel__expert_model_parallel_size=2)
    broken["fault"] = "layers.0.moe.experts.2.down.weight"  # the hook acts on the stack of experts 2 and 3
    results = run_ranks("gradient_cases", 2, [broken])
    error, name = worst(merged(results, 0, "grads"), results[0][0]["reference"]["grads"])
    assert error == pytest.approx(1.0, rel=1e-3)
    assert name in ("layers.0.moe.experts.2.down.weight", "layers.0.moe.experts.3.down.weight")
    with pytest.raises(AssertionError, match=r"experts\.[23]\.down\.weight is off by 1\.00e\+00"):
        check(results, bound=1e-5)


def test_an_expert_left_out_of_the_norm_is_caught(run_ranks):
    broken = case(2, zero__stage=0, parallel__expert_model_parallel_size=2, optimizer__clip_grad=0.05)
    broken["fault"] = "norm"
    results = run_ranks("gradient_cases", 2, [broken])
    with pytest.raises(AssertionError, match=r"after the step is off|case 0: norm"):
        check(results, bound=1e-5)
