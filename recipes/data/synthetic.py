"""A small indexed data set of random ids, for benchmarks and tests: no text, no tokenizer, the real files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.data.dataset import SPLITS, write_manifest
from recipes.data.indexed import IndexedWriter, megatron_indexed_dataset

EOD = 0


def write_dataset(
    folder: Path, vocab_size: int, tokens: int, domains: Sequence[str] = ("a", "b"), seed: int = 0
) -> Path:
    """Write `tokens` ids per domain, 96 % train, 2 % valid, 2 % test, in documents of up to 200 ids; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(megatron_indexed_dataset().DType.optimal_dtype(vocab_size))
    generator = np.random.default_rng(seed)
    entries = {}
    for domain in domains:
        splits = {}
        for split, share in zip(SPLITS, (0.96, 0.02, 0.02), strict=True):
            prefix = folder / f"{domain}_{split}"
            writer, written = IndexedWriter(prefix, dtype), 0
            while written < tokens * share:
                # Squared, so that small ids are frequent and there is something to learn.
                ids = (generator.random(generator.integers(5, 200)) ** 2 * (vocab_size - 1)).astype(dtype) + 1
                ids[-1] = EOD
                writer.add(ids)
                written += len(ids)
            splits[split] = writer.finish()
        entries[domain] = {"splits": splits}
    tokenizer: dict[str, Any] = {
        "file": None,
        "files": {},
        "fingerprint": "synthetic",
        "vocab_size": vocab_size,
        "eod": EOD,
    }
    write_manifest(folder, tokenizer, dtype, entries)
    return folder
