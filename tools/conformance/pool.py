"""Ranks as processes that are forked once and do one layout after another.

A job is a function of worker.py that every rank calls with the same arguments, in a process group on a port of its own. When one
rank fails, or they give no answer in time, all of them are killed: what is left of their connections is of no use to anybody.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.launcher import free_port

_CONTEXT = multiprocessing.get_context("forkserver")
_WORKER = "tools.conformance.worker"  # heavy; imported once, by the server that ranks are forked from
LIMIT_SECONDS = 60.0


class JobFailed(Exception):
    """A job that a rank could not do, or that nobody finished; the message is one line."""


class Pool:
    """`size` ranks. `plant` ("module:function") is called once in every process, with its rank, before the first job."""

    def __init__(self, size: int, plant: str | None = None, limit: float = LIMIT_SECONDS):
        self.size, self.plant, self.limit = size, plant, limit
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        self.stacks: Path | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def run(self, function: str, *arguments: Any) -> list[Any]:
        """What the worker's `function` returns on each rank, in rank order. Raises JobFailed; the next job gets new ranks."""
        try:
            return self._try(function, arguments)
        except JobFailed as failure:
            if "is in use" not in str(failure):  # the port, by somebody else, since it was found free
                raise
            return self._try(function, arguments)

    def _try(self, function: str, arguments: tuple) -> list[Any]:
        if not self.processes:
            self._start()
        port = free_port()
        try:
            for pipe in self.pipes:
                pipe.send((port, function, arguments))
            return self._answers()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        _CONTEXT.set_forkserver_preload([_WORKER])  # no effect when the server runs already
        self.stacks = Path(tempfile.mkdtemp(prefix="conformance"))
        for rank in range(self.size):
            here, there = _CONTEXT.Pipe()
            arguments = (there, rank, self.size, self.plant, str(self.stacks / str(rank)))
            process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def _answers(self) -> list[Any]:
        deadline = time.monotonic() + self.limit
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise JobFailed(f"no answer in {self.limit:g} s: {self._where(list(waiting.values()))}")
            for pipe in (pipe for pipe in waiting if pipe in ready):
                rank = waiting[pipe]
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    self.processes[rank].join(5)
                    raise JobFailed(f"rank {rank} ended with exit code {self.processes[rank].exitcode}") from None
                if kind == "error":
                    raise JobFailed(f"rank {rank}: {value}")
                answers[rank] = value
        return [answers[rank] for rank in range(self.size)]

    def _where(self, ranks: list[int]) -> str:
        """The innermost line of our own code that each of these ranks is in."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        assert self.stacks is not None
        found = []
        for rank in ranks:
            lines = re.findall(r'File "(.*)", line (\d+) in (\S+)', (self.stacks / str(rank)).read_text())
            ours = next(((file, line, name) for file, line, name in lines if _is_ours(file)), None)
            found.append(f"rank {rank} in {Path(ours[0]).name}:{ours[1]} {ours[2]}" if ours else f"rank {rank}")
        return ", ".join(found)

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []
        if self.stacks is not None:
            shutil.rmtree(self.stacks, ignore_errors=True)
            self.stacks = None


def _is_ours(file: str) -> bool:
    return any(f"/{folder}/" in file for folder in ("recipes", "tools", "tests")) and "site-packages" not in file


def _serve(pipe: Any, rank: int, size: int, plant: str | None, stack: str) -> None:
    """One rank: do jobs until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; ours is killed
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    importlib.import_module(_WORKER)  # before the first job, which has a time limit
    with open(stack, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)  # also when the process waits inside a library
        while True:
            try:
                port, function, arguments = pipe.recv()
            except EOFError:
                os._exit(0)
            try:
                _environment(rank, size, port)
                if plant is not None:
                    _find(plant)(rank)
                    plant = None
                answer = ("result", _find(f"{_WORKER}:{function}")(*arguments))
            except Exception as error:  # noqa: BLE001 - told to the other side
                answer = ("error", _last_line(error))
            pipe.send(answer)


def _find(name: str) -> Callable:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _environment(rank: int, size: int, port: int) -> None:
    import torch

    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    os.environ["OMP_NUM_THREADS"] = "1"


def _last_line(error: BaseException) -> str:
    """The last line of a traceback and where it comes from."""
    frame = next(
        (frame for frame in reversed(traceback.extract_tb(error.__traceback__)) if _is_ours(frame.filename)), None
    )
    where = f" ({Path(frame.filename).name}:{frame.lineno} {frame.name})" if frame else ""
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0] + where
