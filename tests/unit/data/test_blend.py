import hashlib

import numpy as np
import pytest
import torch

from recipes.data.blend import Blend, BlendOrder, resolve_weights


def make_blend(make_source, seed=7, weights=(0.5, 0.3, 0.2)):
    sources = [
        make_source("long", [700, 40, 900]),
        make_source("short", [3] * 200, first_id=10_000),
        make_source("tiny", [5], first_id=20_000),
    ]
    return Blend(sources, weights, seq_length=8, seed=seed)


def test_sample_k_depends_on_seed_and_k_only(make_source):
    forward = make_blend(make_source).samples(range(3000))
    blend = make_blend(make_source)
    for k in (2999, 0, 1500, 2998, 7, 1):  # any order, on a blend that never saw the rest
        assert np.array_equal(blend.sample(k), forward[k])
    assert not np.array_equal(make_blend(make_source, seed=8).samples(range(3000)), forward)
    digest = hashlib.sha256(forward.astype("<i8").tobytes()).hexdigest()
    assert digest.startswith("40ebd527308f1a55"), (
        "the data order changed: runs of earlier versions can no longer be resumed"
    )


def test_adding_a_domain_does_not_reorder_the_others(make_source):
    def ids_of(blend, name):
        index = [source.name for source in blend.sources].index(name)
        return [blend.sample(k).tolist() for k in range(400) if blend.source_of(k) == index]

    a, b = make_source("a", [50] * 20), make_source("b", [30] * 20)
    alone, joined = ids_of(Blend([a], [1.0], 8, 1), "a"), ids_of(Blend([b, a], [0.5, 0.5], 8, 1), "a")
    assert joined == alone[: len(joined)]


def test_one_pass_holds_every_window_once_and_passes_differ(make_source):
    source = make_source("a", [17, 33, 1, 50, 28])  # 129 ids: 16 windows of 8 + 1 ids, no slack
    blend = Blend([source], [1.0], seq_length=8, seed=3)
    first, second = blend.samples(range(16)), blend.samples(range(16, 32))
    for samples in (first, second):
        # Windows overlap by one id; without the shared last ids each id but one is there exactly once.
        assert len(set(samples[:, :-1].ravel().tolist())) == 128
    assert not np.array_equal(first, second)


def test_every_id_is_used_in_some_pass(make_source):
    blend = Blend([make_source("a", [15])], [1.0], seq_length=8, seed=3)  # one window per pass, 6 ids of slack
    assert set(blend.samples(range(60)).ravel().tolist()) == set(range(15))


def test_documents_stay_whole_and_join_in_shuffled_order(make_source):
    source = make_source("a", [10] * 50)
    samples = Blend([source], [1.0], seq_length=20, seed=1).samples(range(24))
    steps = np.diff(samples, axis=1)
    assert np.all((steps == 1) | (samples[:, :-1] % 10 == 9))  # ids jump only behind a document's last id
    assert np.any(steps != 1)


@pytest.mark.parametrize("lengths", [[10], [1], [1, 1], [0, 3, 0], [8], [9]])
def test_tiny_sources_wrap_cleanly(make_source, lengths):
    samples = Blend([make_source("a", lengths)], [1.0], seq_length=8, seed=0).samples(range(20))
    assert samples.shape == (20, 9) and samples.dtype == np.int64
    assert samples.min() >= 0 and samples.max() < sum(lengths)


def test_an_empty_source_is_refused(make_source):
    with pytest.raises(ValueError, match="domain 'a' has no tokens"):
        Blend([make_source("a", [])], [1.0], 8, 0)


def test_three_hundred_equal_sources_are_drawn_equally():
    order = BlendOrder([1 / 300] * 300)
    drawn = np.bincount([order.locate(k)[0] for k in range(3000)])
    assert len(drawn) == 300 and drawn.min() >= 9 and drawn.max() <= 11
    assert np.array_equal(drawn, order.counts(3000))


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_kept_in_every_prefix(seed):
    weights = np.random.default_rng(seed).dirichlet(np.full(6, 0.7))
    order = BlendOrder(list(weights))
    sources = np.array([order.locate(k)[0] for k in range(5000)])
    counts = np.cumsum(sources[:, None] == np.arange(6), axis=0)
    assert np.abs(counts - weights * np.arange(1, 5001)[:, None]).max() < 3


def test_every_domain_sample_is_drawn_once_across_periods():
    order = BlendOrder([0.7, 0.3])
    first = len(order._sources) - 1000
    located = [order.locate(k) for k in range(first, first + 2000)]
    for source in (0, 1):
        numbers = [j for index, j in located if index == source]
        begin = int(order.counts(first)[source])
        assert numbers == list(range(begin, begin + len(numbers)))
    assert order.counts(first + 2000).sum() == first + 2000


def test_rare_domains_do_not_come_in_bursts():
    order = BlendOrder([0.9] + [0.1 / 99] * 99)
    rare = np.array([order.locate(k)[0] > 0 for k in range(20_000)])
    assert not np.any(rare[1:] & rare[:-1])


def test_weights_are_resolved():
    tokens = {"b": 300, "a": 100, "empty": 0}
    assert resolve_weights(tokens) == resolve_weights(tokens, {}) == {"a": 0.25, "b": 0.75}
    assert resolve_weights(tokens, "uniform") == {"a": 0.5, "b": 0.5}
    assert resolve_weights(tokens, {"b": 3, "a": 1}) == {"a": 0.25, "b": 0.75}
    assert resolve_weights(tokens, {"b": 2}) == {"b": 1.0}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"c": 1.0}, r"data\.domain_weights\.c: no such domain, the data has a, b, empty"),
        ({"a": -1.0}, "a weight is a finite number >= 0"),
        ({"a": float("nan")}, "a weight is a finite number >= 0"),
        ({"empty": 1.0}, "no tokens in the split"),
        ({"a": 0.0}, "all weights are 0"),
        ("equal", "use proportional, uniform"),
    ],
)
def test_illegal_weights_are_named(weights, message):
    with pytest.raises(ValueError, match=message):
        resolve_weights({"a": 1, "b": 1, "empty": 0}, weights)


def test_reading_leaves_the_global_generators_alone(make_source):
    torch.manual_seed(0)
    np.random.seed(0)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    make_blend(make_source).samples(range(100))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
