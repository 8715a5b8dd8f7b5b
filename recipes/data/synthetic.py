"""A small indexed data set of random ids, for benchmarks and tests: no text, no tokenizer, the real files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from recipes.data.dataset import FORMAT_VERSION, MANIFEST, SPLITS
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
    tokenizer = {"file": "none", "fingerprint": "synthetic", "vocab_size": vocab_size, "eod": EOD}
    manifest = {"format_version": FORMAT_VERSION, "tokenizer": tokenizer, "dtype": dtype.name, "domains": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return folder
