"""Training jobs of Branch-Train-Merge as processes forked after the slow imports, in place of the pool's fresh ones."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.btm import pool
from tests import ranks  # noqa: F401 - the server of forked processes, with the heavy libraries

KILLED_AT = 3  # the step, counted from its start, before which a job ends itself


class Forked:
    """What the pool needs of a process."""

    def __init__(self, words: list[str], log: Path, fault: str | None):
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=_train, args=(words, str(log), fault), daemon=True)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> None:
        self.process.join(30)


def _train(words: list[str], log: str, fault: str | None) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.setsid()
    for key in [key for key in os.environ if key.startswith(pool._FROM_LAUNCHERS)]:
        del os.environ[key]
    from recipes import pretrain

    if fault is not None:
        _die_once(Path(fault))
    code = 1
    try:
        code = pretrain.main(words)
    finally:
        os._exit(code)  # no atexit handlers of libraries that the server imported


def _die_once(mark: Path) -> None:
    """Vanish before step KILLED_AT, unless that has happened before."""
    from recipes.train import loop

    train_step, calls = loop.train_step, []

    def faulty(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == KILLED_AT and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(*args)

    loop.train_step = faulty


def start_forked(fault_of: Callable[[str], str | None] = lambda name: None) -> Callable[[pool.Job], None]:
    """A replacement of `pool.Job.start`; `fault_of` a job's name: a file that marks that it has ended itself once."""

    def start(job: pool.Job) -> None:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.attempts += 1
        words = job.command[job.command.index("recipes.pretrain") + 1 :]
        job.process = Forked(words, job.log, fault_of(job.name))  # type: ignore[assignment]

    return start


@contextmanager
def forked_jobs(fault_of: Callable[[str], str | None] = lambda name: None) -> Iterator[None]:
    """Inside, the pool forks."""
    original = pool.Job.start
    pool.Job.start = start_forked(fault_of)  # type: ignore[method-assign]
    try:
        yield
    finally:
        pool.Job.start = original  # type: ignore[method-assign]
