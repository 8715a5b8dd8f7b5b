"""The spike guard's verdicts."""

from __future__ import annotations

import math

import pytest

from recipes.config import TrainConfig
from recipes.train.guard import DivergedError, SpikeGuard


def test_non_finite_norms_are_skipped_without_any_setting():
    guard = SpikeGuard(TrainConfig())
    assert guard.reason_to_skip(1.0) is None
    assert "not finite" in guard.reason_to_skip(math.inf)
    assert "not finite" in guard.reason_to_skip(math.nan)
    assert guard.reason_to_skip(1e9) is None  # the spike test is off by default
    assert guard.skipped == 2


def test_an_outlier_is_skipped_and_does_not_move_the_median():
    guard = SpikeGuard(TrainConfig(spike_factor=3.0, spike_window=4))
    assert guard.reason_to_skip(100.0) is None  # half of the window is not known yet
    assert guard.reason_to_skip(1.0) is None
    assert guard.reason_to_skip(1.0) is None
    assert guard.reason_to_skip(2.9) is None
    assert "exceeds 3 x the recent median" in guard.reason_to_skip(5.9)  # median of 100, 1, 1, 2.9 is 1.95
    assert guard.reason_to_skip(5.8) is None


def test_too_many_skipped_steps_in_a_row_end_the_run():
    guard = SpikeGuard(TrainConfig(max_skipped_steps=2))
    guard.reason_to_skip(math.nan)
    guard.reason_to_skip(math.nan)
    guard.reason_to_skip(1.0)  # breaks the row
    guard.reason_to_skip(math.nan)
    guard.reason_to_skip(math.nan)
    with pytest.raises(DivergedError, match=r"3 steps in a row.*optimizer\.lr.*max_skipped_steps \(now 2\)"):
        guard.reason_to_skip(math.nan)


def test_state_survives_a_resume():
    config = TrainConfig(spike_factor=3.0, spike_window=4)
    guard, resumed = SpikeGuard(config), SpikeGuard(config)
    for norm in (1.0, math.nan, 2.0, 3.0, 1.0, 1.5):
        guard.reason_to_skip(norm)
    resumed.load(guard.state())
    assert resumed.state() == guard.state()
    assert (resumed.reason_to_skip(5.3) is None) == (guard.reason_to_skip(5.3) is None)
