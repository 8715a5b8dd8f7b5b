"""The files of a canonical checkpoint: each rank writes its boxes of logical tensors; anybody reads any part back.

    boxes of one rank -> write_shard -> one safetensors file + its ShardRecord -> (rank 0) rotate.commit
    folder -> open_checkpoint -> Checkpoint.read(kind, name, offsets, shape) -> tensor, put together from its boxes

    step_00000010/
        model-00000-of-00002.safetensors        fp32 masters
        optimizer-00000-of-00002.safetensors    "exp_avg/NAME", "exp_avg_sq/NAME" of each parameter NAME
        rng-00000-of-00002.safetensors          state that belongs to a rank
        trainer.json                            step, data position, schedule, config
        manifest.json                           what lies where (recipes.checkpoint.manifest); written last

Neither engine nor process group is needed, and no file is trusted: before the first value of a file is read, its size, the
SHA-256 of all its bytes, its header and, of weights and moments, its numbers are checked. What does not fit is a ValueError.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from recipes.checkpoint.manifest import (
    DTYPE_NAMES,
    DTYPES,
    TRAINER_KIND,
    Dims,
    FileEntry,
    Manifest,
    ShardRecord,
    StoredBox,
    TensorEntry,
    check_file_name,
    check_inside,
    check_kind,
)
from recipes.files import open_regular, parse_json, read_small

MANIFEST = "manifest.json"
TRAINER = "trainer.json"
MODEL, OPTIMIZER, RNG = "model", "optimizer", "rng"  # the kinds of a training run
FINITE_KINDS = (MODEL, OPTIMIZER)  # no number of theirs is infinite or no number
# Parsed JSON takes up to twenty times the bytes of its text, so that what may be parsed is bounded by what lies beside it.
_MAX_JSON_BYTES = 1 << 24  # of trainer.json; of a manifest of about 60,000 boxes
_FILE_BYTES_PER_JSON_BYTE = 32  # of larger manifests
_MAX_HEADER_BYTES = 100_000_000  # the limit of every safetensors reader
_CHUNK_NUMBERS = 1 << 24  # looked at at once


@dataclass(frozen=True)
class Box:
    """A rectangular part of a logical tensor: `tensor` holds its elements [offsets, offsets + tensor.shape)."""

    name: str
    global_shape: Dims
    offsets: Dims
    tensor: torch.Tensor

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> "Box":
        """The logical tensor in one piece."""
        return cls(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)

    @property
    def key(self) -> str:
        """Its key in the file: the name, plus the range when it is only a part ("w[0:4,8:16]")."""
        if tuple(self.tensor.shape) == tuple(self.global_shape):
            return self.name
        ranges = zip(self.offsets, self.tensor.shape, strict=True)
        return f"{self.name}[{','.join(f'{o}:{o + s}' for o, s in ranges)}]"


def shard_name(kind: str, index: int, count: int) -> str:
    """The usual file name of the `index`-th of `count` shards of one kind."""
    return f"{kind}-{index:05d}-of-{count:05d}.safetensors"


def write_shard(folder: Path, filename: str, kind: str, boxes: Iterable[Box]) -> ShardRecord:
    """Write `boxes` as one new safetensors file and flush it to the disk.

    Tensors may lie on any device and have any strides; those not contiguous in host memory are copied, at most one
    shard in all. Raises ValueError for illegal boxes and for weights and moments that are not finite, FileExistsError when
    the file is there already, OSError naming the file when the disk is full.
    """
    # The largest elements first: every tensor then starts at a multiple of its element size, as mapped reading needs.
    ordered = sorted(boxes, key=lambda box: -box.tensor.dtype.itemsize)
    check_kind(kind)
    path = folder / check_file_name(filename)
    if kind in FINITE_KINDS and (wrong := next((box for box in ordered if not _is_finite(box.tensor)), None)):
        raise ValueError(f"{kind} tensor {wrong.key!r} is not finite: training has diverged; lower optimizer.lr")
    header, tensors = _plan(ordered, filename)
    digest = hashlib.sha256()
    try:
        # One thread hashes in order, beside the write and the flush (all release the interpreter lock).
        with ThreadPoolExecutor(1) as hasher, open(path, "xb", buffering=1 << 20) as file:
            for part in _parts(header, ordered):
                hasher.submit(digest.update, part)
                file.write(part)
            size = file.tell()
            flush(file)
    except FileExistsError:
        raise
    except OSError as error:
        raise OSError(error.errno, f"writing the checkpoint failed: {error.strerror}", str(path)) from error
    return ShardRecord(filename, FileEntry(kind, size, digest.hexdigest()), tensors)


def _plan(boxes: list[Box], filename: str) -> tuple[bytes, dict[str, TensorEntry]]:
    """The safetensors header (length and JSON) of `boxes` in this order, and their index entries."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    entries: dict[str, TensorEntry] = {}
    end = 0
    for box in boxes:
        where, shape, offsets = f"tensor {box.name!r}", tuple(box.tensor.shape), tuple(box.offsets)
        global_shape, key = tuple(box.global_shape), box.key
        if (dtype := DTYPE_NAMES.get(box.tensor.dtype)) is None:
            raise ValueError(f"{where}: {box.tensor.dtype} cannot be stored; the formats are {', '.join(DTYPES)}")
        check_inside(where, global_shape, offsets, shape)
        if not box.name or key in header:
            raise ValueError(f"{where}: key {key!r} is empty, reserved or twice in {filename}")
        begin, end = end, end + box.tensor.numel() * box.tensor.element_size()
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        known = entries.setdefault(box.name, TensorEntry(dtype, global_shape, ()))
        if (known.dtype, known.shape) != (dtype, global_shape):
            raise ValueError(f"{where}: one box is {known.dtype} of {known.shape}, another {dtype} of {global_shape}")
        stored = StoredBox(filename, key, offsets, shape)
        entries[box.name] = TensorEntry(dtype, global_shape, (*known.boxes, stored))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(f"{filename}: a header of {len(text)} bytes exceeds {_MAX_HEADER_BYTES}; use several files")
    return len(text).to_bytes(8, "little") + text, entries


def _parts(header: bytes, boxes: list[Box]) -> Iterator[bytes | memoryview]:
    """The bytes of the file in order, one tensor at a time."""
    yield header
    for box in boxes:
        yield box.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_json(path: Path, text: str) -> FileEntry:
    """Write a small text file and flush it to the disk; the entry is of the kind of trainer.json."""
    data = text.encode()
    with open(path, "xb") as file:
        file.write(data)
        flush(file)
    return FileEntry(TRAINER_KIND, len(data), hashlib.sha256(data).hexdigest())


def flush(file: BinaryIO) -> None:
    """Return only when the content of `file` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def open_checkpoint(path: Path | str) -> "Checkpoint":
    """Read and check the manifest of a checkpoint folder; its files are looked at when they are needed.

    Raises ValueError when there is no manifest, when it is damaged or when it is of another format version.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path}: no such checkpoint folder")
    if not (path / MANIFEST).exists():
        raise ValueError(f"{path}: no {MANIFEST}, so it is no complete checkpoint; use another step")
    beside = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    text = read_small(path / MANIFEST, _MAX_JSON_BYTES + beside // _FILE_BYTES_PER_JSON_BYTE)
    try:
        return Checkpoint(path, Manifest.parse(text))
    except ValueError as error:
        raise ValueError(f"{path / MANIFEST}: {error}; the checkpoint cannot be used, take another step") from error


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder opened for reading. Keeps its shards mapped (not loaded) once they were read from.

    `trusted`: names of files that are what the manifest says; each is checked once, here or by `verify` of another rank.
    """

    path: Path
    manifest: Manifest
    trusted: set[str] = field(default_factory=set, repr=False, compare=False)
    _shards: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _tensors: dict[str, dict[str, tuple[Dims, torch.dtype]]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def step(self) -> int:
        """Optimizer steps done when it was written."""
        return self.manifest.step

    @cached_property
    def trainer(self) -> dict[str, Any]:
        """The trainer state; ValueError when trainer.json is missing or is not the one that was written."""
        self._check_size(TRAINER)
        data = read_small(self.path / TRAINER, _MAX_JSON_BYTES)
        if hashlib.sha256(data).hexdigest() != self.manifest.files[TRAINER].sha256:
            raise ValueError(f"{self.path / TRAINER}: changed after it was written; take another step")
        try:
            state = parse_json(data)
        except ValueError as error:
            raise ValueError(f"{self.path / TRAINER}: not JSON: {error}") from error
        if not isinstance(state, dict):
            raise ValueError(f"{self.path / TRAINER}: must be an object, not {state!r:.80}")
        self.trusted.add(TRAINER)
        return state

    def kinds(self) -> list[str]:
        """The kinds of tensors it holds."""
        return sorted(self.manifest.tensors)

    def tensors(self, kind: str) -> dict[str, tuple[Dims, torch.dtype]]:
        """Global shape and type of every logical tensor of a kind, by name. Cheap to call again."""
        if kind not in self._tensors:
            entries = self._of_kind(kind).items()
            self._tensors[kind] = {name: (entry.shape, DTYPES[entry.dtype]) for name, entry in entries}
        return self._tensors[kind]

    def read(self, kind: str, name: str, offsets: Dims | None = None, shape: Dims | None = None) -> torch.Tensor:
        """The elements [offsets, offsets + shape) of a logical tensor (default: all), bit for bit, as a new CPU tensor.

        Raises ValueError for an unknown name, a range outside the tensor, and a file that is missing or damaged.
        """
        if (entry := self._of_kind(kind).get(name)) is None:
            raise ValueError(f"{self.path}: holds no {kind} tensor {name!r}")
        offsets = (0,) * len(entry.shape) if offsets is None else tuple(offsets)
        if shape is None:
            shape = tuple(size - offset for size, offset in zip(entry.shape, offsets, strict=False))
        check_inside(f"{kind} tensor {name!r}", entry.shape, offsets, tuple(shape))
        out = torch.empty(tuple(shape), dtype=DTYPES[entry.dtype])
        for box in entry.boxes:
            overlap = [
                (max(o, bo), min(o + s, bo + bs))
                for o, s, bo, bs in zip(offsets, shape, box.offsets, box.shape, strict=True)
            ]
            if all(low < high for low, high in overlap):
                target = tuple(slice(low - o, high - o) for (low, high), o in zip(overlap, offsets, strict=True))
                source = tuple(slice(low - o, high - o) for (low, high), o in zip(overlap, box.offsets, strict=True))
                out[target] = self._stored(box, entry.dtype)[source or ...]
        return out

    def verify(
        self, kinds: Iterable[str] | None = None, checksums: bool = True, part: tuple[int, int] = (0, 1)
    ) -> list[str]:
        """What is wrong with the files of `kinds` (default: all, with trainer.json); an empty list when nothing is.

        Sizes always; with `checksums` everything that is checked before a file is read. `part` (i, n): only the i-th of n
        shares of the files, of about equal size, so that ranks can divide the work.
        """
        kinds = {entry.kind for entry in self.manifest.files.values()} if kinds is None else set(kinds)
        missing = kinds - {entry.kind for entry in self.manifest.files.values()}
        problems = [f"{self.path}: holds no files of kind {kind!r}" for kind in sorted(missing)]
        names = [name for name, entry in self.manifest.files.items() if entry.kind in kinds]
        names.sort(key=lambda name: (-self.manifest.files[name].size, name))
        for check in (self._check_size, self._check) if checksums else (self._check_size,):
            for name in () if problems else names[part[0] :: part[1]]:  # what is not there spares reading the rest
                try:
                    check(name)
                except ValueError as error:
                    problems.append(str(error))
        return problems

    def require(self, *kinds: str) -> None:
        """Raise ValueError naming the files of `kinds` that are missing or have the wrong size."""
        if problems := self.verify(kinds, checksums=False):
            raise ValueError("; ".join(problems) + "; take another step")

    def _of_kind(self, kind: str) -> dict[str, TensorEntry]:
        if kind not in self.manifest.tensors:
            raise ValueError(f"{self.path}: holds no {kind!r} tensors, only {', '.join(self.kinds())}")
        return self.manifest.tensors[kind]

    def _check_size(self, name: str) -> None:
        if name not in self.manifest.files:
            raise ValueError(f"{self.path / name}: not a file of this checkpoint")
        with open_regular(self.path / name) as file:
            size, expected = os.fstat(file.fileno()).st_size, self.manifest.files[name].size
        if size != expected:
            raise ValueError(f"{self.path / name}: {size} bytes instead of {expected}, so it is cut off or replaced")

    def _check(self, name: str) -> None:
        """Raise ValueError unless a file is, byte for byte, what the manifest says. Files that were checked cost nothing."""
        if name in self.trusted:
            return
        self._check_size(name)
        with open_regular(self.path / name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.manifest.files[name].sha256:
                raise ValueError(f"{self.path / name}: its bytes changed after it was written (sha256 differs)")
        finite = self.manifest.files[name].kind in FINITE_KINDS
        for dtype, box in self._boxes.get(name, ()):
            self._slice(box, dtype)
            if finite and not _is_finite(self._map(name).get_tensor(box.key)):
                raise ValueError(f"{self.path / name}: {box.key!r:.200} is not finite; take another step")
        self.trusted.add(name)

    @cached_property
    def _boxes(self) -> dict[str, list[tuple[str, StoredBox]]]:
        """By file: the boxes that the manifest has in it, each with its type."""
        found: dict[str, list[tuple[str, StoredBox]]] = {}
        for of_kind in self.manifest.tensors.values():
            for entry in of_kind.values():
                for box in entry.boxes:
                    found.setdefault(box.file, []).append((entry.dtype, box))
        return found

    def _stored(self, box: StoredBox, dtype: str) -> Any:
        """A lazy slice of one box, from a file that was checked."""
        self._check(box.file)
        return self._slice(box, dtype)

    def _map(self, name: str) -> Any:
        if name not in self._shards:
            self._check_size(name)  # whoever checked its bytes may have been another rank
            self._shards[name] = safe_open(self.path / name, framework="pt")
        return self._shards[name]

    def _slice(self, box: StoredBox, dtype: str) -> Any:
        """The box in its file, where its type and shape must be those of the manifest."""
        path = self.path / box.file
        try:
            stored = self._map(box.file).get_slice(box.key)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: {error}; the file is damaged, take another step") from error
        if (stored.get_dtype(), tuple(stored.get_shape())) != (dtype, box.shape):
            raise ValueError(
                f"{path}: {box.key!r} is {stored.get_dtype()} {stored.get_shape()}, "
                f"the manifest says {dtype} {list(box.shape)}; take another step"
            )
        return stored


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are finite; holds no copy of a large tensor."""
    if not tensor.is_floating_point():
        return True
    parts = tensor.detach().reshape(-1).split(_CHUNK_NUMBERS)
    return all(bool((part.float() if part.itemsize == 1 else part).isfinite().all()) for part in parts)
