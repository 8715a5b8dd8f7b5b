"""Jobs as users start them, watched from outside: real launchers, and processes forked after the slow imports."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from recipes import launcher
from recipes.checkpoint.format import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
FAILING = str(Path(__file__).with_name("failing_pretrain.py"))
_MARK = "LAUNCHING_TEST_JOB"
_FROM_LAUNCHERS = ("SLURM_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "WANDB_")


def free_port() -> str:
    """As a word of a command line or of the environment."""
    return str(launcher.free_port())


def tiny_overrides(data: Path, folder: Path, *more: str, experiment: str = "debug") -> list[str]:
    """The experiment with a model of 20 thousand parameters (without experts), 8 sequences per step, at a constant rate."""
    return [
        f"experiment={experiment}",
        "schedule=constant",
        f"data.path={data}",
        f"run.dir={folder}",
        "model.num_layers=2",
        "model.hidden_size=32",
        "model.ffn_hidden_size=48",
        "model.num_attention_heads=4",
        "model.seq_length=16",
        "train.micro_batch_size=4",
        "train.global_batch_size=8",
        "train.eval_samples=0",
        *more,
    ]


class LaunchedJob:
    """A command started in its own session, and everything that descends from it."""

    def __init__(self, command: list[str], folder: Path, **environ: str) -> None:
        self._mark = uuid.uuid4().hex
        self.started = time.monotonic()
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_FROM_LAUNCHERS)}
        settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.defpath}", _MARK: self._mark}
        self._output = folder / f"output_{self._mark}"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=inherited | settings | environ,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def output(self) -> str:
        """What all its processes have printed."""
        return self._output.read_text(errors="replace")

    def send(self, number: int) -> None:
        """A signal to the command alone, as `kill` does."""
        self.process.send_signal(number)

    def wait(self, limit: float) -> int:
        """The exit code of the command."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still runs after {limit} s:\n{self.output()}") from None

    def left(self) -> list[psutil.Process]:
        """The processes of the job that still run, wherever they are in the process tree."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self) -> None:
        """End whatever is left."""
        for process in self.left():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


class ForkedJob:
    """`python -m recipes.pretrain ARGUMENTS`, forked from a process that has the heavy libraries already."""

    def __init__(self, arguments: list[str], folder: Path, fault: str = "", **environ: str) -> None:
        self._output = folder / f"output_{uuid.uuid4().hex}"
        self._output.touch()
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(
            target=_pretrain, args=(arguments, str(folder), str(self._output), fault, environ), daemon=True
        )
        self.process.start()

    def output(self) -> str:
        """What it has printed."""
        return self._output.read_text(errors="replace")

    def send(self, number: int) -> None:
        """A signal to the process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self, limit: float) -> int:
        """The exit code."""
        self.process.join(limit)
        if self.process.exitcode is None:
            raise TimeoutError(f"still runs after {limit} s:\n{self.output()}")
        return self.process.exitcode

    def kill(self) -> None:
        """End it."""
        self.process.kill()
        self.process.join()


def _pretrain(arguments: list[str], folder: str, output: str, fault: str, environ: dict[str, str]) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for key in [key for key in os.environ if key.startswith(_FROM_LAUNCHERS)]:
        del os.environ[key]
    os.environ.update(environ)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also when the tests run under nohup

    from recipes import pretrain
    from tests.distributed import faults

    if fault:
        getattr(faults, fault)()
    code = 1
    try:
        code = pretrain.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no atexit handlers of libraries that the server imported


@contextlib.contextmanager
def running(*jobs: Any) -> Iterator[None]:
    """Leaves nothing of the jobs behind, whatever happens."""
    try:
        yield
    finally:
        for job in jobs:
            job.kill()


def wait_until(condition: Callable[[], bool], limit: float, *jobs: Any) -> None:
    """Poll until the condition holds; fails with what the jobs printed when it takes too long."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit} s:\n" + "\n---\n".join(job.output() for job in jobs))
        time.sleep(0.05)


def steps_recorded(folder: Path) -> int:
    """Complete lines of `metrics.jsonl` so far."""
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def newest_complete(folder: Path) -> int:
    """The step of the newest checkpoint of a run folder, all of which are intact."""
    checkpoints = [open_checkpoint(path) for path in sorted((folder / "checkpoints").glob("step_*"))]
    assert checkpoints and [checkpoint.verify() for checkpoint in checkpoints] == [[]] * len(checkpoints)
    return max(checkpoint.step for checkpoint in checkpoints)
