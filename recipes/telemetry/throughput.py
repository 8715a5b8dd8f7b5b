"""Step times -> tokens per second and time left."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepTimer:
    """Times optimizer steps, and nothing between them: evaluation and checkpoints are not training speed.

        with timer.step(tokens): train_step()

    Args:
        window: number of recent steps that the smoothed rate and the ETA look at.
        clock: seconds, monotonic.
    """

    def __init__(self, window: int = 50, clock: Callable[[], float] = time.perf_counter) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=window)  # (tokens, seconds)
        self._clock = clock

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Time the body as one optimizer step over `tokens` tokens of all ranks. A step that raises is not counted."""
        start = self._clock()
        yield
        # A clock with coarse ticks may return the same instant twice.
        self._steps.append((tokens, max(self._clock() - start, 1e-9)))

    @property
    def tokens_per_second(self) -> float:
        """Rate of the last step; 0.0 before the first."""
        if not self._steps:
            return 0.0
        tokens, seconds = self._steps[-1]
        return tokens / seconds

    @property
    def smoothed_tokens_per_second(self) -> float:
        """Tokens over seconds of the recent steps; 0.0 before the first."""
        if not self._steps:
            return 0.0
        return sum(tokens for tokens, _ in self._steps) / sum(seconds for _, seconds in self._steps)

    def eta_seconds(self, steps_left: int) -> float | None:
        """Seconds for `steps_left` more steps, None before the first.

        From the median of the recent steps: a slow first step (compilation, page faults) does not move it.
        """
        if not self._steps:
            return None
        return steps_left * statistics.median(seconds for _, seconds in self._steps)
