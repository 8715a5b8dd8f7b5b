"""The life of checkpoint folders: begin, commit, find, rotate. One process (rank 0) does all of it.

    begin -> .step_00000010.partial -> (all ranks: write_shard) -> commit -> step_00000010, then `latest` -> rotate

Every change that a reader can see is one rename of something complete and flushed, so a kill at any moment leaves the
state before or the state after. Names that start with a dot are never selected, with one exception: a step that is
written again moves its older self to `.step_N.replaced`, which stands in while a kill has left no `step_N`.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from recipes.checkpoint.format import MANIFEST, TRAINER, Checkpoint, open_checkpoint, write_json
from recipes.checkpoint.manifest import Manifest, ShardRecord
from recipes.files import own_folder, read_small

LATEST = "latest"
_FOLDER = re.compile(r"step_(\d{8,18})|\.step_(\d{8,18})\.replaced", re.ASCII)
_PARTIAL = re.compile(r"\.step_(\d{8,18})\.partial", re.ASCII)
_LEFTOVER = re.compile(r"\.step_\d{8,18}\.(partial|deleting)|\.latest\.new", re.ASCII)


def step_name(step: int) -> str:
    """The folder name of a step."""
    return f"step_{step:08d}"


def begin(checkpoints_dir: Path, step: int) -> Path:
    """Make the empty temporary folder that all ranks write step `step` into; what killed runs left over is removed.

    Only one run at a time may write below `checkpoints_dir`.
    """
    own_folder(checkpoints_dir)
    _clean(checkpoints_dir)
    partial = checkpoints_dir / f".{step_name(step)}.partial"
    partial.mkdir()
    return partial


def commit(partial: Path, records: Sequence[ShardRecord], trainer_state: dict[str, Any]) -> Path:
    """Turn a temporary folder with all shards into the checkpoint that `latest` names; returns its new path.

    Raises ValueError, and leaves everything selectable as it was, when a shard is missing, has another size or belongs
    to no record, when the boxes of a tensor leave a hole or overlap, or when `trainer_state` would not survive JSON.
    """
    match = _PARTIAL.fullmatch(partial.name)
    assert match, f"{partial} was not made by begin()"
    trainer = write_json(partial / TRAINER, _exact_json(trainer_state))
    manifest = Manifest.build(int(match[1]), records, {TRAINER: trainer})
    Checkpoint(partial, manifest).require(*{entry.kind for entry in manifest.files.values()})
    if unknown := {p.name for p in partial.iterdir() if not p.name.startswith(".")} - manifest.files.keys():
        raise ValueError(f"{partial}: {sorted(unknown)[0]} belongs to no shard record; a rank's record was lost")
    write_json(partial / MANIFEST, manifest.to_json())
    _flush_folder(partial)
    final = partial.with_name(step_name(manifest.step))
    _move_in(partial, final)
    _point_latest(final)
    return final


def find_checkpoint(
    checkpoints_dir: Path, step: int | None = None, kinds: Iterable[str] | None = None
) -> tuple[Path | None, list[str]]:
    """The checkpoint to load, and why others were passed over.

    `step` None: the one `latest` names, else the one committed last of those that are complete; (None, []) when there
    is none at all. `kinds`: what must be there to count as complete (default: everything; ("model",) for weights only).
    Raises ValueError when the step asked for is missing or incomplete, and when there are checkpoints but none is
    complete, so that nobody starts from scratch unknowingly.
    """
    found, skipped = candidates(checkpoints_dir, step)
    for path in found:
        if not (problems := _problems(path, kinds)):
            return path, skipped
        skipped += problems
    if step is not None:
        raise ValueError("; ".join(skipped))
    if skipped:
        why = "; ".join(skipped)
        raise ValueError(f"{checkpoints_dir}: no checkpoint is complete: {why}; move the folder away to start anew")
    return None, []


def candidates(checkpoints_dir: Path, step: int | None = None) -> tuple[list[Path], list[str]]:
    """Where to look for a checkpoint: first what `latest` names, then what was committed last; and what is wrong with `latest`.

    Nothing is known of them but their age: whoever takes one checks it. Raises ValueError when the `step` asked for is not there.
    """
    folders = _folders(checkpoints_dir)
    if step is not None:
        if step not in folders:
            there = ", ".join(map(str, sorted(folders))) or "none"
            raise ValueError(f"checkpoint step {step}: not in {checkpoints_dir}; the steps there are: {there}")
        return [folders[step]], []

    def age(step: int) -> tuple[float, int]:
        try:
            return open_checkpoint(folders[step]).manifest.committed_at, step
        except ValueError:
            return math.inf, step  # what cannot be opened is said first

    ordered = sorted(folders, key=age, reverse=True)
    skipped = []
    if folders:
        try:
            latest = _read_latest(checkpoints_dir, folders)
            ordered = [latest, *(step for step in ordered if step != latest)]
        except ValueError as error:
            skipped.append(str(error))
    return [folders[step] for step in ordered], skipped


def check_name(folder: Path, checkpoint: Checkpoint) -> None:
    """Raise ValueError when a folder is called like another step than the one that it holds."""
    if _step_of(folder) not in (None, checkpoint.step):
        raise ValueError(f"{folder}: the manifest is of step {checkpoint.step}")


def rotate(checkpoints_dir: Path, keep: int, protect: Iterable[Path] = ()) -> list[Path]:
    """Delete the complete checkpoints that were committed first until `keep` are left; returns what was deleted.

    Never deletes what `latest` names (the one just committed) nor those in `protect` (the one resumed from). An
    incomplete one neither counts nor goes: somebody may want its weights. Age is the time of commit, not the step, so a
    higher step of another run does not push a new one out. Raises ValueError for keep < 1, and, with nothing deleted,
    when the checkpoint that `latest` names is not complete.
    """
    if keep < 1:
        raise ValueError(f"checkpoint.keep={keep}: must be >= 1; 1 keeps only the newest checkpoint")
    folders = _folders(checkpoints_dir)
    latest = _read_latest(checkpoints_dir, folders)
    complete, problems = _complete(folders)
    if latest not in complete:
        raise ValueError(f"nothing was deleted, as the newest checkpoint is not complete: {'; '.join(problems)}")
    root = checkpoints_dir.resolve()
    protected = {_step_of(path) for path in protect if path.resolve().parent == root}
    others = [step for step in complete if step != latest]
    surplus = others[: max(0, len(others) - (keep - 1))]
    deleted = [folders[step] for step in surplus if step not in protected]
    for folder in deleted:
        _delete(folder)
    return deleted


def _folders(checkpoints_dir: Path) -> dict[int, Path]:
    """Every folder that may hold a checkpoint, by step. Links to folders are left out: they are not ours to delete."""
    folders: dict[int, Path] = {}
    if not checkpoints_dir.is_dir():
        return folders
    for path in sorted(checkpoints_dir.iterdir()):  # ".step_N.replaced" sorts first, so "step_N" wins
        step = _step_of(path)
        if step is not None and path.is_dir() and not path.is_symlink():
            folders[step] = path
    return folders


def _step_of(path: Path) -> int | None:
    """The step in the name of a folder that may hold a checkpoint; None for other names."""
    match = _FOLDER.fullmatch(path.name)
    return int(match[1] or match[2]) if match else None


def _complete(folders: dict[int, Path], kinds: Iterable[str] | None = None) -> tuple[list[int], list[str]]:
    """The steps that are complete in the files of `kinds`, oldest commit first, and what is wrong with the others."""
    committed, problems = {}, []
    for step, path in folders.items():
        if why := _problems(path, kinds):
            problems += why
        else:
            committed[step] = open_checkpoint(path).manifest.committed_at
    return sorted(committed, key=lambda step: (committed[step], step)), problems


def _problems(path: Path, kinds: Iterable[str] | None = None) -> list[str]:
    """Why the folder is no complete checkpoint, as far as sizes tell, of the step in its name; an empty list when it is."""
    try:
        checkpoint = open_checkpoint(path)
        check_name(path, checkpoint)
    except ValueError as error:
        return [str(error)]
    return checkpoint.verify(kinds, checksums=False)


def _read_latest(checkpoints_dir: Path, folders: dict[int, Path]) -> int:
    """The step that `latest` names; ValueError when it names none of `folders`."""
    name = read_small(checkpoints_dir / LATEST, limit=64).decode("ascii", "replace").strip()
    step = next((step for step in folders if step_name(step) == name), None)
    if step is None:
        raise ValueError(f"{checkpoints_dir / LATEST}: names {name!r}, which is no checkpoint there")
    return step


def _point_latest(folder: Path) -> None:
    new = folder.with_name(f".{LATEST}.new")
    new.unlink(missing_ok=True)
    write_json(new, folder.name + "\n")
    os.replace(new, folder.with_name(LATEST))
    _flush_folder(folder.parent)


def _move_in(partial: Path, final: Path) -> None:
    """Give a complete folder its name; an older checkpoint of the same step is deleted only afterwards."""
    old = partial.with_name(f".{final.name}.replaced")
    if os.path.lexists(final):  # a link too, which is moved aside itself
        final.rename(old)
    partial.rename(final)
    _flush_folder(final.parent)
    if os.path.lexists(old):
        _delete(old)


def _delete(folder: Path) -> None:
    """Delete a folder that may be selectable: it first loses its name, so that it is never seen half deleted."""
    doomed = folder.with_name(f".{folder.name.lstrip('.').removesuffix('.replaced')}.deleting")
    folder.rename(doomed)
    _remove(doomed)


def _remove(folder: Path) -> None:
    """Delete a folder that is never selected; of a link only itself. What stays, because a reader on a network disk has it
    open, must not end the run: the next begin() tries again."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _clean(checkpoints_dir: Path) -> None:
    """Remove or finish what a killed process left over."""
    for path in sorted(checkpoints_dir.iterdir()):
        match = _FOLDER.fullmatch(path.name)
        if match and match[2]:
            final = path.with_name(step_name(int(match[2])))
            if final.exists():
                _delete(path)
            else:
                path.rename(final)
        elif _LEFTOVER.fullmatch(path.name):
            if path.is_dir() or path.is_symlink():
                _remove(path)
            else:
                path.unlink()


def _exact_json(state: dict[str, Any]) -> str:
    """JSON that reads back as the same value; ValueError for tuples, number keys, NaN and whatever else changes."""
    try:
        text = json.dumps(state, allow_nan=False, ensure_ascii=False, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{TRAINER}: the trainer state is not plain JSON: {error}") from error
    if (back := json.loads(text)) != state:
        changed = sorted(key for key in back.keys() | state.keys() if back.get(key) != state.get(key))
        raise ValueError(f"{TRAINER}: {changed} would read back changed; use lists, string keys and finite numbers")
    return text


def _flush_folder(folder: Path) -> None:
    """Return only when the names in `folder` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
