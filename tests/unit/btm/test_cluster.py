"""Balanced k-means against brute force, text with planted topics, routing, and files."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from recipes.btm.cluster import (
    Clusters,
    balanced_assignment,
    balanced_kmeans,
    fit,
    normalise_text,
    route,
    softmax_of_distance,
    squared_distances,
)

TOPICS = ("cat dog mouse horse", "sum proof lemma field", "bread salt butter flour")


def topical(topic: int, seed: int) -> str:
    generator = random.Random(seed)
    return " ".join(generator.choices([*TOPICS[topic].split(), "the", "of", "and"], k=40))


@pytest.mark.parametrize("seed", range(5))
def test_the_assignment_is_the_cheapest_balanced_one(seed):
    distances = np.random.default_rng(seed).random((6, 3))
    found = balanced_assignment(distances)
    legal = [a for a in itertools.product(range(3), repeat=6) if max(np.bincount(a, minlength=3)) <= 2]
    cost = {a: sum(distances[piece, cluster] for piece, cluster in enumerate(a)) for a in legal}
    assert np.bincount(found, minlength=3).tolist() == [2, 2, 2]
    assert cost[tuple(found.tolist())] == pytest.approx(min(cost.values()))


def test_balanced_kmeans_finds_uneven_blobs_by_halves():
    """Of 10 and 30 points a plain k-means would keep the blobs; balanced clusters have 20 each."""
    generator = np.random.default_rng(0)
    points = np.concatenate([generator.normal(0, 0.1, (10, 2)), generator.normal(3, 0.1, (30, 2))])
    centres = balanced_kmeans(points, 2, seed=0)
    counts = np.bincount(balanced_assignment(squared_distances(points, centres)))
    assert counts.tolist() == [20, 20]


def test_topics_without_labels_become_clusters():
    texts = [topical(topic, seed) for seed in range(30) for topic in range(3)]
    clusters = fit(texts, 3, features=10, seed=1)
    assigned = clusters.nearest([topical(topic, 1000 + seed) for topic in range(3) for seed in range(10)]).reshape(
        3, 10
    )
    assert all(len(set(row.tolist())) == 1 for row in assigned)
    assert len(set(assigned[:, 0].tolist())) == 3


def test_clusters_survive_their_files(tmp_path):
    texts = [topical(topic, seed) for seed in range(10) for topic in range(3)]
    clusters = fit(texts, 3, features=5, seed=1)
    clusters.save(tmp_path)
    again = Clusters.load(tmp_path)
    assert np.array_equal(again.embed(texts), clusters.embed(texts))
    assert np.array_equal(again.nearest(texts), clusters.nearest(texts))
    (tmp_path / "clusters.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="run the stage split again"):
        Clusters.load(tmp_path)


def test_numbers_are_one_word_and_scripts_without_spaces_single_characters():
    assert normalise_text("In 1905 and 3,000.5 MORE") == "in <number> and <number> more"
    assert normalise_text("吾輩").split() == ["吾", "輩"]


def test_routing_is_the_softmax_of_squared_distances():
    weights = np.exp(softmax_of_distance(np.array([[0.1, 0.3, 2.0]]), 0.1))
    expected = np.exp([-1.0, -3.0, -20.0])
    assert np.allclose(weights, expected / expected.sum())


class Words:
    """A tokenizer whose ids are words."""

    words = sorted({*TOPICS[0].split(), *TOPICS[1].split()})

    def decode(self, ids):
        return " ".join(self.words[index] for index in ids)


def test_routes_follow_what_lies_before_and_nothing_else():
    clusters = fit([topical(topic, seed) for seed in range(30) for topic in range(2)], 2, features=5, seed=1)
    words = Words.words
    animals, sums = ([words.index(word) for word in TOPICS[topic].split()] for topic in range(2))
    tokens = np.array([animals * 2 + sums * 2 + [0], sums * 2 + animals * 2 + [0]])
    routed = route(clusters, tokens, Words(), 0.1, every=4)
    assert routed.shape == (2, 2, 16) and np.allclose(np.exp(routed).sum(axis=0), 1)
    assert np.allclose(routed[..., :4], np.log(0.5))
    animal = int(clusters.nearest([TOPICS[0]])[0])
    assert routed[animal, 0, 4:8].min() > np.log(0.9) and routed[animal, 1, 4:8].max() < np.log(0.1)
    changed = tokens.copy()
    changed[:, 9:] = animals[0]
    assert np.array_equal(route(clusters, changed, Words(), 0.1, every=4)[..., :12], routed[..., :12])


def test_fewer_texts_than_clusters_and_texts_without_words_are_refused():
    with pytest.raises(ValueError, match="fewer than the 4 clusters"):
        fit(["a b", "c d"], 4, features=2, seed=0)
    with pytest.raises(ValueError, match="nothing to cluster by"):
        fit(["aaa", "bbb", "ccc"], 2, features=2, seed=0)
