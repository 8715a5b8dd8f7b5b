"""A skipped step leaves weights, moments and counters alone, and the next step is that of a run that never saw it."""

from __future__ import annotations

import itertools

import pytest
import torch

from recipes.config import OptimizerName, Precision
from tests.tiny import tiny_config

pytestmark = pytest.mark.distributed


def test_skipped_gradients_leave_no_trace(run_ranks):
    cases = []
    for stage, precision, offload in [*itertools.product(range(4), Precision, (False,)), (1, Precision.fp32, True)]:
        config = tiny_config(zero__stage=stage, train__micro_batch_size=2, zero__offload_optimizer=offload)
        config.train.precision = precision
        config.optimizer.name, config.optimizer.weight_decay = OptimizerName.adamw, 0.1
        config.optimizer.clip_grad = 1.0
        cases.append(config)
    for config, outcome in zip(cases, run_ranks("skip_cases", 2, cases)[0], strict=True):
        plain, skipping, infinite = outcome["plain"], outcome["skipping"], outcome["norm_with_infinity"]
        label = f"ZeRO-{config.zero.stage} {config.train.precision.name} offload={config.zero.offload_optimizer}"
        assert infinite == float("inf"), label
        assert outcome["applied_steps"] == 3, label
        for name, expected in plain.items():
            assert torch.equal(skipping[name], expected), f"{label}: {name}"
