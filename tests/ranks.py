"""Ranks as processes forked from a server that has imported the heavy libraries once: a test of 4 ranks takes a second.

They meet on gloo, whatever devices the machine has: a process forked from one that has asked for a device could not use it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import Any

from recipes.launcher import free_port
from tests import margins

margins.install_if_asked()

os.environ.setdefault("OMP_NUM_THREADS", "1")

_CONTEXT = multiprocessing.get_context("forkserver")
_WORKERS = "tests.distributed.workers"
_CONTEXT.set_forkserver_preload([_WORKERS])
LIMIT_SECONDS = 60
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextlib.contextmanager
def without_devices() -> Iterator[None]:
    """Processes that are started inside see no CUDA device."""
    before = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = ""
    try:
        yield
    finally:
        del os.environ[_VISIBLE]
        if before is not None:
            os.environ[_VISIBLE] = before


def _find(name: str) -> Callable:
    module, _, function = name.rpartition(":")
    return getattr(importlib.import_module(module or _WORKERS), function)


def _rank_main(function: str, rank: int, world_size: int, port: int, pipe: Any, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    faulthandler.dump_traceback_later(LIMIT_SECONDS - 5)  # shows where a rank hangs
    try:
        answer = ("result", _find(function)(rank, world_size, *args))
    except BaseException:
        answer = ("error", traceback.format_exc())
    try:
        pipe.send_bytes(pickle.dumps(answer))  # in band: a tensor must outlive the process
    finally:
        pipe.close()
        os._exit(0)  # no atexit handlers of libraries that the server imported


def run_ranks(function: str, world_size: int, *args: Any, limit: float = LIMIT_SECONDS) -> list[Any]:
    """Results of `function(rank, world_size, *args)` on forked ranks, in rank order.

    `function` is "module:name", or the name of a function in tests.distributed.workers.

    The first error of a rank is raised with its traceback; a run longer than `limit` seconds is killed and fails the test.
    """
    with without_devices():
        forkserver.ensure_running()
    port, pipes, processes = free_port(), [], []
    for rank in range(world_size):
        here, there = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_rank_main, args=(function, rank, world_size, port, there, args), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    deadline = time.monotonic() + limit
    results: dict[int, Any] = {}
    try:
        while len(results) < world_size:
            left = deadline - time.monotonic()
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = multiprocessing.connection.wait(waiting, timeout=max(left, 0))
            if not ready:
                raise TimeoutError(f"ranks {sorted(set(range(world_size)) - set(results))} still run after {limit} s")
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    raise RuntimeError(f"rank {rank} died without a word") from None
                if kind == "error":
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(world_size)]


def forked(test: Callable) -> Callable:
    """Decorator: the test runs in one forked process that has applied the patches and joined a process group."""

    @functools.wraps(test)
    def wrapper(**arguments: Any) -> None:
        run_ranks("call_test", 1, test.__module__, test.__name__, arguments)

    return wrapper
