"""When to stop early: a signal, or a launcher that died. Save the newest finished step, whatever the ranks are doing, and leave.

A step or an evaluation may last longer than a launcher waits before it kills. What a checkpoint holds changes only in short
sections, though: an update of the weights, a save. So a thread of each rank keeps the main thread out of the next section, agrees
with the other ranks on the last one that all of them complete, and saves the state as it is then, over process groups of its own,
while the main threads compute, or wait in collectives, what nobody needs any more.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from recipes import process

_LOOK_EVERY = 0.3  # seconds between looks at what other ranks were asked
_ANSWER_WITHIN = 15.0  # seconds for all ranks to say where they are; launchers kill after 30
_CLOSE_WITHIN = 8.0  # seconds for records to be closed after the save
_STOP = "stop"


class Stop:
    """Stops all ranks of a run when one of them is asked to.

    Sections come in the same order on all ranks, and each begins with a collective of all ranks: nobody is past the beginning
    of a section which somebody has not entered. `save` writes the state after the last complete section, if that is newer than
    the newest checkpoint, and `leave` closes this rank's records; both run in the thread.
    """

    def __init__(
        self, rank: int, world_size: int, store: dist.Store, save: Callable[[], None], leave: Callable[[], None]
    ) -> None:
        self._rank, self._world_size, self._store = rank, world_size, store
        self._save, self._leave = save, leave
        self._entered = self._left = 0
        self._closed = self._over = False
        self._agreed: int | None = None
        self._asked: signal.Signals | None = None
        self._state = threading.Condition()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stop", daemon=True)
        self._thread.start()
        process.on_request(self._request)

    def enter(self) -> None:
        """Begin a section; waits for ever when the ranks have agreed to stop before it."""
        with self._state:
            while self._closed:
                self._state.wait()
            self._entered += 1

    def leave(self) -> None:
        """End the section."""
        with self._state:
            self._left += 1
            self._state.notify_all()

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        """A section; one that raises never ends."""
        self.enter()
        yield
        self.leave()

    def close(self) -> None:
        """The run is complete, on all ranks: from now on a signal ends this process at once."""
        process.on_request(None)
        with self._state:
            self._over = True
            self._state.notify_all()
        self._wake.set()
        self._thread.join()

    def hold(self) -> None:
        """Wait for ever, after an exception in the main thread, when it only came because the ranks are stopping."""
        with self._state:
            if not self._closed:
                return
            self._state.wait_for(lambda: self._agreed is not None, timeout=2 * _LOOK_EVERY + 2)
            if self._agreed is None or self._left < self._entered <= self._agreed:
                return  # no agreement because a rank is gone, or something failed that all were to complete
            while True:
                self._state.wait()

    def _request(self, number: signal.Signals) -> None:
        """In the thread that hears signals."""
        if not self._thread.is_alive() and not self._over:
            process.end(128 + number, f"rank {self._rank}: {number.name}, and rank 0 is gone")
        if self._asked is not None:
            process.tell(f"rank {self._rank}: {number.name}: it is stopping already; to kill it now may lose steps")
        self._asked = self._asked or number
        self._wake.set()

    def _run(self) -> None:
        try:
            number = self._await_request()
            if number is None or not self._agree(number):
                return
        except (
            RuntimeError
        ) as error:  # the store is in the process of rank 0, whose end the main thread notices as well
            if self._asked is not None and not self._over:
                time.sleep(_LOOK_EVERY)
                process.end(1, f"rank {self._rank}: {self._asked.name}, but no contact with rank 0 ({error})")
            return
        try:
            self._save()
        except Exception as error:  # noqa: BLE001 - reported, and the process ends
            process.end(1, f"rank {self._rank}: {number.name}: nothing was saved: {error}")
        # Uploads may hang; what matters is on the disk.
        late = threading.Timer(_CLOSE_WITHIN, process.end, (128 + number, ""))
        late.daemon = True
        late.start()
        try:
            self._leave()
        finally:
            process.end(128 + number, "")

    def _await_request(self) -> signal.Signals | None:
        """The signal that some rank got first; None when the run is over."""
        while not self._over:
            if self._asked is not None:
                self._store.compare_set(_STOP, "", str(int(self._asked)))
            if self._store.check([_STOP]):
                return signal.Signals(int(self._store.get(_STOP)))
            self._wake.wait(_LOOK_EVERY)
            self._wake.clear()
        return None

    def _agree(self, number: signal.Signals) -> bool:
        """Wait for the last section that all ranks complete; False when the run is over with it."""
        with self._state:
            self._closed = True
            entered = self._entered
        keys = [f"{_STOP}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], str(entered))
        deadline = time.monotonic() + _ANSWER_WITHIN
        while not self._store.check(keys):
            if self._over:
                return False
            if time.monotonic() > deadline:
                silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                shown = ", ".join(map(str, silent[:8]))
                process.end(1, f"rank {self._rank}: {number.name}: ranks {shown} do not answer; nothing more was saved")
            time.sleep(0.02)
        with self._state:
            self._agreed = agreed = min(int(self._store.get(key)) for key in keys)
            self._state.notify_all()
            self._state.wait_for(lambda: self._over or self._left >= agreed)
            return not self._over
