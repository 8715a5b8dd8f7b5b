"""An indexed corpus: a folder with dataset.json, the tokenizer that wrote it (tokenizer.model, or tokenizer.json and the files
that name its roles) and, per domain and split, DOMAIN_SPLIT.bin, DOMAIN_SPLIT.idx and DOMAIN_SPLIT.bytes.

`load_dataset` checks all of it without torch or megatron: sizes and the tokenizer at any size, the content of every file up to
VERIFIED_BYTES in all. `python -m tools.index --verify FOLDER` checks the content of larger data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from recipes.data.indexed import AGAIN, IndexedSource, num_windows, read_header, regular_size
from recipes.data.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    SplitInfo,
    check_digest,
    read_manifest,
    write_manifest,
)
from recipes.data.roles import ROLE_FILES
from recipes.data.tokenizer import MAX_TOKENIZER_BYTES, Tokenizer, file_sha256, load_tokenizer
from recipes.files import replace_bytes

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "SPLITS",
    "DatasetInfo",
    "SplitInfo",
    "copy_tokenizer",
    "load_dataset",
    "tokenizer_entry",
    "write_manifest",
]

VERIFIED_BYTES = 1 << 30  # hashed in less than a second


@dataclass(frozen=True)
class DatasetInfo:
    """A checked data set.

    domains: domain name -> split -> sizes, sorted by name; eod: id that ends every document; vocab_size: of the
    tokenizer, added tokens included; tokenizer_fingerprint: SHA-256 of the tokenizer file; tokenizer_files: names of it and
    of the files that name its roles, empty where none are recorded; inputs: what the manifest says of the text's files;
    note: what could not be checked, for the user.
    """

    folder: Path
    tokenizer_fingerprint: str
    tokenizer_files: tuple[str, ...]
    vocab_size: int
    eod: int
    dtype: np.dtype
    domains: dict[str, dict[str, SplitInfo]]
    inputs: Mapping[str, Any]
    note: str | None = None

    def tokens(self, split: str = "train") -> dict[str, int]:
        """Tokens of each domain."""
        return {name: splits[split].tokens for name, splits in self.domains.items()}

    def num_samples(self, domain: str, split: str, seq_length: int) -> int:
        """Samples of seq_length + 1 ids in one pass over the split."""
        return num_windows(self.domains[domain][split].tokens, seq_length)

    def prefix(self, domain: str, split: str) -> Path:
        """Path of the files of one split, without their suffix."""
        return self.folder / f"{domain}_{split}"

    def open(self, domain: str, split: str) -> IndexedSource:
        """The documents of one split, mapped into memory. Raises ValueError for ids beyond the vocabulary."""
        return IndexedSource(self.prefix(domain, split), domain, self.vocab_size)

    def text_bytes(self, domain: str, split: str) -> np.ndarray | None:
        """UTF-8 bytes of the raw text of each document, int64 [documents]; None where they were not counted."""
        size = self.domains[domain][split]
        if size.text_bytes is None:
            return None
        path = Path(f"{self.prefix(domain, split)}.bytes")
        counts = np.fromfile(path, "<i8") if regular_size(path) == 8 * size.documents else np.zeros(0, np.int64)
        if len(counts) != size.documents or np.any(counts < 0) or int(counts.sum()) != size.text_bytes:
            raise ValueError(
                f"{path}: not the {size.text_bytes} bytes of {size.documents} documents that {MANIFEST} says; {AGAIN}"
            )
        return counts

    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer in the folder; data of random ids has none."""
        return bool(self.tokenizer_files or _tokenizer_stamps(self.folder))  # older ones do not say that they have one

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the folder. Raises ValueError when it is missing or not the one that wrote the data."""
        try:
            tokenizer = _tokenizer(self.folder, _tokenizer_stamps(self.folder))
        except ValueError as error:
            raise ValueError(f"{error}, or {AGAIN}") from error
        self.check_tokenizer(tokenizer)
        return tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError unless `tokenizer` is the one that wrote this data."""
        ours = (self.tokenizer_fingerprint, self.vocab_size, self.eod)
        theirs = (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod)
        if ours != theirs:
            described = [f"{digest[:12]} (vocabulary {size}, EOD {eod})" for digest, size, eod in (ours, theirs)]
            raise ValueError(
                f"{self.folder / MANIFEST} was written with tokenizer {described[0]} but {tokenizer.path} is "
                f"{described[1]}; use the tokenizer of the data, or {AGAIN}"
            )


def tokenizer_entry(tokenizer: Tokenizer) -> dict[str, Any]:
    """What `write_manifest` takes of a tokenizer whose files `copy_tokenizer` copies."""
    return {
        "file": f"tokenizer{tokenizer.path.suffix}",
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.require_eod(),
        "files": {name: file_sha256(path) for name, path in _copies(tokenizer).items()},
    }


def copy_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Puts a tokenizer and the files that name its roles into `folder`, where `load_tokenizer` finds them."""
    for name, path in _copies(tokenizer).items():
        replace_bytes(folder / name, path.read_bytes())


def _copies(tokenizer: Tokenizer) -> dict[str, Path]:
    return {f"tokenizer{tokenizer.path.suffix}": tokenizer.path, **{file.name: file for file in tokenizer.role_files}}


def load_dataset(folder: str | Path, verify: bool | None = None) -> DatasetInfo:
    """Reads FOLDER/dataset.json and checks it against every file it names.

    verify: compare the content of the token files with their digests; None: when they have at most VERIFIED_BYTES in all.
    Raises ValueError naming the file: missing, not a regular file, damaged, changed, another size or dtype than recorded, a
    dtype that cannot hold the tokenizer's vocabulary, another tokenizer.
    """
    folder = Path(folder)
    try:
        return _load(folder, verify)
    except OSError as error:
        raise ValueError(f"{error.filename or folder}: cannot be read ({error.strerror}); {AGAIN}") from error


def _load(folder: Path, verify: bool | None) -> DatasetInfo:
    manifest = read_manifest(folder)
    info = DatasetInfo(
        folder=folder,
        tokenizer_fingerprint=manifest.tokenizer_fingerprint,
        tokenizer_files=tuple(manifest.tokenizer_files),
        vocab_size=manifest.vocab_size,
        eod=manifest.eod,
        dtype=manifest.dtype,
        domains=manifest.domains,
        inputs=manifest.inputs,
    )
    total = sum(_check_sizes(info, domain, split) for domain, splits in info.domains.items() for split in splits)
    for name, digest in manifest.tokenizer_files.items():
        if (size := regular_size(folder / name)) > MAX_TOKENIZER_BYTES:
            raise ValueError(
                f"{folder / name}: {size} bytes, no tokenizer is larger than {MAX_TOKENIZER_BYTES}; {AGAIN}"
            )
        _check_content(folder / name, digest)
    if info.has_tokenizer():
        info.tokenizer()
    check_digest(folder)
    if total > VERIFIED_BYTES and not verify:
        how = f"python -m tools.index --verify {folder}"
        return replace(info, note=f"{folder}: {total:,} bytes, of which only sizes were checked; check all by `{how}`")
    for domain, splits in info.domains.items():
        for split, recorded in splits.items():
            for suffix, sha256 in _digests(recorded):
                _check_content(Path(f"{info.prefix(domain, split)}.{suffix}"), sha256)
            if recorded.content is None:
                info.open(domain, split)  # compares what the files say with each other, at least
    if manifest.format_version == 1:
        return replace(info, note=f"{folder}: written by an earlier version, without digests of its files; {AGAIN}")
    return info


def _check_sizes(info: DatasetInfo, domain: str, split: str) -> int:
    """Compares headers and sizes with the manifest; returns the bytes of the files."""
    prefix, size = info.prefix(domain, split), info.domains[domain][split]
    header = read_header(prefix)
    if header.dtype != info.dtype:
        raise ValueError(f"{prefix}.idx: dtype {header.dtype}, {MANIFEST} says {info.dtype}; {AGAIN}")
    if np.iinfo(header.dtype).max < info.vocab_size - 1:
        raise ValueError(
            f"{prefix}.idx: dtype {header.dtype} holds ids up to {np.iinfo(header.dtype).max}, "
            f"the tokenizer's vocabulary has {info.vocab_size}; {AGAIN}"
        )
    if (header.num_documents, header.num_tokens) != (size.documents, size.tokens):
        raise ValueError(
            f"{prefix}.bin: {header.num_documents} documents and {header.num_tokens} tokens, "
            f"{MANIFEST} says {size.documents} and {size.tokens}; {AGAIN}"
        )
    sizes = {suffix: regular_size(Path(f"{prefix}.{suffix}")) for suffix, _ in _digests(size)}
    if sizes.get("bytes", 8 * size.documents) != 8 * size.documents:
        raise ValueError(
            f"{prefix}.bytes: {sizes['bytes']} bytes are not 8 for each of {size.documents} documents; {AGAIN}"
        )
    return sum(sizes.values())


def _digests(size: SplitInfo) -> list[tuple[str, str | None]]:
    """Suffix and SHA-256 (None: not recorded) of each file of a split."""
    content = size.content or {}
    files: list[tuple[str, str | None]] = [(suffix, content.get(suffix)) for suffix in ("bin", "idx")]
    return files if size.text_digest is None else [*files, ("bytes", size.text_digest)]


def _check_content(path: Path, digest: str | None) -> None:
    regular_size(path)
    if digest is not None and (found := _sha256(path, _stamp(path))) != digest:
        raise ValueError(
            f"{path}: not the file that was written with {MANIFEST} (SHA-256 {found[:12]}, expected {digest[:12]}); "
            f"restore it, or {AGAIN}"
        )


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes whenever the file does."""
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@lru_cache(maxsize=1 << 16)
def _sha256(path: Path, stamp: tuple[int, ...]) -> str:
    """Of a file as it was at `stamp`: a process reads it once."""
    return file_sha256(path)


def _tokenizer_stamps(folder: Path) -> tuple[tuple[int, ...], ...]:
    """Of all files that `load_tokenizer` would look at."""
    found = [*sorted(folder.glob("*.model")), folder / "tokenizer.json"]
    if not any(path.exists() for path in found):
        return ()
    return tuple(_stamp(path) for path in (*found, *(folder / name for name in ROLE_FILES)) if path.exists())


@lru_cache(maxsize=4)
def _tokenizer(folder: Path, stamps: tuple[tuple[int, ...], ...]) -> Tokenizer:
    return load_tokenizer(folder)
