"""Megatron's indexed token files: PREFIX.bin holds the ids of all documents, PREFIX.idx where each document begins.

`read_header` and `IndexedSource` need neither torch nor megatron, so that a launcher can check data before it starts anything;
they believe nothing that the files do not bear out. `IndexedWriter` writes through `megatron.core.datasets.indexed_dataset`,
and PREFIX.bytes beside the two: how many bytes of text each document was.
"""

import hashlib
import stat
import struct
import warnings
from array import array
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

# Layout of PREFIX.idx: 9 bytes magic, u64 version, u8 dtype code, u64 sequences, u64 document boundaries; then per
# sequence an i32 length and an i64 byte offset, then the i64 boundaries (megatron.core.datasets.indexed_dataset).
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
INTEGER_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
AGAIN = "index the data again with `python -m tools.index --overwrite`"
_RANGE_BYTES = 1 << 30  # of a file whose ids are compared with the vocabulary when it is opened: about a second
_CHUNK_IDS = 1 << 22


@dataclass(frozen=True)
class IndexHeader:
    """What one indexed file pair says about itself."""

    dtype: np.dtype
    num_sequences: int
    num_documents: int
    num_tokens: int


def regular_size(path: Path, way_out: str = AGAIN) -> int:
    """Bytes of a file that is one: not a link, a folder or a pipe. Raises ValueError naming it."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path}: no such file; {way_out}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {way_out}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(
            f"{path}: not a regular file; put the file itself there (the whole folder may be a link), or {way_out}"
        )
    return found.st_size


def read_header(prefix: str | Path) -> IndexHeader:
    """Reads the 34 header bytes of PREFIX.idx and compares both file sizes with it.

    Raises ValueError naming the file that is missing, not an index, of a non-integer dtype, or cut short.
    """
    idx, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    idx_size, data_size = regular_size(idx), regular_size(data)
    with idx.open("rb") as stream:
        raw = stream.read(_HEADER.size)
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise ValueError(f"{idx}: not a Megatron index file; {AGAIN}")
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(raw)
    if version != 1 or code not in INTEGER_DTYPES:
        codes = ", ".join(map(str, INTEGER_DTYPES))
        raise ValueError(f"{idx}: version {version} and dtype code {code}, expected version 1 and a code of {codes}")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if num_boundaries < 1 or idx_size != expected:
        raise ValueError(f"{idx}: {idx_size} bytes, its header promises {expected}; the file is damaged")
    dtype = np.dtype(INTEGER_DTYPES[code])
    num_tokens, rest = divmod(data_size, dtype.itemsize)
    if rest:
        raise ValueError(f"{data}: {data_size} bytes is no multiple of {dtype.name}; the file is damaged")
    return IndexHeader(dtype, num_sequences, num_boundaries - 1, num_tokens)


def read_offsets(prefix: str | Path, header: IndexHeader) -> np.ndarray:
    """Where each document begins, and last where the ids end: int64 [num_documents + 1].

    Raises ValueError when the lengths, positions and boundaries in PREFIX.idx contradict each other or PREFIX.bin.
    """
    with Path(f"{prefix}.idx").open("rb") as stream:
        stream.seek(_HEADER.size)
        lengths = _array(stream, np.int32, header.num_sequences)
        pointers = _array(stream, np.int64, header.num_sequences)
        boundaries = _array(stream, np.int64, header.num_documents + 1)
    problem = None
    if lengths.size and lengths.min() < 0:
        problem = f"sequence {int(lengths.argmin())} has a length of {lengths.min()}"
    elif (total := int(lengths.sum(dtype=np.int64))) != header.num_tokens:
        problem = f"its documents do not add up to the {header.num_tokens} ids of the .bin file: they have {total}"
    elif np.any(wrong := pointers // header.dtype.itemsize != np.cumsum(lengths, dtype=np.int64) - lengths) or np.any(
        wrong := pointers % header.dtype.itemsize != 0
    ):
        where = int(wrong.argmax())
        problem = f"sequence {where} does not begin where the one before it ends: at byte {pointers[where]}"
    elif boundaries[0] != 0 or boundaries[-1] != header.num_sequences or np.any(boundaries[1:] < boundaries[:-1]):
        problem = f"documents must go from sequence 0 to {header.num_sequences}, one after the other"
    if problem is not None:
        raise ValueError(f"{prefix}.idx: {problem}; the file is damaged, {AGAIN}")
    return document_offsets(lengths, boundaries)


def _array(stream: BinaryIO, dtype: type, count: int) -> np.ndarray:
    return np.frombuffer(stream.read(count * np.dtype(dtype).itemsize), dtype, count)


def check_ids(ids: np.ndarray, vocab_size: int, where: str) -> None:
    """Raises ValueError naming `where` for an id that is not in the vocabulary."""
    worst = next((int(i) for i in (ids.min(), ids.max()) if not 0 <= i < vocab_size), None) if ids.size else None
    if worst is not None:
        raise ValueError(
            f"{where}: token id {worst} is not in the vocabulary, legal are 0 to {vocab_size - 1}; {AGAIN}"
        )


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

    Raises ValueError for files that `read_header` refuses, whose index and data disagree, or whose ids (of the first GiB) are
    not in a vocabulary of `vocab_size`.
    """

    def __init__(self, prefix: str | Path, name: str, vocab_size: int | None = None):
        self.name, self.path = name, Path(f"{prefix}.bin")
        header = read_header(prefix)
        self.offsets = read_offsets(prefix, header)
        if vocab_size is not None:
            self._check_range(header.dtype, vocab_size)
        if header.num_tokens == 0:  # an empty file cannot be mapped
            self.ids = np.zeros(0, header.dtype)
        else:
            self.ids = np.memmap(self.path, dtype=header.dtype, mode="r", shape=(header.num_tokens,))

    def __str__(self) -> str:
        return f"{self.path} (domain {self.name})"

    def __len__(self) -> int:
        """Number of ids."""
        return len(self.ids)

    def _check_range(self, dtype: np.dtype, vocab_size: int) -> None:
        left = _RANGE_BYTES // dtype.itemsize
        with self.path.open("rb") as stream:  # not mapped: pages read so do not count as this process's memory
            while left > 0 and (ids := np.fromfile(stream, dtype, min(left, _CHUNK_IDS))).size:
                check_ids(ids, vocab_size, str(self))
                left -= len(ids)


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx document by document, and knows what `dataset.json` says of them at the end.

    PREFIX.bytes (little-endian int64 [num_documents]) holds the bytes of each document's text, if all of them are given.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype, vocab_size: int | None = None):
        self._prefix, self._dtype, self._vocab_size = prefix, np.dtype(dtype), vocab_size
        self._builder = megatron_indexed_dataset().IndexedDatasetBuilder(f"{prefix}.bin", dtype=self._dtype.type)
        self._digest, self._documents, self._tokens = hashlib.sha256(), 0, 0
        self._text_bytes = array("q")

    def add(self, ids: np.ndarray, text_bytes: int | None = None) -> None:
        """Add one document. Raises ValueError for an id that does not fit the type or the vocabulary."""
        if self._vocab_size is not None:
            check_ids(ids, self._vocab_size, f"{self._prefix}.bin")
        stored = narrow(ids, self._dtype)
        self._builder.add_document(stored, [len(stored)])
        self._digest.update(stored.tobytes())
        self._documents, self._tokens = self._documents + 1, self._tokens + len(stored)
        if text_bytes is not None:
            self._text_bytes.append(text_bytes)

    def finish(self) -> dict[str, Any]:
        """Close the files; returns `documents`, `tokens`, `content`: the SHA-256 of each file, in hex, and `text`: the bytes
        of all text and the SHA-256 of PREFIX.bytes, or None."""
        self._builder.finalize(f"{self._prefix}.idx")
        index = hashlib.sha256(Path(f"{self._prefix}.idx").read_bytes())
        content = {"bin": self._digest.hexdigest(), "idx": index.hexdigest()}
        text = None
        if len(self._text_bytes) == self._documents:
            counts = np.array(self._text_bytes, "<i8")
            Path(f"{self._prefix}.bytes").write_bytes(counts.tobytes())
            text = {"bytes": int(counts.sum()), "sha256": hashlib.sha256(counts.tobytes()).hexdigest()}
        return {"documents": self._documents, "tokens": self._tokens, "content": content, "text": text}
