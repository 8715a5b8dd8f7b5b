"""When to stop early: Ctrl-C, SIGTERM, or a launcher that died. Finish the step, save, leave."""

from __future__ import annotations

import itertools
import os
import signal
import time
from types import FrameType

import psutil

from recipes.launcher import ONE_REQUEST

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAUNCHERS = {
    "deepspeed",
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "torchrun",
    "torch.distributed.run",
}


class StopRequest:
    """Remembers a request to stop. All ranks then agree on the step after which they do (see `train_step`).

    A signal that comes later than the first by some seconds ends the process at once.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._since = 0.0
        self._chain = [psutil.Process(), *_launchers()]
        self._previous = {number: signal.signal(number, self._remember) for number in _SIGNALS}

    @property
    def signal(self) -> signal.Signals | None:
        """The signal received; SIGTERM when a launcher died instead of passing its signal on, as deepspeed's does."""
        if self._signal is None and self._orphaned():
            self._signal = signal.SIGTERM
        return self._signal

    def _orphaned(self) -> bool:
        try:
            return any(child.ppid() != parent.pid for child, parent in itertools.pairwise(self._chain))
        except psutil.NoSuchProcess:
            return True

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal, self._since = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._since > ONE_REQUEST:
            self.restore()
            signal.raise_signal(number)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _launchers() -> list[psutil.Process]:
    """The launcher processes above this one, nearest first."""
    found: list[psutil.Process] = []
    for parent in psutil.Process().parents():
        try:
            words = {os.path.basename(word) for word in parent.cmdline()[:6]}
        except psutil.Error:  # it ended just now, or belongs to another user
            break
        if not words & _LAUNCHERS:
            break
        found.append(parent)
    return found
