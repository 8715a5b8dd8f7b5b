"""Which checkpoint is loaded: the first of several of which every byte that is needed is what was written.

    run folder | its checkpoints/ | one step_*/ -> places -> folders, best first -> sound | sound_together -> Checkpoint

A missing file, a wrong size, changed bytes and parts that do not fit each other are all one: the next older one is tried, and
each that was passed over is said in a line. Who names one step gets that one, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from recipes import collectives
from recipes.checkpoint.format import MANIFEST, MODEL, Checkpoint, open_checkpoint
from recipes.checkpoint.manifest import TRAINER_KIND
from recipes.checkpoint.rotate import candidates, check_name
from recipes.checkpoint.trainer import check_trainer

WEIGHTS = (MODEL, TRAINER_KIND)  # what a model is built from


@dataclass(frozen=True)
class Places:
    """Folders that may hold the wanted checkpoint, best first, and what was found wrong already."""

    folders: list[Path]
    passed_over: list[str] = field(default_factory=list)


def places(path: Path) -> Places:
    """Where `path` may mean: a run folder or its `checkpoints` (the newest step first), or the folder of one step.

    Raises ValueError when there is nothing.
    """
    if (path / MANIFEST).is_symlink() or (path / MANIFEST).exists():
        return Places([path])
    found = Places(*candidates(path / "checkpoints" if (path / "checkpoints").is_dir() else path))
    if not found.folders:
        raise ValueError(f"{path}: no checkpoint here; name a run folder, its checkpoints folder or one of its step_*")
    return found


def sound(found: Places, kinds: Iterable[str], say: Callable[[str], object]) -> Checkpoint:
    """The first of the places whose files of `kinds` are as they were written; `say` hears of the others.

    Raises ValueError with every reason when there is none.
    """
    return _first(found, say, lambda path: _open(path, kinds, (0, 1)))


def sound_together(found: Places, say: Callable[[str], object], kinds: Iterable[str] | None = None) -> Checkpoint:
    """`sound` of a whole checkpoint, or of its files of `kinds`, the same on all ranks, each of which has looked at its share of
    the bytes (a collective)."""
    part = dist.get_rank(), dist.get_world_size()

    def open_together(path: Path) -> tuple[Checkpoint | None, list[str]]:
        checkpoint, problems = _open(path, kinds, part)
        answers = collectives.gather_json(problems)
        problems = [problem for answer in answers for problem in answer]
        if checkpoint is not None and not problems:
            files = checkpoint.manifest.files.items()
            checkpoint.trusted.update(name for name, entry in files if kinds is None or entry.kind in kinds)
        return checkpoint, list(dict.fromkeys(problems))

    return _first(found, say, open_together)


def _first(
    found: Places,
    say: Callable[[str], object],
    open_at: Callable[[Path], tuple[Checkpoint | None, list[str]]],
) -> Checkpoint:
    reasons = [_line(reason) for reason in found.passed_over]
    for path in found.folders:
        checkpoint, problems = open_at(path)
        if checkpoint is not None and not problems:
            for reason in reasons:
                say(f"passed over: {reason}")
            return checkpoint
        reasons.append(_line("; ".join(problems)))
    if len(reasons) == 1:
        raise ValueError(reasons[0])
    few = f"no checkpoint of {len(reasons)} is complete and undamaged"
    raise ValueError("\n  ".join([f"{few}; move the folder away to start anew:", *reasons]))


def _open(path: Path, kinds: Iterable[str] | None, part: tuple[int, int]) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint and what is wrong with this part of it. The first part has trainer.json to judge too."""
    try:
        checkpoint = open_checkpoint(path)
        check_name(path, checkpoint)
        problems = checkpoint.verify(kinds, part=part)
        if part[0] == 0 and not problems:
            check_trainer(checkpoint)
    except ValueError as error:
        return None, [str(error)]
    return checkpoint, problems


def _line(text: str) -> str:
    """On one line, and of characters that every terminal shows."""
    return " ".join(text.encode("utf-8", "backslashreplace").decode().split())
