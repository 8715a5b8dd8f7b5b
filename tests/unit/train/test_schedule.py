"""The learning rate by hand."""

from __future__ import annotations

import math

import pytest

from recipes.config import DecayStyle, OptimizerConfig, ScheduleConfig
from recipes.train.schedule import learning_rate

OPTIMIZER = OptimizerConfig(lr=1.0, min_lr=0.1)


def rates(schedule: ScheduleConfig, total: int = 20) -> list[float]:
    return [learning_rate(step, total, schedule, OPTIMIZER) for step in range(1, total + 1)]


def test_warm_up_is_linear_and_ends_at_the_peak():
    assert rates(ScheduleConfig(lr_warmup_steps=4))[:4] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(1, 20, ScheduleConfig(lr_warmup_steps=0), OPTIMIZER) < 1.0


def test_cosine():
    values = rates(ScheduleConfig(lr_warmup_steps=4))
    assert values[19] == pytest.approx(0.1)
    assert values[11] == pytest.approx(0.55)  # half way between steps 4 and 20
    assert values[7] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_linear_and_constant():
    assert rates(ScheduleConfig(DecayStyle.linear, lr_warmup_steps=0))[9] == pytest.approx(0.55)
    assert set(rates(ScheduleConfig(DecayStyle.constant, lr_warmup_steps=4))[3:]) == {1.0}


def test_wsd_holds_the_peak_until_its_last_steps():
    values = rates(ScheduleConfig(DecayStyle.wsd, lr_warmup_steps=4, wsd_decay_steps=5))
    assert set(values[3:15]) == {1.0}
    assert values[15:] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])


def test_decay_may_end_before_or_after_the_run():
    early = rates(ScheduleConfig(lr_warmup_steps=0, lr_decay_steps=10))
    assert early[9:] == pytest.approx([0.1] * 11)
    assert rates(ScheduleConfig(lr_warmup_steps=0, lr_decay_steps=40))[19] == pytest.approx(0.55)
