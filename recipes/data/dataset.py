"""An indexed corpus: a folder with dataset.json, the tokenizer that wrote it (tokenizer.model, or tokenizer.json and,
where there is one, tokenizer_config.json) and, per domain and split, DOMAIN_SPLIT.bin and DOMAIN_SPLIT.idx.

`load_dataset` checks all of it without torch or megatron, in milliseconds.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.data.indexed import IndexedSource, num_windows, read_header
from recipes.data.tokenizer import Tokenizer, load_tokenizer

SPLITS = ("train", "valid", "test")
MANIFEST = "dataset.json"
FORMAT_VERSION = 1
_AGAIN = "index the data again with `python -m tools.index --overwrite`"


@dataclass(frozen=True)
class SplitInfo:
    """Size of one split of one domain, and the SHA-256 of its files by suffix ("bin", "idx"); None in older data sets."""

    documents: int
    tokens: int
    content: dict[str, str] | None = None


@dataclass(frozen=True)
class DatasetInfo:
    """A checked dataset.json.

    domains: domain name -> split -> sizes, sorted by name; eod: id that ends every document; vocab_size: of the
    tokenizer, added tokens included; tokenizer_fingerprint: SHA-256 of the tokenizer file.
    """

    folder: Path
    tokenizer_fingerprint: str
    vocab_size: int
    eod: int
    dtype: np.dtype
    domains: dict[str, dict[str, SplitInfo]]

    def tokens(self, split: str = "train") -> dict[str, int]:
        """Tokens of each domain."""
        return {name: splits[split].tokens for name, splits in self.domains.items()}

    def num_samples(self, domain: str, split: str, seq_length: int) -> int:
        """Samples of seq_length + 1 ids in one pass over the split."""
        return num_windows(self.domains[domain][split].tokens, seq_length)

    def open(self, domain: str, split: str) -> IndexedSource:
        """The documents of one split, mapped into memory."""
        return IndexedSource(self.folder / f"{domain}_{split}", domain)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the folder. Raises ValueError when it is missing or not the one that wrote the data."""
        try:
            tokenizer = load_tokenizer(self.folder)
        except ValueError as error:
            raise ValueError(f"{error}, or {_AGAIN}") from error
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
                f"{described[1]}; use the tokenizer of the data, or {_AGAIN}"
            )


def load_dataset(folder: str | Path) -> DatasetInfo:
    """Reads and checks FOLDER/dataset.json and the headers and sizes of every file it names.

    Raises ValueError naming the file: missing, damaged, another size or dtype than recorded, or a dtype that cannot
    hold the tokenizer's vocabulary.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; the folder is not an indexed data set, make one with `python -m tools.index`"
        )
    try:
        info = _parse(folder, json.loads(path.read_bytes()))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: damaged ({type(error).__name__}: {error}); {_AGAIN}") from error
    for domain, splits in info.domains.items():
        for split, size in splits.items():
            _check_files(info, domain, split, size)
    return info


def _parse(folder: Path, manifest: dict[str, Any]) -> DatasetInfo:
    path = folder / MANIFEST
    if manifest["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format version {manifest['format_version']}, this reader knows {FORMAT_VERSION}; {_AGAIN}"
        )
    tokenizer, domains = manifest["tokenizer"], {}
    for name, domain in sorted(manifest["domains"].items()):
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):  # names become file names
            raise ValueError(f"{path}: domain name {name!r}, legal are letters, digits, '_', '-' and '.'")
        sizes = {split: domain["splits"][split] for split in SPLITS}
        domains[name] = {
            split: SplitInfo(_count(s["documents"]), _count(s["tokens"]), _content(s.get("content")))
            for split, s in sizes.items()
        }
    return DatasetInfo(
        folder=folder,
        tokenizer_fingerprint=str(tokenizer["fingerprint"]),
        vocab_size=_count(tokenizer["vocab_size"]),
        eod=_count(tokenizer["eod"]),
        dtype=np.dtype(manifest["dtype"]),
        domains=domains,
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value


def _content(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if sorted(value) != ["bin", "idx"] or not all(re.fullmatch("[0-9a-f]{64}", value[name]) for name in value):
        raise TypeError(f"content={value!r:.80} is not the SHA-256 of bin and idx")
    return dict(value)


def _check_files(info: DatasetInfo, domain: str, split: str, size: SplitInfo) -> None:
    prefix = info.folder / f"{domain}_{split}"
    header = read_header(prefix)
    if header.dtype != info.dtype:
        raise ValueError(f"{prefix}.idx: dtype {header.dtype}, {MANIFEST} says {info.dtype}; {_AGAIN}")
    if np.iinfo(header.dtype).max < info.vocab_size - 1:
        raise ValueError(
            f"{prefix}.idx: dtype {header.dtype} holds ids up to {np.iinfo(header.dtype).max}, "
            f"the tokenizer's vocabulary has {info.vocab_size}; {_AGAIN}"
        )
    if (header.num_documents, header.num_tokens) != (size.documents, size.tokens):
        raise ValueError(
            f"{prefix}.bin: {header.num_documents} documents and {header.num_tokens} tokens, "
            f"{MANIFEST} says {size.documents} and {size.tokens}; {_AGAIN}"
        )
