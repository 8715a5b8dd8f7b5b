"""Parts of the data: how distinct they are, and random ones as an indexed data set.

data set -> part_statistics -> sizes, divergences between parts, a warning when they are not distinct
data set, number of parts -> write_random_parts -> data set with a domain "random0-en" for each part and domain
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.data.dataset import SPLITS, DatasetInfo, copy_tokenizer, tokenizer_entry, write_manifest
from recipes.data.indexed import IndexedSource, IndexedWriter
from recipes.files import own_folder

# Random halves of one text differ by 0.001 to 0.02 bits, depending on their size; English scripture and English
# encyclopedia by about 0.3.
DISTINCT_BITS = 0.05
_MOST_IDS = 2_000_000  # of a part that statistics look at


def divergence(p_V: np.ndarray, q_V: np.ndarray) -> float:
    """Jensen-Shannon divergence of two distributions in bits: 0 for equal ones, 1 for disjoint ones."""

    def bits(a_V: np.ndarray, b_V: np.ndarray) -> float:
        some_V = a_V > 0
        return float((a_V[some_V] * np.log2(a_V[some_V] / b_V[some_V])).sum())

    middle_V = (p_V + q_V) / 2
    return (bits(p_V, middle_V) + bits(q_V, middle_V)) / 2


def part_statistics(parts: Mapping[str, Sequence[IndexedSource]], vocab_size: int) -> dict[str, Any]:
    """Sizes of each part (its sources together), and how their tokens' frequencies diverge, in bits, pair by pair.

    `distinct` says whether the mean over pairs is above DISTINCT_BITS; if not, `warning` says what that means.
    """
    rows, frequencies = {}, []
    for name, sources in parts.items():
        counts_V = np.zeros(vocab_size, np.int64)
        for source in sources:
            counts_V += np.bincount(_some(source.ids), minlength=vocab_size)
        rows[name] = {
            "documents": sum(len(source.offsets) - 1 for source in sources),
            "tokens": sum(len(source) for source in sources),
        }
        frequencies.append(counts_V / max(1, int(counts_V.sum())))
    bits_PP = [[divergence(p, q) if p is not q else 0.0 for q in frequencies] for p in frequencies]
    pairs = [bits for i, row in enumerate(bits_PP) for bits in row[:i]]
    mean = float(np.mean(pairs)) if pairs else 0.0
    found: dict[str, Any] = {"parts": rows, "divergence_bits": bits_PP, "mean_divergence_bits": mean}
    found["distinct"] = mean > DISTINCT_BITS
    if not found["distinct"]:
        found["warning"] = (
            f"the parts are hardly distinct: their tokens' frequencies diverge by {mean:.3f} bits on average (1: nothing in "
            f"common; above {DISTINCT_BITS}: distinct), so that experts will know little that others do not"
        )
    return found


def _some(ids: np.ndarray) -> np.ndarray:
    """All ids, or as many of them from evenly spread places."""
    if len(ids) <= _MOST_IDS:
        return np.asarray(ids)
    starts = np.linspace(0, len(ids) - 1000, _MOST_IDS // 1000).astype(np.int64)
    return np.concatenate([ids[start : start + 1000] for start in starts])


def deal(lengths: np.ndarray, parts: int, seed: int) -> np.ndarray:
    """A part for each document, at random and with about as many tokens in each: in random order, each to the smallest part."""
    bits = np.random.Philox(np.random.SeedSequence([seed, parts]))
    order = np.argsort(bits.random_raw(len(lengths)), kind="stable")
    sizes, dealt = np.zeros(parts, np.int64), np.empty(len(lengths), np.int64)
    for document in order:
        dealt[document] = smallest = int(np.argmin(sizes))
        sizes[smallest] += lengths[document]
    return dealt


def write_random_parts(info: DatasetInfo, domains: Sequence[str], parts: int, seed: int, out: Path) -> None:
    """A data set with a random 1/parts of the training documents of each domain, as domains "random<part>-<domain>".

    Raises ValueError for a domain with fewer documents than parts.
    """

    def documents() -> Iterator[tuple[str, Iterable[np.ndarray]]]:
        for number, domain in enumerate(domains):
            source = info.open(domain, "train")
            if len(source.offsets) - 1 < parts:
                few = f"{len(source.offsets) - 1} documents of training text, fewer than the {parts} parts"
                raise ValueError(f"domain {domain} has {few}; use fewer branches, or leave the domain out")
            # A document that is a large share of a part would make the parts uneven.
            cut = list(pieces(source, max(1, len(source) // (16 * parts))))
            dealt = deal(np.array([len(piece) for piece in cut]), parts, seed + number)
            for part in range(parts):
                chosen = np.flatnonzero(dealt == part).tolist()
                yield f"random{part}-{domain}", [cut[index] for index in chosen]

    write_dataset(info, documents(), out)


def pieces(source: IndexedSource, longest: int) -> Iterator[np.ndarray]:
    """The documents of a source, those longer than `longest` ids cut into equal pieces up to that."""
    for begin, end in zip(source.offsets[:-1].tolist(), source.offsets[1:].tolist(), strict=True):
        yield from np.array_split(source.ids[begin:end], -(-(end - begin) // longest))


def write_dataset(info: DatasetInfo, domains: Iterable[tuple[str, Iterable[np.ndarray]]], out: Path) -> None:
    """A data set in the ids of `info` whose domains have these documents as training text, and no held-out text."""
    entries: dict[str, Any] = {}
    own_folder(out)
    for name, documents in domains:
        splits = {}
        for split in SPLITS:
            writer = IndexedWriter(out / f"{name}_{split}", info.dtype, info.vocab_size)
            for ids in documents if split == "train" else ():
                writer.add(ids)
            splits[split] = writer.finish()
        entries[name] = {"splits": splits}
    if info.has_tokenizer():
        tokenizer = info.tokenizer()
        copy_tokenizer(tokenizer, out)
        entry = tokenizer_entry(tokenizer)
    else:
        entry = {"file": None, "files": {}, "vocab_size": info.vocab_size, "eod": info.eod}
        entry["fingerprint"] = info.tokenizer_fingerprint
    write_manifest(out, entry, info.dtype, entries)


def data_digest(info: DatasetInfo, domains: Iterable[str]) -> dict[str, Any]:
    """What says whether the text of these domains is still the same, without reading all of it: sizes and checksums of the
    index of each split, and the checksum of its input where the data set records it."""
    import hashlib

    found: dict[str, Any] = {"tokenizer": info.tokenizer_fingerprint, "vocab_size": info.vocab_size}
    for domain in domains:
        indices = [info.folder / f"{domain}_{split}.idx" for split in SPLITS]
        source = info.inputs.get(domain, {}).get("sha256")
        if source is None:  # nothing is recorded of where it came from: read it
            indices += [info.folder / f"{domain}_{split}.bin" for split in SPLITS]
        digests = []
        for path in indices:
            with path.open("rb") as stream:
                digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
        found[domain] = {"input": source, "files": digests}
    return found
