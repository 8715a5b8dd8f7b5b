"""A small trained tokenizer and token sources held in memory."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tools.tokenizer import train

ENGLISH = "It was the best of times, it was the worst of times, it was the age of wisdom, the age of 1859.\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"


@dataclass
class MemorySource:
    """A domain held in memory: what `recipes.data.blend.TokenSource` asks for."""

    name: str
    ids: np.ndarray
    offsets: np.ndarray


def memory_source(name: str, lengths: list[int], first_id: int = 0) -> MemorySource:
    """Documents of the given lengths whose ids count up from `first_id`, so that an id tells where it lies."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return MemorySource(name, np.arange(first_id, first_id + offsets[-1], dtype=np.int32), offsets)


@pytest.fixture(scope="session")
def make_source():
    return memory_source


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Two domains as JSONL."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, text in (("en", ENGLISH), ("ja", JAPANESE)):
        records = (json.dumps({"text": text * (1 + i % 5) + str(i)}, ensure_ascii=False) for i in range(60))
        (folder / f"{name}.jsonl").write_text("\n".join(records) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer_file(corpus, tmp_path_factory) -> Path:
    """A sentencepiece model trained on `corpus`."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train([corpus], vocab_size=400, out=path, max_bytes=10**6, seed=1)
    return path
