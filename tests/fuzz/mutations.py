"""What can happen to a run folder between two commands: one change drawn from a seed, by accident or by somebody who means it.

    mutate(random, run, other) changes the newest of two checkpoints of `run`, perhaps with files of `other`, another run

`signed` changes also write the sizes and checksums that fit, so that only the content can tell.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVIL_NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    7,
    2**31,
    2**53,
    2**63,
    2**64,
    -(2**63),
    10**30,
    10**400,
    0.5,
    -0.5,
    1e-300,
    1e300,
    1e39,
]
EVIL_VALUES = [*EVIL_NUMBERS, None, True, False, "", "x", "1", "\0", "\ud800", "a\nb\x1b[2J", "../../x", "日" * 300]
EVIL_VALUES += [[], {}, [1], [[1]], [None], {"a": 1}, {"": {}}, [0] * 5000]
EVIL_TEXTS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "[" * 100_000,
    "[" * 900 + "]" * 900,
    '{"a":' * 300 + "1" + "}" * 300,
]
EVIL_TEXTS += ["9" * 5000, '"\\ud800"', "", "{", "tru", "\0", "[1,]", '"' + "a" * 10**6 + '"']


@dataclass(frozen=True)
class Mutation:
    """`name` for messages; `detected`: whether what it changed can be told from what was written."""

    name: str
    detected: bool


def folders(run: Path) -> list[Path]:
    """The checkpoints, oldest first."""
    return sorted((run / "checkpoints").glob("step_*"))


def sign(checkpoint: Path, name: str) -> None:
    """Record the present size and checksum of a file in the manifest."""
    manifest, data = json.loads((checkpoint / "manifest.json").read_text()), (checkpoint / name).read_bytes()
    manifest["files"][name] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def mutate(draw: random.Random, run: Path, other: Path) -> Mutation:
    """Make one change, drawn at random."""
    kind = draw.choice(list(_KINDS))
    detail, detected = _KINDS[kind](draw, run, other)
    return Mutation(f"{kind} {detail}", detected)


def _file(draw: random.Random, checkpoint: Path) -> Path:
    return draw.choice(sorted(checkpoint.iterdir()))


def _flip(draw: random.Random, run: Path, other: Path) -> tuple[str, bool]:
    path = _file(draw, folders(run)[-1])
    data = bytearray(path.read_bytes())
    # Headers are small: half of the flips go there.
    at = draw.randrange(min(len(data), 2000)) if draw.random() < 0.5 else draw.randrange(len(data))
    bit = draw.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at} of {path.name}", True


def _resize(draw: random.Random, run: Path, other: Path) -> tuple[str, bool]:
    path = _file(draw, folders(run)[-1])
    size = path.stat().st_size
    new = draw.choice([0, 1, 8, size // 2, size - 1, size + 1, size + 4096, 1 << 32])
    os.truncate(path, new)
    return f"{path.name} from {size} to {new} bytes", True


def _replace(draw: random.Random, run: Path, other: Path) -> tuple[str, bool]:
    path = _file(draw, folders(run)[-1])
    how = draw.choice(
        ["nothing", "a folder", "a pipe", "a link to itself", "a link to the same bytes", "zeros", "a socket"]
    )
    data = path.read_bytes()
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how == "a pipe":
        os.mkfifo(path)
    elif how == "a link to itself":
        path.symlink_to(path.name)
    elif how == "a link to the same bytes":
        (run / "elsewhere").write_bytes(data)
        path.symlink_to(run / "elsewhere")
    elif how == "zeros":
        path.write_bytes(bytes(len(data)))
    elif how == "a socket":
        os.mknod(path, 0o140644)
    return f"{path.name} by {how}", True


def _swap(draw: random.Random, run: Path, other: Path) -> tuple[str, bool]:
    older, newest = folders(run)
    path = _file(draw, newest)
    source = draw.choice([older / path.name, folders(other)[-1] / path.name, _file(draw, newest), _file(draw, older)])
    if source.read_bytes() == path.read_bytes():
        return f"{path.name} by itself", True
    shutil.copyfile(source, path)
    return f"{path.name} by {source.name} of {source.parent.parent.parent.name}/{source.parent.name}", True


def _folder(draw: random.Random, run: Path, other: Path) -> tuple[str, bool]:
    older, newest = folders(run)
    root, latest = newest.parent, newest.parent / "latest"
    how = draw.choice(
        ["renamed", "copied", "swapped", "emptied", "a link", "latest", "latest kind", "left over", "of another name"]
    )
    if how == "renamed":
        newest.rename(root / "step_00000030")
    elif how == "copied":
        shutil.copytree(newest, root / "step_00000030")
    elif how == "swapped":
        older.rename(root / "aside"), newest.rename(older), (root / "aside").rename(newest)
    elif how == "emptied":
        shutil.rmtree(newest), newest.mkdir()
    elif how == "a link":
        newest.rename(run / "elsewhere"), newest.symlink_to(run / "elsewhere")
    elif how == "latest":
        latest.write_bytes(
            draw.choice([b"", b"\xff\0", b"step_00000099", b"../step_00000001", b"x" * 10**6, older.name.encode()])
        )
    elif how == "latest kind":
        latest.unlink()
        draw.choice([lambda: None, lambda: os.mkfifo(latest), latest.mkdir, lambda: latest.symlink_to(older.name)])()
    elif how == "left over":
        newest.rename(root / f".{newest.name}.{draw.choice(['replaced', 'deleting', 'partial'])}")
    else:
        newest.rename(root / draw.choice(["step_2", "step_00000002 ", "step_００００００００", "step_" + "9" * 19]))
    return how, True


def _numbers(draw: random.Random, run: Path, other: Path) -> tuple[str, bool]:
    """Weights or moments that are no numbers, with the right checksum."""
    path = draw.choice([p for p in sorted(folders(run)[-1].iterdir()) if p.name.startswith(("model", "optimizer"))])
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    at = start + 4 * draw.randrange((len(data) - start) // 4)
    value = draw.choice([float("nan"), float("inf"), float("-inf")])
    data[at : at + 4] = struct.pack("<f", value)
    path.write_bytes(data)
    sign(path.parent, path.name)
    return f"{value} at byte {at} of {path.name}", True


def _header(draw: random.Random, run: Path, other: Path) -> tuple[str, bool]:
    """Another safetensors header, with the right checksum."""
    path = draw.choice([p for p in sorted(folders(run)[-1].iterdir()) if p.suffix == ".safetensors"])
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    detail = _change(draw, header)
    text = json.dumps(header).encode()
    path.write_bytes(draw.choice([len(text), 0, 2**40]).to_bytes(8, "little") + text + data[8 + length :])
    sign(path.parent, path.name)
    return f"{path.name}: {detail}", False  # offsets of two tensors of one shape may be exchanged: other finite numbers


def _trainer(draw: random.Random, run: Path, other: Path) -> tuple[str, bool]:
    """Another trainer.json, with the right checksum."""
    path = folders(run)[-1] / "trainer.json"
    state = json.loads(path.read_text())
    if draw.random() < 0.2:
        text = _with_text(draw, state)
        detail = "text"
    else:
        detail, text = _change(draw, state), json.dumps(state)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    sign(path.parent, path.name)
    return detail, False


def _manifest(draw: random.Random, run: Path, other: Path) -> tuple[str, bool]:
    path = folders(run)[-1] / "manifest.json"
    state = json.loads(path.read_text())
    if draw.random() < 0.2:
        path.write_bytes(_with_text(draw, state).encode("utf-8", "surrogatepass"))
        return "text", False
    detail = _change(draw, state)
    path.write_text(json.dumps(state))
    return detail, False


def _places(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths of all values inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in ((*path, key), *_places(item, (*path, key)))]


def _change(draw: random.Random, value: Any) -> str:
    """Overwrite, remove, rename or add one value somewhere inside."""
    # By depth first: a description has hundreds of leaves, and few things at its top.
    places = _places(value)
    depth = draw.choice(sorted({len(place) for place in places}))
    *path, key = draw.choice([place for place in places if len(place) == depth])
    inner = value
    for step in path:
        inner = inner[step]
    how = draw.choice(["evil", "evil", "evil", "near", "remove", "twin"])
    if how == "remove":
        del inner[key]
    elif how == "twin" and isinstance(inner, dict):
        inner[f"{key}{draw.choice(['', '2', ' '])}x"] = inner[key]
    elif how == "near" and isinstance(inner[key], int | float):
        inner[key] = draw.choice([inner[key] + 1, inner[key] - 1, inner[key] * 2, -inner[key], inner[key] * 1000])
    else:
        inner[key] = draw.choice(EVIL_VALUES)
    return f"{how} {'.'.join(map(str, [*path, key]))}"[:200]


def _with_text(draw: random.Random, state: dict[str, Any]) -> str:
    """JSON in which one value of the top is text that Python's own writer would not write; or that text alone."""
    evil, key = draw.choice(EVIL_TEXTS), draw.choice(sorted(state))
    return evil if draw.random() < 0.2 else json.dumps(state | {key: "PLACE"}).replace('"PLACE"', evil)


_KINDS: dict[str, Callable[[random.Random, Path, Path], tuple[str, bool]]] = {
    "flip": _flip,
    "resize": _resize,
    "replace": _replace,
    "swap": _swap,
    "folder": _folder,
    "signed numbers": _numbers,
    "signed header": _header,
    "signed trainer": _trainer,
    "trainer": _trainer,
    "manifest": _manifest,
}
