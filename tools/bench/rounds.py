"""Interleaved timing: what is compared runs in turn, so that noise of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleave(
    work: Mapping[str, Callable[[], object]],
    rounds: int,
    repeats: int,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each piece of work by `clock` (wall time), one number per round; a first, unmeasured round warms up."""
    clock = clock or time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, call in work.items():
            start = clock()
            for _ in range(repeats if number else 1):
                call()
            if number:
                seconds[name].append((clock() - start) / repeats)
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> tuple[float, float]:
    """Median and interquartile range of the ratios of the rounds."""
    return median_and_iqr([a / b for a, b in zip(numerator, denominator, strict=True)])


def median_and_iqr(values: list[float]) -> tuple[float, float]:
    """Median and interquartile range; the range of a single value is 0."""
    if len(values) == 1:
        return values[0], 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, high - low
