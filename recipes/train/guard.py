"""The spike guard: which steps must not reach the weights."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from recipes.config import TrainConfig


class DivergedError(RuntimeError):
    """Too many steps in a row were unusable."""


class SpikeGuard:
    """Judges each gradient norm. The verdict depends on norms only, which are equal on all ranks, so ranks agree."""

    def __init__(self, train: TrainConfig):
        self.factor = train.spike_factor
        self.window = train.spike_window
        self.limit = train.max_skipped_steps
        self.accepted: deque[float] = deque(maxlen=train.spike_window)
        self.skipped = 0
        self.in_a_row = 0

    def reason_to_skip(self, norm: float) -> str | None:
        """Why a step with this gradient norm is not applied, or None. Raises DivergedError after too many in a row."""
        reason = self._judge(norm)
        if reason is None:
            self.accepted.append(norm)
            self.in_a_row = 0
            return None
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row > self.limit:
            raise DivergedError(
                f"{self.in_a_row} steps in a row were skipped, the last because {reason}; lower optimizer.lr, or allow "
                f"more by train.max_skipped_steps (now {self.limit}), or go back by checkpoint.load_step=N to a step before"
            )
        return reason

    def _judge(self, norm: float) -> str | None:
        if not math.isfinite(norm):
            return "the gradient is not finite"
        if self.factor and len(self.accepted) >= max(1, self.window // 2):
            median = statistics.median(self.accepted)
            if norm > self.factor * median:
                return f"gradient norm {norm:.3g} exceeds {self.factor:g} x the recent median {median:.3g}"
        return None

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON."""
        return {"accepted": list(self.accepted), "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.accepted.extend(state["accepted"])
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
