"""Ctrl-C and SIGTERM: finish the step, save, leave. A second signal ends the process at once."""

from __future__ import annotations

import signal
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers a request to stop. All ranks then agree on the step after which they do (see `train_step`)."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous = {number: signal.signal(number, self._remember) for number in _SIGNALS}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self.restore()

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
