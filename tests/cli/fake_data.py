"""An indexed data set without text: right headers and sizes, ids all zero."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path


def write_dataset(folder: Path, vocab_size: int = 4096, tokens: Mapping[str, int] | None = None) -> Path:
    """One document per domain and split; `tokens` are those of each domain's train split (default: en and ja)."""
    folder.mkdir(parents=True)
    domains = {}
    for domain, count in (tokens or {"en": 100_000, "ja": 50_000}).items():
        sizes = {"train": count, "valid": 2000, "test": 2000}
        for split, size in sizes.items():
            (folder / f"{domain}_{split}.bin").write_bytes(bytes(2 * size))
            index = struct.pack("<9sQBQQiqqq", b"MMIDIDX\x00\x00", 1, 8, 1, 2, size, 0, 0, 1)
            (folder / f"{domain}_{split}.idx").write_bytes(index)
        domains[domain] = {"splits": {split: {"documents": 1, "tokens": size} for split, size in sizes.items()}}
    tokenizer = {"fingerprint": "0" * 64, "vocab_size": vocab_size, "eod": 0}
    manifest = {"format_version": 1, "tokenizer": tokenizer, "dtype": "uint16", "domains": domains}
    (folder / "dataset.json").write_text(json.dumps(manifest))
    return folder
