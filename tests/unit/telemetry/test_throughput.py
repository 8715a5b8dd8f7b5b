import pytest

from recipes.telemetry.throughput import StepTimer


def run(durations, window=50, pause=0.0):
    """A timer that has seen steps of the given durations (seconds, 100 tokens each) with pauses between them."""
    now = 0.0
    timer = StepTimer(window, clock=lambda: now)
    for seconds in durations:
        with timer.step(100):
            now += seconds
        now += pause
    return timer


def test_rates_of_the_last_and_the_recent_steps():
    timer = run([1.0, 1.0, 2.0])
    assert timer.tokens_per_second == pytest.approx(50.0)
    assert timer.smoothed_tokens_per_second == pytest.approx(75.0)


def test_time_between_steps_does_not_count():
    assert run([1.0, 1.0], pause=100.0).smoothed_tokens_per_second == pytest.approx(100.0)


def test_a_slow_first_step_does_not_move_the_eta():
    assert run([60.0, 1.0, 1.0, 1.0]).eta_seconds(10) == pytest.approx(10.0)


def test_only_the_window_counts():
    timer = run([9.0, 9.0, 9.0, 1.0, 1.0], window=2)
    assert timer.smoothed_tokens_per_second == pytest.approx(100.0)
    assert timer.eta_seconds(3) == pytest.approx(3.0)


def test_before_the_first_step_nothing_is_known():
    timer = StepTimer()
    assert (timer.tokens_per_second, timer.smoothed_tokens_per_second, timer.eta_seconds(5)) == (0.0, 0.0, None)


def test_a_step_that_raises_is_not_counted():
    timer = run([1.0])
    with pytest.raises(RuntimeError), timer.step(10**9):
        raise RuntimeError
    assert timer.tokens_per_second == pytest.approx(100.0)
