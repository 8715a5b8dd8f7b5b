from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.ranks import run_ranks
from tests.tiny import tiny_moe_config
from tools.bench.rounds import interleave, median_and_iqr, ratio


def bookkeeping_rows(rank: int, world_size: int) -> tuple[list[dict], list[float]]:
    """Rows of the benchmark by a clock that knows three things: a step takes 3 s, a recording 1 s, adding up 0.5 s.

    And the losses of the balance that were added up: what the real recording, which goes on, makes of the real steps.
    """
    from recipes.moe.context import MoeContext
    from tools.bench import moe_bookkeeping, rounds

    now, added_up = [0.0], []
    real_step, record, finish = moe_bookkeeping.real_step, MoeContext._record, MoeContext.finish_step

    def slow_step(*args):
        step, job = real_step(*args)

        def slow():
            now[0] += 3.0
            return step()

        return slow, job

    def slow_record(self, *args):
        now[0] += 1.0
        return record(self, *args)

    def slow_finish(self, *args):
        now[0] += 0.5
        metrics = finish(self, *args)
        added_up.append(metrics["load_balancing_loss"])
        return metrics

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    moe_bookkeeping.time = rounds.time = clock
    moe_bookkeeping.real_step, MoeContext._record, MoeContext.finish_step = slow_step, slow_record, slow_finish
    return moe_bookkeeping.measure(tiny_moe_config(), rounds=3, repeats=2), added_up


def test_the_cost_of_bookkeeping_as_overhead_and_as_share():
    rows, added_up = run_ranks("tests.unit.tools.test_bench:bookkeeping_rows", 1)[0]
    tokens = 8 * 16
    with_metrics = {"tokens_per_second": tokens / 4.5, "overhead": 0.5, "share_of_step": 1.5 / 4.5}
    without = {"tokens_per_second": tokens / 3.0, "overhead": 0.0, "share_of_step": 0.0}
    for row, impl, values in zip(rows, ("with_metrics", "without_metrics"), (with_metrics, without), strict=True):
        assert row.pop("impl") == impl
        assert row == pytest.approx(values | {"overhead_iqr": 0.0, "share_of_step_iqr": 0.0})
    assert len(added_up) == 1 + 3 * 2 and min(added_up) > 0.5  # one step of the warm-up


def test_rounds_interleave_after_a_warm_up():
    calls = []
    seconds = interleave({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=2, repeats=2)
    assert "".join(calls) == "ab" + 2 * "aabb"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}


def test_medians_and_ranges():
    assert median_and_iqr([3.0]) == (3.0, 0.0)
    assert median_and_iqr([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, 2.0)
    assert ratio([2.0, 6.0, 4.0], [1.0, 2.0, 4.0]) == (2.0, 1.0)  # of ratios round by round: 2, 3 and 1
