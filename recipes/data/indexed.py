"""Megatron's indexed token files: PREFIX.bin holds the ids of all documents, PREFIX.idx where each document begins.

`read_header` needs neither torch nor megatron, so that a launcher can check data before it starts anything;
`IndexedSource` maps the ids into memory, and `IndexedWriter` writes them, through
`megatron.core.datasets.indexed_dataset`.
"""

import hashlib
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

# Layout of PREFIX.idx: 9 bytes magic, u64 version, u8 dtype code, u64 sequences, u64 document boundaries; then per
# sequence an i32 length and an i64 byte offset, then the i64 boundaries (megatron.core.datasets.indexed_dataset).
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_INTEGER_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


@dataclass(frozen=True)
class IndexHeader:
    """What one indexed file pair says about itself."""

    dtype: np.dtype
    num_documents: int
    num_tokens: int


def read_header(prefix: str | Path) -> IndexHeader:
    """Reads the 34 header bytes of PREFIX.idx and compares both file sizes with it.

    Raises ValueError naming the file that is missing, not an index, of a non-integer dtype, or cut short.
    """
    idx, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for file in (idx, data):
        if not file.is_file():
            raise ValueError(f"{file}: no such file; index the data again with `python -m tools.index`")
    with idx.open("rb") as stream:
        raw = stream.read(_HEADER.size)
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise ValueError(f"{idx}: not a Megatron index file; index the data again with `python -m tools.index`")
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(raw)
    if version != 1 or code not in _INTEGER_DTYPES:
        codes = ", ".join(map(str, _INTEGER_DTYPES))
        raise ValueError(f"{idx}: version {version} and dtype code {code}, expected version 1 and a code of {codes}")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if num_boundaries < 1 or idx.stat().st_size != expected:
        raise ValueError(f"{idx}: {idx.stat().st_size} bytes, its header promises {expected}; the file is damaged")
    dtype = np.dtype(_INTEGER_DTYPES[code])
    num_tokens, rest = divmod(data.stat().st_size, dtype.itemsize)
    if rest:
        raise ValueError(f"{data}: {data.stat().st_size} bytes is no multiple of {dtype.name}; the file is damaged")
    return IndexHeader(dtype, num_boundaries - 1, num_tokens)


def megatron_indexed_dataset() -> ModuleType:
    """`megatron.core.datasets.indexed_dataset`, imported late and without its remarks on missing kernels."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def num_windows(num_tokens: int, seq_length: int) -> int:
    """Samples of seq_length + 1 ids that one pass over `num_tokens` ids holds; neighbours share one id.

    This is the only place that says how many samples a data set has.
    """
    return max(0, num_tokens - 1) // seq_length


def narrow(ids: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`ids` as `dtype`. Raises ValueError for an id that does not fit (a plain cast would wrap around silently)."""
    limits = np.iinfo(dtype)
    if ids.size and (ids.min() < limits.min or ids.max() > limits.max):
        worst = ids.max() if ids.max() > limits.max else ids.min()
        raise ValueError(
            f"token id {worst} does not fit {np.dtype(dtype).name}, legal are {limits.min} to {limits.max}"
        )
    return ids.astype(dtype)


def document_offsets(lengths: np.ndarray, boundaries: np.ndarray) -> np.ndarray:
    """Where each document begins in the stream of ids, and last where the stream ends: int64 [num_documents + 1].

    lengths: ids per sequence [num_sequences]; boundaries: first sequence of each document, and the number of sequences.
    """
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    return ends[boundaries]


class IndexedSource:
    """One domain's documents: `ids` (all ids in file order, mapped) and `offsets` (int64 [num_documents + 1]).

    Raises ValueError for files that `read_header` refuses or whose index and data disagree.
    """

    def __init__(self, prefix: str | Path, name: str):
        self.name = name
        header = read_header(prefix)
        if header.num_tokens == 0:  # an empty file cannot be mapped
            self.ids = np.zeros(0, header.dtype)
            self.offsets = np.zeros(1, np.int64)
            return
        dataset = megatron_indexed_dataset().IndexedDataset(str(prefix), mmap=True)
        # Copied, and the ids mapped by NumPy: the reader unmaps its files when it goes, under whoever still looks into them.
        self.offsets = document_offsets(dataset.sequence_lengths.copy(), dataset.document_indices.copy())
        self.ids = np.memmap(f"{prefix}.bin", dtype=header.dtype, mode="r", shape=(header.num_tokens,))
        if self.offsets[-1] != header.num_tokens or np.any(np.diff(self.offsets) < 0):
            raise ValueError(
                f"{prefix}.idx: its documents do not add up to the {header.num_tokens} ids of the .bin file"
            )

    def __len__(self) -> int:
        """Number of ids."""
        return len(self.ids)


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx document by document, and knows what `dataset.json` says of them at the end."""

    def __init__(self, prefix: str | Path, dtype: np.dtype):
        self._prefix, self._dtype = prefix, np.dtype(dtype)
        self._builder = megatron_indexed_dataset().IndexedDatasetBuilder(f"{prefix}.bin", dtype=self._dtype.type)
        self._digest, self._documents, self._tokens = hashlib.sha256(), 0, 0

    def add(self, ids: np.ndarray) -> None:
        """Add one document. Raises ValueError for an id that does not fit the type."""
        stored = narrow(ids, self._dtype)
        self._builder.add_document(stored, [len(stored)])
        self._digest.update(stored.tobytes())
        self._documents, self._tokens = self._documents + 1, self._tokens + len(stored)

    def finish(self) -> dict[str, Any]:
        """Close both files; returns `documents`, `tokens`, and `content`: the SHA-256 of each file, in hex."""
        self._builder.finalize(f"{self._prefix}.idx")
        index = hashlib.sha256(Path(f"{self._prefix}.idx").read_bytes())
        content = {"bin": self._digest.hexdigest(), "idx": index.hexdigest()}
        return {"documents": self._documents, "tokens": self._tokens, "content": content}
