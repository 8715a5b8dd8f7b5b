import numpy as np
import pytest

from recipes.data.blend import Blend
from recipes.data.loader import EvalSet, global_batch, step_indices


@pytest.mark.parametrize(("dp_size", "num_micro_batches"), [(1, 4), (2, 2), (4, 1), (2, 6), (3, 5)])
def test_ranks_share_the_epoch_without_overlap(dp_size, num_micro_batches):
    seen = np.concatenate(
        [
            step_indices(step, 2, num_micro_batches, rank, dp_size).ravel()
            for step in range(10)
            for rank in range(dp_size)
        ]
    )
    assert sorted(seen.tolist()) == list(range(10 * 2 * num_micro_batches * dp_size))


def test_a_micro_step_holds_the_same_samples_under_every_layout():
    one = step_indices(3, micro_batch_size=8, num_micro_batches=2)
    four = np.concatenate([step_indices(3, 2, 2, rank, 4) for rank in range(4)], axis=1)
    assert np.array_equal(one, four) and one[0, 0] == 48


def test_global_batch_is_the_blend_at_those_indices(make_source):
    blend = Blend([make_source("a", [50] * 40), make_source("b", [9] * 30, 5000)], [0.6, 0.4], 16, 5)
    batches = [global_batch(blend, 4, 3, 2, rank, 2) for rank in range(2)]
    assert [len(rank) for rank in batches] == [2, 2] and batches[0][0].shape == (3, 17)
    joined = np.concatenate([batches[rank][micro] for micro in range(2) for rank in range(2)])
    assert np.array_equal(joined, blend.samples(range(48, 60)))


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize(("asked", "used"), [(7, 7), (12, 12), (100, 12)])
def test_evaluation_counts_each_window_once_on_equal_batches(make_source, dp_size, asked, used):
    source = make_source("valid", [60, 37])  # 97 ids: 12 windows of 8
    sets = [EvalSet(source, 8, asked, 2, rank, dp_size) for rank in range(dp_size)]
    batches = [list(evaluation) for evaluation in sets]
    assert {len(rank) for rank in batches} == {len(sets[0])} == {-(-used // (2 * dp_size))}
    flat = [batch for rank in batches for batch in rank]
    tokens, weights = (np.concatenate(parts) for parts in zip(*((b.tokens_BS1, b.weight_B) for b in flat), strict=True))
    assert tokens.shape[1] == 9 and set(weights.tolist()) <= {0.0, 1.0}
    assert sorted(tokens[weights == 1][:, 0].tolist()) == [8 * i for i in range(used)]
    assert sets[0].num_used == used and (sets[0].note is None) == (used == asked)


def test_evaluation_says_what_is_missing(make_source):
    note = EvalSet(make_source("ja", [20]), 8, 64, 2).note
    assert note == "evaluation of ja: the split has 2 samples of 8 tokens, 64 were asked for; using 2"
    empty = EvalSet(make_source("ja", [5]), 8, 64, 2)
    assert len(empty) == 0 and list(empty) == [] and "has 0 samples" in empty.note
