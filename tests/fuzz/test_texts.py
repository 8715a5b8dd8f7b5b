"""Damaged text files: each is read, or refused in one message that names the file."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet

from recipes.data.documents import read_documents
from tests.fuzz.judging import FACTOR

CASES = round(600 * FACTOR)
SEEDS = [6]  # that once failed, tried beside the first CASES


def write_originals(folder: Path) -> list[bytes]:
    """The same documents in every format; the name of the file is its number."""
    texts = [f"hello {i} 日本語" * 5 for i in range(300)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "0.jsonl").write_bytes(lines)
    (folder / "1.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "2.txt").write_bytes("\n\n".join(texts).encode())
    table = pyarrow.table({"text": texts, "n": list(range(300))})
    pyarrow.parquet.write_table(table, folder / "3.parquet", row_group_size=100)
    pyarrow.parquet.write_table(table, folder / "4.parquet", compression="zstd")
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def damage(draw: random.Random, data: bytearray) -> None:
    """Flip bits, half of them in the end, where Parquet describes itself; cut; overwrite; insert."""
    match draw.choice(["flip", "cut", "fill", "insert"]):
        case "flip":
            for _ in range(draw.choice([1, 1, 4, 16])):
                at = draw.randrange(len(data)) if draw.random() < 0.5 else len(data) - 1 - draw.randrange(800)
                data[at] ^= 1 << draw.randrange(8)
        case "cut":
            del data[draw.randrange(len(data)) :]
        case "fill":
            at = draw.randrange(len(data) - 64)
            data[at : at + 64] = bytes([draw.choice([0, 255])]) * 64
        case "insert":
            at = draw.randrange(len(data))
            data[at:at] = draw.randbytes(9)


def test_damaged_files_are_read_or_named(tmp_path: Path) -> None:
    originals, names = write_originals(tmp_path), sorted(path.name for path in tmp_path.iterdir())
    outcomes: Counter[str] = Counter()
    for seed in [*SEEDS, *range(CASES)]:
        draw = random.Random(seed)
        number = draw.randrange(len(names))
        data, path = bytearray(originals[number]), tmp_path / names[number]
        damage(draw, data)
        path.write_bytes(data)
        try:
            outcomes["read"] += bool(list(read_documents(path)))
        except ValueError as error:
            outcomes["refused"] += 1
            assert str(path) in str(error) and "\n" not in str(error), (seed, error)
    assert outcomes["refused"] > CASES / 3 and outcomes["read"] > 0, outcomes
