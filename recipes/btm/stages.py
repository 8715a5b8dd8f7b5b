"""Artefacts of a run: folders made once from named inputs, and made again only when an input has changed.

    inputs (settings, digests of other artefacts) -> Store.get -> digest of what lies in the folder

Each folder holds artefact.json: its inputs and, once complete, the digest of its content. A folder whose inputs are the same
but which is not complete is gone on with; one whose inputs are others is removed and made anew. Digests depend on content
alone, so that what was deleted and made again bit for bit leaves all that was made from it untouched.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.config import BtmStage
from recipes.files import own_folder, parse_json
from recipes.telemetry.summary import write_json

STAMP = "artefact.json"


def digest(value: Any) -> str:
    """Of a plain JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def digest_files(files: Iterable[Path], root: Path) -> str:
    """Of names (relative to `root`) and bytes of files; ValueError for a missing one."""
    found = {}
    for path in sorted(files):
        try:
            with path.open("rb") as stream:
                found[str(path.relative_to(root))] = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
    return digest(found)


def digest_folder(folder: Path) -> str:
    """Of all files in a folder but its stamp; ValueError when there is none."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != STAMP]
    if not files:
        raise ValueError(f"{folder}: is empty")
    return digest_files(files, folder)


@dataclass(frozen=True)
class Artefact:
    """One folder below the run folder. `inputs`: plain JSON that determines its content. `content`: digest of it.

    `content` raises ValueError when the folder is incomplete or damaged.
    """

    path: str
    stage: BtmStage
    inputs: Mapping[str, Any]
    content: Callable[[Path], str] = digest_folder


class Store:
    """The artefacts of one run folder. `stages`: those that may make something; the others must have been run before."""

    def __init__(self, folder: Path, stages: Iterable[BtmStage], say: Callable[[str], None]):
        self.folder, self.stages, self.say = folder, frozenset(stages), say

    def __call__(self, artefact: Artefact, make: Callable[[Path], None]) -> str:
        """The digest of the artefact, made now if need be. Raises ValueError when its stage is not to be run."""
        found = self.current(artefact)
        if found is None:
            make(self.begin(artefact))
            found = self.finish(artefact)
        return found

    def current(self, artefact: Artefact) -> str | None:
        """Its digest when it is complete, unchanged, and of these inputs; else None. Says which."""
        folder = self.folder / artefact.path
        stamp = _read(folder)
        if stamp is None:
            return None
        if changed := _changes(stamp["inputs"], _plain(artefact.inputs)):
            self.say(f"{artefact.path}: {', '.join(changed)} changed, so it is made again")
            return None
        try:
            found = None if stamp["content"] is None else artefact.content(folder)
        except ValueError as error:
            self.say(f"{artefact.path}: {error}; it is made again")
            return None
        if found is None or found != stamp["content"]:
            self.say(f"{artefact.path}: {'was not finished' if found is None else 'its files were changed'}")
            return None
        self.say(f"{artefact.path}: unchanged")
        return found

    def begin(self, artefact: Artefact) -> Path:
        """The folder to make it in: a new one, or one that was begun from the same inputs."""
        if artefact.stage not in self.stages:
            raise ValueError(f"{artefact.path} is needed: add {artefact.stage.value} to btm.stages, or run that before")
        folder = own_folder(self.folder / artefact.path, make=False)
        stamp = _read(folder)
        if stamp is None and folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder}: holds something that is not of this run; move it away")
        if stamp is not None and _changes(stamp["inputs"], _plain(artefact.inputs)):
            shutil.rmtree(folder)
        own_folder(folder)
        self._stamp(artefact, None)
        return folder

    def finish(self, artefact: Artefact) -> str:
        """Record that it is complete; returns its digest."""
        found = artefact.content(self.folder / artefact.path)
        self._stamp(artefact, found)
        return found

    def _stamp(self, artefact: Artefact, content: str | None) -> None:
        record = {"stage": artefact.stage.value, "inputs": _plain(artefact.inputs), "content": content}
        write_json(self.folder / artefact.path / STAMP, record)


def recorded_inputs(folder: Path) -> Any:
    """The inputs that the stamp of a folder records; None when it has no stamp."""
    stamp = _read(folder)
    return None if stamp is None else stamp["inputs"]


def _plain(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    return json.loads(json.dumps(inputs))


def _read(folder: Path) -> dict[str, Any] | None:
    """The stamp of a folder, None when it has none; a damaged one is that of unknown inputs."""
    try:
        stamp = parse_json((folder / STAMP).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        stamp = None
    known = isinstance(stamp, dict) and {"inputs", "content"} <= stamp.keys()
    return stamp if known else {"inputs": "a damaged record", "content": None}


def _changes(old: Any, new: Any, key: str = "") -> list[str]:
    """Dotted names of the inputs that differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        return [c for name in names for c in _changes(old.get(name), new.get(name), f"{key}.{name}" if key else name)]
    return [] if old == new else [key or "everything"]
