"""What a checkpoint folder holds: the index of logical tensors, as plain JSON, checked without trust.

    shard records (one per file, from every rank) -> Manifest.build -> manifest.json -> Manifest.parse -> readers

    {"format": "sparse-pretraining-recipes/checkpoint", "version": 1, "step": 10, "committed_at": 1760000000.0,
     "files":   {FILE: {"kind": "model", "size": BYTES, "sha256": HEX}},
     "tensors": {KIND: {NAME: {"dtype": "F32", "shape": [8, 4],
                               "boxes": [{"file": FILE, "key": KEY, "offsets": [0, 0], "shape": [4, 4]}]}}}}

A *kind* is a namespace with its own files ("model", "optimizer", "rng"). A *name* is free text inside its kind: a
logical parameter, "exp_avg/" plus a logical parameter, a rank's generator. The boxes of a tensor cover its global shape
exactly, so any split (tensor parallel, experts, pipeline, one process) is the same tensor. Data types carry
safetensors' names.
"""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from recipes.files import parse_json

FORMAT = "sparse-pretraining-recipes/checkpoint"
VERSION = 1
TRAINER_KIND = "trainer"  # the kind of trainer.json, which holds no tensors

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

MAX_BOXES = 16384  # of one tensor; bounds the time of the overlap check

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Dims = tuple[int, ...]


@dataclass(frozen=True)
class StoredBox:
    """Where one box of a logical tensor lies: `key` in `file` holds its elements [offsets, offsets + shape)."""

    file: str
    key: str
    offsets: Dims
    shape: Dims


@dataclass(frozen=True)
class TensorEntry:
    """One logical tensor: `dtype` by safetensors' name, global `shape`, and the boxes known of it."""

    dtype: str
    shape: Dims
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class FileEntry:
    """One file of the folder: `size` in bytes, `sha256` of the whole file in hexadecimal."""

    kind: str
    size: int
    sha256: str


@dataclass(frozen=True)
class ShardRecord:
    """What one rank wrote into one file. Plain JSON both ways, so that ranks can send it to rank 0."""

    filename: str
    file: FileEntry
    tensors: dict[str, TensorEntry]

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(self, default=vars))

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        filename = _field(data, "filename", str, "shard record")
        where = f"shard record {filename!r}"
        tensors = _field(data, "tensors", dict, where)
        return cls(
            filename=check_file_name(filename),
            file=_parse_file(_field(data, "file", dict, where), where),
            tensors={name: _parse_tensor(entry, f"{where}: tensor {name!r}") for name, entry in tensors.items()},
        )


@dataclass(frozen=True)
class Manifest:
    """The checked index of one checkpoint. `committed_at` is Unix time in seconds and orders checkpoints by age."""

    step: int
    committed_at: float
    files: dict[str, FileEntry]
    tensors: dict[str, dict[str, TensorEntry]]

    @classmethod
    def build(cls, step: int, records: Iterable[ShardRecord], others: Mapping[str, FileEntry]) -> Self:
        """Join the shards of all ranks; `others` are files without tensors. ValueError on a hole or an overlap."""
        files = dict(others)
        tensors: dict[str, dict[str, TensorEntry]] = {}
        for record in records:
            if record.filename in files:
                raise ValueError(f"checkpoint file {record.filename}: written by two ranks; give each its own name")
            files[record.filename] = record.file
            of_kind = tensors.setdefault(record.file.kind, {})
            for name, new in record.tensors.items():
                old = of_kind.setdefault(name, TensorEntry(new.dtype, new.shape, ()))
                if (old.dtype, old.shape) != (new.dtype, new.shape):
                    raise ValueError(
                        f"{record.file.kind} tensor {name!r}: {record.filename} says {new.dtype} {list(new.shape)}, "
                        f"another rank {old.dtype} {list(old.shape)}; all ranks must give the same global tensor"
                    )
                of_kind[name] = TensorEntry(old.dtype, old.shape, old.boxes + new.boxes)
        manifest = cls(step, time.time(), files, tensors)
        manifest.check()
        return manifest

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **vars(self)}, default=vars, ensure_ascii=False)

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Read a manifest from an untrusted source. Raises ValueError naming the field that is wrong."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from error
        if _field(data, "format", str, "manifest") != FORMAT:
            raise ValueError(f"'format' is {data['format']!r:.80}, not {FORMAT!r}")
        if _field(data, "version", int, "manifest") != VERSION:
            raise ValueError(f"'version' is {data['version']}; this program reads version {VERSION}")
        manifest = cls(
            step=_field(data, "step", int, "manifest"),
            committed_at=_field(data, "committed_at", float, "manifest"),
            files={
                check_file_name(name): _parse_file(entry, f"file {name!r}")
                for name, entry in _field(data, "files", dict, "manifest").items()
            },
            tensors={
                kind: {name: _parse_tensor(entry, f"{kind} tensor {name!r:.200}") for name, entry in of_kind.items()}
                for kind, of_kind in _field(data, "tensors", dict, "manifest").items()
                if _is_dict(of_kind, f"tensors of kind {kind!r:.80}")
            },
        )
        manifest.check()
        return manifest

    def check(self) -> None:
        """Everything between fields: each box in a listed file of its kind, stored once, and each tensor covered."""
        if self.step < 0 or not math.isfinite(self.committed_at):
            raise ValueError(f"'step' {self.step} and 'committed_at' {self.committed_at} must be >= 0 and finite")
        used_keys: set[tuple[str, str]] = set()
        used_bytes: Counter[str] = Counter()
        for kind, of_kind in self.tensors.items():
            for name, entry in of_kind.items():
                where = f"{kind} tensor {name!r}"
                for box in entry.boxes:
                    if box.file not in self.files or self.files[box.file].kind != kind:
                        raise ValueError(f"{where}: its file {box.file!r} is not among the files of kind {kind!r}")
                    if (box.file, box.key) in used_keys:
                        raise ValueError(f"{where}: key {box.key!r} of {box.file} is used twice")
                    used_keys.add((box.file, box.key))
                    used_bytes[box.file] += math.prod(box.shape) * DTYPES[entry.dtype].itemsize
                check_cover(where, entry.shape, entry.boxes)
        for name, num_bytes in used_bytes.items():  # also bounds what a reader is made to allocate
            if num_bytes >= self.files[name].size:
                raise ValueError(f"file {name!r}: {self.files[name].size} bytes cannot hold boxes of {num_bytes} bytes")


def check_cover(where: str, shape: Dims, boxes: tuple[StoredBox, ...]) -> None:
    """Raise ValueError unless `boxes` tile `shape` exactly: all inside, none overlapping, no element missing."""
    for box in boxes:
        check_inside(where, shape, box.offsets, box.shape)
    if len(boxes) > MAX_BOXES:
        raise ValueError(f"{where}: {len(boxes)} boxes, at most {MAX_BOXES} are allowed")
    total = math.prod(shape)
    if total == 0 and len(boxes) != 1:
        raise ValueError(f"{where}: an empty tensor {list(shape)} is one box, not {len(boxes)}")
    if total > 0 and any(0 in box.shape for box in boxes):
        raise ValueError(f"{where}: one of its boxes is empty; a rank that holds nothing of it writes no box")
    if len(boxes) > 1:
        starts = np.array([box.offsets for box in boxes], dtype=np.int64)
        ends = starts + np.array([box.shape for box in boxes], dtype=np.int64)
        for i in range(len(boxes) - 1):
            hits = np.flatnonzero(((starts[i] < ends[i + 1 :]) & (starts[i + 1 :] < ends[i])).all(axis=1))
            if hits.size:
                a, b = boxes[i], boxes[i + 1 + int(hits[0])]
                raise ValueError(f"{where}: boxes overlap: {a.key!r} of {a.file} and {b.key!r} of {b.file}")
    stored = sum(math.prod(box.shape) for box in boxes)
    if stored != total:
        raise ValueError(f"{where}: a hole: the boxes hold {stored} of the {total} elements of {list(shape)}")


def check_inside(where: str, global_shape: Dims, offsets: Dims, shape: Dims) -> None:
    """Raise ValueError unless [offsets, offsets + shape) lies inside `global_shape`."""
    if not len(offsets) == len(shape) == len(global_shape) or not all(
        o >= 0 and s >= 0 and o + s <= g for o, s, g in zip(offsets, shape, global_shape, strict=False)
    ):
        raise ValueError(f"{where}: box {list(offsets)} + {list(shape)} is not inside {list(global_shape)}")


def check_file_name(name: str) -> str:
    """A plain name: no folder, no dot in front, only portable characters. Returns it or raises ValueError."""
    if not _FILE_NAME.fullmatch(name) or name == "manifest.json":
        raise ValueError(f"file name {name!r:.200} is not a plain name of letters, digits, '.', '_' and '-'")
    return name


def check_kind(kind: str) -> str:
    """A lower-case identifier. Returns it or raises ValueError."""
    if not _KIND.fullmatch(kind):
        raise ValueError(f"kind {kind!r:.80} must be lower-case letters, digits and '_'")
    return kind


def _field(data: Any, key: str, of_type: type, where: str) -> Any:
    """`data[key]` if it has exactly this type (so that true is no number); else ValueError."""
    if _is_dict(data, where) and key not in data:
        raise ValueError(f"{where}: field {key!r} is missing")
    if type(data[key]) is not of_type:
        raise ValueError(f"{where}: {key!r} must be {of_type.__name__}, not {data[key]!r:.80}")
    return data[key]


def _is_dict(data: Any, where: str) -> bool:
    if type(data) is not dict:
        raise ValueError(f"{where}: must be an object, not {data!r:.80}")
    return True


def _dims(data: dict, key: str, where: str) -> Dims:
    dims = data.get(key)
    if not isinstance(dims, list | tuple) or not all(type(n) is int and 0 <= n < 2**62 for n in dims):
        raise ValueError(f"{where}: {key!r} must be a list of integers in [0, 2^62), not {dims!r:.80}")
    return tuple(dims)


def _parse_file(data: Any, where: str) -> FileEntry:
    entry = FileEntry(*(_field(data, key, of_type, where) for key, of_type in _FILE_FIELDS))
    check_kind(entry.kind)
    if entry.size < 0 or not _SHA256.fullmatch(entry.sha256):
        raise ValueError(f"{where}: size {entry.size} must be >= 0 and sha256 64 hexadecimal digits")
    return entry


_FILE_FIELDS = (("kind", str), ("size", int), ("sha256", str))


def _parse_tensor(data: Any, where: str) -> TensorEntry:
    if (dtype := _field(data, "dtype", str, where)) not in DTYPES:
        raise ValueError(f"{where}: dtype {dtype!r:.80} is none of {', '.join(DTYPES)}")
    boxes = data.get("boxes")
    if not isinstance(boxes, list | tuple):
        raise ValueError(f"{where}: 'boxes' must be a list, not {boxes!r:.80}")
    return TensorEntry(dtype, _dims(data, "shape", where), tuple(_parse_box(box, where) for box in boxes))


def _parse_box(data: Any, where: str) -> StoredBox:
    return StoredBox(
        file=_field(data, "file", str, where),
        key=_field(data, "key", str, where),
        offsets=_dims(data, "offsets", where),
        shape=_dims(data, "shape", where),
    )
