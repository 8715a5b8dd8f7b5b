"""Documents by themselves in every kind of layout: gradients are those of one process."""

from __future__ import annotations

import pytest

from recipes.config import Recompute, RouterType
from tests.distributed.test_gradients import check
from tests.tiny import change, tiny_config, tiny_moe_config

pytestmark = pytest.mark.distributed

SEPARATE = {"data__reset_position_ids": True, "data__reset_attention_mask": True}
RANDOM = {
    "moe__moe_router_type": RouterType.random,
    "moe__moe_aux_loss_coeff": 0.0,
    "moe__moe_z_loss_coeff": 0.0,
    "moe__moe_router_pre_softmax": True,
}
TENSOR = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}
PIPELINE = {"parallel__pipeline_model_parallel_size": 2, "zero__stage": 1, "train__micro_batch_size": 2}


def test_gradients_are_those_of_one_process(run_ranks):
    cases = [
        tiny_moe_config(**RANDOM, **TENSOR, parallel__expert_tensor_parallel_size=1),
        tiny_moe_config(**TENSOR, model__recompute_granularity=Recompute.selective),
        tiny_moe_config(**RANDOM, **PIPELINE, model__recompute_granularity=Recompute.full),
        tiny_moe_config(**RANDOM, parallel__expert_model_parallel_size=2, train__micro_batch_size=4, zero__stage=2),
        tiny_config(train__micro_batch_size=4, zero__stage=3),
    ]
    check(run_ranks("gradient_cases", 2, [{"config": change(config, SEPARATE)} for config in cases]), bound=2e-5)
