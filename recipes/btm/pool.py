"""A local pool of workers: training jobs as processes of their own, some at once, none talking to another.

    jobs -> run_jobs -> each started, watched by its exit code, started again when it died, reported when it ended

A job that fails for good does not stop the others. Jobs share a disk, nothing else: no socket, pipe or group joins them. Each sees
only its share of the CUDA devices (`device_shares`); with more workers than shares some jobs have the same one.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from recipes.files import open_append, own_folder
from recipes.process import STARTER, identity
from recipes.telemetry.wandb_variables import for_own_run

_BAD_INPUT = 2  # exit code of a mistake in the description, which another attempt cannot mend
_POLL_SECONDS = 0.2
_STOP_SECONDS = 30  # for a job to finish its step and save
_FROM_LAUNCHERS = ("SLURM_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "TORCHELASTIC_")


@dataclass
class Job:
    """One training job: its command, where its output goes, and how often it was started."""

    name: str
    command: list[str]
    log: Path
    threads: int = 1
    devices: str | None = field(default=None, init=False)  # as CUDA_VISIBLE_DEVICES has them; None: as this process
    attempts: int = field(default=0, init=False)
    process: subprocess.Popen | None = field(default=None, init=False)

    def start(self) -> None:
        """Start it in a session of its own, without the variables of a launcher above us or of our own W&B run.

        Output is appended to `log`.
        """
        ours = for_own_run(os.environ)
        inherited = {key: value for key, value in ours.items() if not key.startswith(_FROM_LAUNCHERS)}
        seen = {} if self.devices is None else {"CUDA_VISIBLE_DEVICES": self.devices}
        own_folder(self.log.parent)
        self.attempts += 1
        with open_append(self.log) as log:
            self.process = subprocess.Popen(
                self.command,
                env=inherited | seen | {"OMP_NUM_THREADS": str(self.threads), STARTER: identity(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def command(arguments: Iterable[str], ranks: int, port: int | None = None) -> list[str]:
    """What trains with these overrides: one process, or torchrun with `ranks` of them meeting at `port`."""
    if ranks == 1:
        return [sys.executable, "-m", "recipes.pretrain", *arguments]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(port)]
    return [sys.executable, *launcher, "-m", "recipes.pretrain", *arguments]


def device_shares(ranks: int) -> list[str]:
    """The CUDA devices that this process may use, divided into shares of `ranks`, each as CUDA_VISIBLE_DEVICES names it; none: [].

    Raises ValueError when there are some, but not enough for one share.
    """
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    devices = (named or [str(number) for number in range(count)])[:count]
    if 0 < len(devices) < ranks:
        raise ValueError(
            f"btm.ranks_per_branch={ranks}, but {len(devices)} CUDA devices are visible here ({','.join(devices)}); "
            f"use 1 to {len(devices)}, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    return [",".join(devices[first : first + ranks]) for first in range(0, len(devices) - ranks + 1, ranks)]


def run_jobs(
    jobs: Iterable[Job],
    workers: int,
    retries: int,
    done: Callable[[Job], None],
    say: Callable[[str], None],
    watch: Callable[[list[Job]], None] = lambda running: None,
    shares: Sequence[str] = (),
) -> None:
    """Run all jobs, `workers` at once; `done` hears of each that ended well, `watch` of those that run, now and then.

    A job is started on the one of `shares` (see `device_shares`) that the fewest running jobs have.
    A job that ends otherwise is started again up to `retries` times, unless its input was bad. Raises ValueError naming those
    that failed, and the ends of their logs, after all others are done. Leaves no process behind, however it ends.
    """
    waiting, running, failed = collections.deque(jobs), list[Job](), list[str]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.popleft()
                if shares:
                    job.devices = min(shares, key=[other.devices for other in running].count)
                job.start()
                running.append(job)
            time.sleep(_POLL_SECONDS)
            watch(running)
            for job in [job for job in running if job.process is not None and job.process.poll() is not None]:
                running.remove(job)
                assert job.process is not None
                code = job.process.returncode
                if code == 0:
                    done(job)
                elif code != _BAD_INPUT and job.attempts <= retries:
                    say(f"{job.name} ended with code {code}; attempt {job.attempts + 1} of {retries + 1}")
                    waiting.appendleft(job)
                else:
                    failed.append(f"{job.name} failed with code {code}, see {job.log}: {_last_words(job.log)}")
                    say(failed[-1])
    finally:
        stop(running)
    if failed:
        raise ValueError("\n  - ".join([f"{len(failed)} of the branches failed; all others are done", *failed]))


def stop(jobs: Iterable[Job]) -> None:
    """Ask everything that the jobs started to save and end, wait, and end what is left."""
    outer = [job.process for job in jobs if job.process is not None]
    processes = []
    for process in outer:
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(process.pid)
            processes += [top, *top.children(recursive=True)]
    for process in outer:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
    _, left = psutil.wait_procs(processes, timeout=_STOP_SECONDS)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for process in outer:
        process.wait()


def _last_words(log: Path) -> str:
    with suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-2:])[-500:]
    return "no output"
