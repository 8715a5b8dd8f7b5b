"""Random parts: every token once, even, of every domain; and how distinct parts are."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from recipes.btm.split import data_digest, deal, divergence, part_statistics, write_random_parts
from recipes.data.blend import open_blend
from recipes.data.dataset import load_dataset
from recipes.data.indexed import IndexedSource
from recipes.data.synthetic import write_dataset


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    return load_dataset(write_dataset(tmp_path_factory.mktemp("split") / "data", 60, 8000, ("a", "b")))


def test_random_parts_have_every_token_once_and_even_sizes(info, tmp_path):
    write_random_parts(info, ["a", "b"], 3, seed=1, out=tmp_path / "parts")
    made = load_dataset(tmp_path / "parts")
    for domain in ("a", "b"):
        parts = [made.open(f"random{part}-{domain}", "train") for part in range(3)]
        together = Counter(np.concatenate([part.ids for part in parts]).tolist())
        assert together == Counter(info.open(domain, "train").ids.tolist())
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) < 200
    weights = {"random0-a": 1.0, "random0-b": 1.0}
    assert open_blend(made, weights, 16, seed=1).sample(5).shape == (17,)


def test_parts_depend_on_the_seed_alone(info, tmp_path):
    def parts(name, seed):
        write_random_parts(info, ["a"], 2, seed, tmp_path / name)
        return (tmp_path / name / "random0-a_train.bin").read_bytes()

    assert parts("one", 1) == parts("again", 1) != parts("other", 2)


def test_fewer_documents_than_parts_are_refused(info, tmp_path):
    few = info.domains["a"]["train"].documents
    with pytest.raises(
        ValueError, match=rf"domain a has {few} documents of training text, fewer than the {few + 1} parts"
    ):
        write_random_parts(info, ["a"], few + 1, 1, tmp_path / "parts")


def test_a_document_goes_to_the_smallest_part():
    lengths = np.array([5, 5, 5, 100, 1, 1])
    dealt = deal(lengths, 2, seed=3)
    sizes = np.bincount(dealt, weights=lengths)
    assert sizes.max() <= 100 + 15


def test_divergence_is_zero_for_equal_and_one_for_disjoint_distributions():
    p, q = np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.25, 0.75])
    assert divergence(p, p) == 0 and divergence(p, q) == pytest.approx(1)
    assert divergence(np.array([1.0, 0]), np.array([0.5, 0.5])) == pytest.approx(0.311278, abs=1e-6)


class Ids:
    def __init__(self, ids):
        self.ids, self.offsets = np.array(ids), np.array([0, len(ids)])

    def __len__(self):
        return len(self.ids)


def test_parts_that_are_not_distinct_are_warned_of():
    generator = np.random.default_rng(0)
    same = {name: [Ids(generator.integers(0, 20, 5000))] for name in "pq"}
    found = part_statistics(same, 60)
    assert not found["distinct"] and "hardly distinct" in found["warning"] and found["mean_divergence_bits"] < 0.01
    other = part_statistics(same | {"r": [Ids(generator.integers(20, 40, 5000))]}, 60)
    assert other["distinct"] and "warning" not in other
    assert other["parts"]["r"] == {"documents": 1, "tokens": 5000}
    assert other["divergence_bits"][2][0] == pytest.approx(1) == other["divergence_bits"][0][2]


def test_the_digest_of_data_changes_with_its_text(info, tmp_path):
    before = data_digest(info, ["a"])
    assert data_digest(info, ["a"]) == before != data_digest(info, ["b"])
    again = load_dataset(write_dataset(tmp_path / "data", 60, 8000, ("a", "b"), seed=5))
    assert data_digest(again, ["a"]) != before
    assert isinstance(info.open("a", "train"), IndexedSource)
