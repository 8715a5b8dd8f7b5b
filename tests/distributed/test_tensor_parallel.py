"""Matrices over tensor-parallel ranks, with and without sequence parallelism: the same gradients, norm, update and losses."""

from __future__ import annotations

import itertools

import pytest

from recipes.config import Activation, AuxLossScope, MoeBackend, Normalization
from tests.distributed.test_gradients import check
from tests.tiny import tiny_config, tiny_moe_config

pytestmark = pytest.mark.distributed


def case(world_size: int, tensor: int, sequence: bool, accumulation: int = 2, make=tiny_config, **changes):
    changes |= {"parallel__tensor_model_parallel_size": tensor, "parallel__sequence_parallel": sequence}
    micro = max(1, 8 // (world_size // tensor) // accumulation)
    return {"config": make(train__micro_batch_size=micro, **changes)}


def dense_cases(world_size: int, tensor: int):
    groups = {"model__num_query_groups": max(2, tensor)}
    for sequence, stage in itertools.product((False, True), (0, 1, 2, 3)):
        yield case(world_size, tensor, sequence, zero__stage=stage, optimizer__clip_grad=0.05, **groups)
    other = {
        "model__share_embeddings_and_output_weights": False,
        "model__normalization": Normalization.LayerNorm,
        "model__activation": Activation.gelu,
        "model__add_bias_linear": True,
        "model__qk_layernorm": True,
    }
    for sequence in (False, True):
        yield case(world_size, tensor, sequence, zero__stage=2, **groups, **other)
        yield case(world_size, tensor, sequence, zero__stage=1, model__make_vocab_size_divisible_by=1, **groups)


@pytest.mark.parametrize(("world_size", "tensor"), [(2, 2), (4, 2), (4, 4)])
def test_dense(run_ranks, world_size, tensor):
    check(run_ranks("gradient_cases", world_size, list(dense_cases(world_size, tensor))), bound=2e-5)


@pytest.mark.parametrize("backend", MoeBackend)
@pytest.mark.parametrize(
    ("world_size", "tensor", "expert", "expert_tensor"),
    [(2, 2, 1, 1), (2, 2, 2, 1), (2, 2, 1, 2), (4, 2, 2, 1), (4, 2, 4, 1), (4, 2, 2, 2), (4, 4, 2, 1), (4, 4, 1, 4)],
)
def test_experts(run_ranks, world_size, tensor, expert, expert_tensor, backend):
    cases = []
    for number, (sequence, scope) in enumerate(itertools.product((False, True), AuxLossScope)):
        changes = {
            "parallel__expert_model_parallel_size": expert,
            "parallel__expert_tensor_parallel_size": expert_tensor,
            "model__num_query_groups": max(2, tensor),
            "moe__backend": backend,
            "moe__aux_loss_scope": scope,
            "moe__moe_shared_expert_intermediate_size": 16 if number % 2 else None,
            "zero__stage": number % 3,
            "optimizer__clip_grad": 0.05,
        }
        cases.append(case(world_size, tensor, sequence, make=tiny_moe_config, **changes))
    cases[0]["config"].moe.moe_router_topk, cases[0]["config"].moe.moe_router_pre_softmax = 1, True
    check(run_ranks("gradient_cases", world_size, cases), bound=2e-5)
