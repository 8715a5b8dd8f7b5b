"""Where a run lives and what it starts from: decided before anything is built, refused without a trace.

description, data -> decide_start() -> Start: run folder, checkpoint, what to tell
                  -> describe_run() -> RUN/config.yaml  environment.json  tokenizer.*
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from patches.registry import applied
from recipes import collectives
from recipes.checkpoint.choose import WEIGHTS, Places, places, sound_together
from recipes.checkpoint.format import Checkpoint
from recipes.checkpoint.rotate import candidates
from recipes.config import CheckpointLoad, Config, Resume
from recipes.data import identity
from recipes.data.dataset import DatasetInfo, copy_tokenizer
from recipes.description import to_yaml
from recipes.files import own_folder, replace_text
from recipes.run_folder import RunFolder
from recipes.telemetry.environment import describe_environment
from recipes.telemetry.summary import write_json
from recipes.train.resume import check_resume, check_start


@dataclass(frozen=True)
class Start:
    """The run folder, the checkpoint to start from (None: from nothing), whether from its weights alone, and what to tell.

    `data`: the record of the text that is read. `claim` keeps other jobs out of the folder; it is rank 0's alone.
    """

    folder: Path
    checkpoint: Checkpoint | None
    weights_only: bool
    notes: list[str]
    data: dict[str, Any]
    claim: RunFolder | None

    @property
    def resumes(self) -> bool:
        """Whether the checkpoint is this run's own."""
        return self.checkpoint is not None and self.checkpoint.path.parents[1] == self.folder

    @property
    def step(self) -> int:
        """Steps that are done."""
        return 0 if self.checkpoint is None or self.weights_only else self.checkpoint.step

    def abandon(self) -> None:
        """Leave no trace, in the folder, of a job that was refused later."""
        if self.claim is not None:
            self.claim.abandon()


def decide_start(config: Config, dataset: DatasetInfo) -> Start:
    """Rank 0 claims the run folder; all ranks look at the bytes of the checkpoint; what is refused leaves no trace (a collective).

    Raises ValueError, on every rank, for a folder that is taken, and for a checkpoint that is damaged or of another run.
    """
    claim: RunFolder | None = None

    def take() -> dict[str, Any]:
        nonlocal claim
        claim = RunFolder(config.run)
        return {"folder": str(claim.path), "data": identity.record(dataset)}

    try:
        taken = on_rank_zero(take, config)
        folder = Path(taken["folder"])
        checkpoint = _choose(folder, config)
        start = Start(folder, checkpoint, False, [], taken["data"], claim)
        notes = on_rank_zero(lambda: _check(start, config, dataset), config)
    except ValueError:
        if claim is not None:
            claim.abandon()
        raise
    weights_only = checkpoint is not None and not start.resumes and config.checkpoint.load is CheckpointLoad.weights
    return Start(folder, checkpoint, weights_only, notes, taken["data"], claim)


def on_rank_zero(action: Callable[[], Any], config: Config) -> Any:
    """The result of `action` on rank 0, on every rank; what it refuses is a ValueError on every rank (a collective)."""
    outcome: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            outcome = {"result": action()}
        except ValueError as error:
            outcome = {"problem": str(error)}
        except OSError as error:
            why = f"cannot be written ({error}); make room, or choose another folder"
            outcome = {"problem": f"run.dir={config.run.dir or 'outputs'}: {why}"}
    outcome = collectives.broadcast_json(outcome)
    if "problem" in outcome:
        raise ValueError(outcome["problem"])
    return outcome["result"]


def _choose(folder: Path, config: Config) -> Checkpoint | None:
    """The checkpoint to go on from, or to start from, undamaged; None for a run that begins."""

    def look() -> dict[str, Any]:
        found = _places(folder, config)
        return {"folders": [str(path) for path in found.folders], "passed_over": found.passed_over}

    looked = on_rank_zero(look, config)
    found = Places([Path(path) for path in looked["folders"]], looked["passed_over"])
    if not found.folders:
        return None
    mine = any(path.parents[1] == folder for path in found.folders)
    weights_only = not mine and config.checkpoint.load is CheckpointLoad.weights
    rank_zero = dist.get_rank() == 0
    say = (lambda line: print(line, flush=True)) if rank_zero else (lambda line: None)
    return sound_together(found, say, WEIGHTS if weights_only else None)


def _places(folder: Path, config: Config) -> Places:
    """Where the checkpoint may lie."""
    source = config.checkpoint.load_from
    if config.run.resume is Resume.auto:
        found = Places(*candidates(own_folder(folder / "checkpoints", make=False), config.checkpoint.load_step))
        if found.folders:
            return found
        print(f"no checkpoint in {folder}: starting at {source or 'step 1'}", flush=True)
    if source is None:
        return Places([])
    return places(Path(source).absolute())


def _check(start: Start, config: Config, dataset: DatasetInfo) -> list[str]:
    """What to tell about the checkpoint. Raises ValueError when it is of another run, or the folder is not the run's alone."""
    for name in ("checkpoints", "profile", "wandb"):
        own_folder(start.folder / name, make=False)
    if start.checkpoint is None:
        return []
    if not start.resumes:
        return check_start(config, dataset, start.checkpoint)
    source = config.checkpoint.load_from
    unused = [] if source is None else [f"checkpoint.load_from={source} is not read again"]
    return check_resume(config, dataset, start.checkpoint) + unused


def describe_run(folder: Path, config: Config, dataset: DatasetInfo) -> None:
    """Write what the run is, where it runs, and the tokenizer of its ids. No link is written through."""
    replace_text(folder / "config.yaml", to_yaml(config))
    write_json(folder / "environment.json", describe_environment(applied()))
    if dataset.has_tokenizer():
        copy_tokenizer(dataset.tokenizer(), folder)
