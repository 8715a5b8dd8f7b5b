"""Arms of a comparison: descriptions that are checked together before the first starts, each trained by a fresh launcher.

Arm (name, seed, run folder, overrides) -> described -> Config;  trained -> a complete run folder, or SystemExit
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from recipes.config import Config
from recipes.launcher import free_port
from recipes.pretrain import ROOT, compose
from recipes.process import STARTER, identity
from recipes.telemetry.wandb_variables import for_own_run
from recipes.validation import prepare, problems
from tools.arguments import Parser, file_path, integer, refuse

NUM_PROCESSES = 2
_OURS = ("run.dir", "run.seed", "run.name", "run.resume", "experiment")
_STOP_SECONDS = 30  # for the ranks to finish their step and save


@dataclass(frozen=True)
class Arm:
    """One run of a comparison. `overrides` as for recipes.pretrain, without folder and seed.

    `resume`: go on in a folder that exists, instead of refusing it.
    """

    name: str
    seed: int
    folder: Path
    overrides: tuple[str, ...]
    resume: bool = False

    @property
    def arguments(self) -> list[str]:
        """All overrides of the run."""
        resume = ["run.resume=auto"] if self.resume and self.folder.exists() else []
        return [*self.overrides, f"run.seed={self.seed}", f"run.dir={self.folder}", *resume]


def check_shared(overrides: Sequence[str]) -> None:
    """Raises ValueError for a setting that belongs to the comparison, not to all of its arms."""
    for override in overrides:
        if override.lstrip("+~").split("=")[0] in _OURS:
            raise ValueError(f"{override}: is set by the comparison itself; use --seeds, --runs, or recipes.pretrain")


def for_dense(overrides: Sequence[str]) -> list[str]:
    """The settings that a model without experts has; it refuses the others."""
    about_experts = ("moe.", "moe=", "parallel.expert_")
    return [override for override in overrides if not override.lstrip("+~").startswith(about_experts)]


def described(arm: Arm) -> Config:
    """The complete description of an arm. Raises ValueError when it cannot run."""
    config = compose(arm.arguments)
    if found := problems(config, NUM_PROCESSES, launch_dir=Path.cwd()):
        raise ValueError("\n  - ".join([f"{arm.name}:", *found]))
    return prepare(config, NUM_PROCESSES, launch_dir=Path.cwd())


def train(arm: Arm) -> None:
    """Train in fresh processes (see `run_to_end`)."""
    run_to_end(command(arm), f"{arm.name}, seed {arm.seed}", arm.folder)


def run_to_end(words: Sequence[str], name: str, folder: Path) -> None:
    """Run a command that leaves a complete run `folder`, its output going where ours goes.

    Raises SystemExit with its exit code when it fails. Leaves no process behind, however it ends.
    """
    # A session of its own: Ctrl-C reaches this process alone, which passes it on once.
    child = subprocess.Popen(
        words, start_new_session=True, env=for_own_run(os.environ) | {STARTER: identity(os.getpid())}
    )
    try:
        code = child.wait()
    except BaseException:
        _stop(child)
        raise
    if code == 0 and not _complete(folder):
        code = 1  # deepspeed's launcher hides that it was killed by a signal
    if code:
        print(f"error: {name}: exit code {code}; see above, and {folder}", file=sys.stderr)
        raise SystemExit(code)


def _complete(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text()).get("complete", True)


def command(arm: Arm) -> list[str]:
    """What starts the arm."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(NUM_PROCESSES)]
    return [*launcher, "--master_port", str(free_port()), str(ROOT / "recipes" / "pretrain.py"), *arm.arguments]


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and the end of the terminal raise SystemExit(128 + number), so that `train` can clean up."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(child: subprocess.Popen) -> None:
    """Ask everything that `child` started to stop, wait, and end what is left."""
    import psutil

    def runs(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    try:
        outer = psutil.Process(child.pid)
        processes = [outer, *outer.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    deadline = time.monotonic() + _STOP_SECONDS
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)  # at SIGINT the launcher would print a traceback
        while any(map(runs, processes)) and time.monotonic() < deadline:
            child.poll()  # or it stays a zombie
            time.sleep(0.1)
    finally:  # also when the user presses Ctrl-C again
        for process in filter(runs, processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        child.wait()


class Numbers(argparse.Action):
    """Non-negative integers; what follows them (`--seeds 1 2 train.steps=5`) goes to `more`."""

    def __call__(self, parser, namespace, values, option_string=None):
        numbers = list(itertools.takewhile(str.isdecimal, values))
        if not numbers:
            parser.error(f"{option_string} {values[0]}: must be one or more integers from 0 up")
        setattr(namespace, self.dest, sorted({int(number) for number in numbers}))
        namespace.more = [*namespace.more, *values[len(numbers) :]]


def parser(module: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """What the command lines of comparisons share."""
    top = Parser(
        f"python -m {module}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.set_defaults(more=[])
    top.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="settings of all runs, as for recipes.pretrain")
    top.add_argument(
        "--steps", type=integer(1), metavar="N", help="train.steps of all runs (default: the experiment's)"
    )
    top.add_argument("--runs", type=file_path, metavar="FOLDER", help="folder for the run folders")
    top.add_argument("--json", type=file_path, metavar="FILE", help="results (default: in the folder of --out)")
    return top


def shared_overrides(arguments: argparse.Namespace) -> list[str]:
    """The settings of all runs from a command line of `parser`. Raises ValueError (see `check_shared`)."""
    overrides = [*arguments.overrides, *arguments.more]
    check_shared(overrides)
    return overrides if arguments.steps is None else [*overrides, f"train.steps={arguments.steps}"]


def run_command(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> int:
    """`run`, stoppable: exit code 0, or 2 with one message on bad input."""
    try:
        with stoppable():
            run(arguments)
    except (ValueError, OSError) as error:
        return refuse(error)
    return 0
