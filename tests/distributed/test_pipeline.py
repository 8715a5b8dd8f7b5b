"""Layers over pipeline stages: the same gradients, norm, update, losses and counts as one process."""

from __future__ import annotations

import itertools

import pytest

from recipes.config import AuxLossScope, MoeBackend
from tests.distributed.test_gradients import check
from tests.tiny import tiny_config, tiny_moe_config

pytestmark = pytest.mark.distributed


def case(world_size: int, stages: int, tensor: int = 1, accumulation: int = 2, make=tiny_config, **changes):
    changes |= {
        "parallel__pipeline_model_parallel_size": stages,
        "parallel__tensor_model_parallel_size": tensor,
        "parallel__sequence_parallel": tensor > 1,
        "model__num_layers": 3,
    }
    data = world_size // tensor // stages
    return {"config": make(train__micro_batch_size=max(1, 8 // data // accumulation), **changes)}


@pytest.mark.parametrize(("world_size", "stages", "tensor"), [(2, 2, 1), (4, 2, 1), (4, 2, 2), (3, 3, 1)])
def test_dense(run_ranks, world_size, stages, tensor):
    cases = [
        case(
            world_size,
            stages,
            tensor,
            accumulation,
            zero__stage=stage,
            model__share_embeddings_and_output_weights=tied,
            optimizer__clip_grad=0.05,
        )
        for stage, tied, accumulation in itertools.product((0, 1), (True, False), (1, 4))
    ]
    cases[0]["masked"] = True
    check(run_ranks("gradient_cases", world_size, cases), bound=2e-5)


@pytest.mark.parametrize("backend", MoeBackend)
@pytest.mark.parametrize(
    ("world_size", "stages", "tensor", "expert", "expert_tensor"),
    [(2, 2, 1, 1, 1), (4, 2, 1, 2, 1), (4, 2, 2, 2, 1), (4, 2, 2, 1, 2), (4, 4, 1, 1, 1)],
)
def test_experts_in_some_stages(run_ranks, world_size, stages, tensor, expert, expert_tensor, backend):
    cases = []
    for stage, scope in itertools.product((0, 1), AuxLossScope):
        changes = {
            "parallel__expert_model_parallel_size": expert,
            "parallel__expert_tensor_parallel_size": expert_tensor,
            "moe__backend": backend,
            "moe__aux_loss_scope": scope,
            "zero__stage": stage,
            "optimizer__clip_grad": 0.05,
        }
        cases.append(case(world_size, stages, tensor, make=tiny_moe_config, **changes))
        cases[-1]["config"].model.num_layers = max(3, stages)
    check(run_ranks("gradient_cases", world_size, cases), bound=2e-5)
