"""Bytes kept for the backward pass: a sum by hand, and laws; tests/distributed/test_activation_memory.py measures them."""

from __future__ import annotations

import copy

import pytest

from recipes.config import Config, Normalization, Precision, Recompute
from recipes.plan.activations import Activations, stage_activations
from recipes.topology import layout_of
from tests.tiny import tiny_config, tiny_moe_config


def _of(config: Config, world_size: int = 1, stage: int = 0) -> Activations:
    return stage_activations(config, layout_of(config, world_size))[stage]


def _micro(make=tiny_config, **changes) -> Config:
    """2 sequences of 16 tokens: 32 tokens of width 32; 4 query and 2 key/value heads of 8 channels; feed-forward width 48."""
    return make(**{"train__micro_batch_size": 2} | changes)


HIDDEN = 32 * 32  # numbers in the hidden states of a micro-batch


def test_a_dense_model_by_hand():
    norm = 2 * HIDDEN + 32
    attention = 32 * (4 + 2 + 2) * 8 + 32 * (4 + 2) * 8 + 32 * 4 * 8  # q, k, v; q and k rotated; what comes out
    attention += 32 * 4 + 4 * 16 * 8  # logarithms of denominators; angles' cosines and sines of q and of k
    block = norm + HIDDEN + attention + norm + HIDDEN + 5 * 32 * 48
    head = norm + HIDDEN + 32 * (60 + 1)  # the true vocabulary, and the sum of each row
    ids = 2 * 32 * 8 + 32  # as inputs and as labels, and which of these are in the vocabulary
    assert _of(_micro()) == Activations(4 * (2 * block + head) + ids, 0, 1)
    full = _of(_micro(model__recompute_granularity=Recompute.full))
    assert full == Activations(4 * (2 * HIDDEN + head + 16 * 8) + ids, 4 * (block - HIDDEN), 1)


def test_experts_by_hand():
    """Instead of a dense part: input, logits, probabilities, denominator, ids and gates, gates and places by expert, hidden,
    activation, outputs; and orders."""
    dense = 4 * (HIDDEN + 5 * 32 * 48)
    rows = 32 * 2
    experts = 4 * HIDDEN + 32 * 4 * (2 * 4 + 1) + rows * (8 + 4 + 4 + 8) + 4 * rows * (3 * 24 + 32)
    orders = rows * 2 * 8 + 32 * 8
    assert _of(_micro(tiny_moe_config)).kept - _of(_micro()).kept == experts + orders - dense
    whole = {"model__recompute_granularity": Recompute.full}
    assert _of(_micro(tiny_moe_config, **whole)).kept - _of(_micro(**whole)).kept == orders
    config = _micro(tiny_moe_config, model__recompute_granularity=Recompute.selective, model__recompute_modules=["moe"])
    assert _of(config).again == experts - 4 * HIDDEN
    assert _of(_micro(tiny_moe_config)).kept - _of(config).kept == experts - 4 * HIDDEN
    config.model.recompute_modules = ["moe_act"]
    assert _of(_micro(tiny_moe_config)).kept - _of(config).kept == 4 * rows * 24


def test_selective_recomputation_leaves_out_what_it_names():
    def kept(*modules: str, **changes) -> int:
        granularity = Recompute.selective if modules else None
        recompute = {"model__recompute_granularity": granularity, "model__recompute_modules": list(modules)}
        return _of(_micro(**recompute, **changes)).kept

    assert kept() - kept("core_attn") == 2 * 4 * 32 * 4
    assert kept() - kept("layernorm") == 2 * 4 * 2 * HIDDEN
    assert kept() - kept("mlp") == 2 * 4 * 5 * 32 * 48
    assert kept() - kept("mlp", "layernorm") == 2 * 4 * (5 * 32 * 48 + 2 * HIDDEN)
    bf16 = {"train__precision": Precision.bf16}
    assert kept(**bf16) == kept("layernorm", **bf16), "RMSNorm keeps an fp32 copy of its input anyway"
    plain = bf16 | {"model__normalization": Normalization.LayerNorm}
    assert kept(**plain) - kept("layernorm", **plain) == 2 * 2 * 2 * HIDDEN


@pytest.mark.parametrize(("accumulation", "in_flight"), [(1, [1, 1, 1, 1]), (3, [3, 3, 2, 1]), (8, [4, 3, 2, 1])])
def test_a_stage_starts_as_many_micro_batches_as_there_are_stages_behind_it(accumulation, in_flight):
    config = tiny_config(model__num_layers=6, parallel__pipeline_model_parallel_size=4)
    config.train.global_batch_size, config.train.micro_batch_size = 2 * accumulation, 2
    stages = [_of(config, 4, stage) for stage in range(4)]
    assert [stage.in_flight for stage in stages] == in_flight
    per_micro_batch = [stage.kept / stage.in_flight for stage in stages]
    assert per_micro_batch[0] > per_micro_batch[2], "the first two of four stages have a layer more"
    assert per_micro_batch[1] - per_micro_batch[2] == pytest.approx(
        _of(_micro(model__num_layers=3)).kept - _of(_micro()).kept
    )


@pytest.mark.parametrize("make", [tiny_config, tiny_moe_config])
def test_more_sharing_keeps_less(make):
    config = make(train__micro_batch_size=2)
    kept = [_of(config).kept]
    config.parallel.tensor_model_parallel_size = 2
    kept.append(_of(config, 2).kept)
    config.parallel.sequence_parallel = True
    kept.append(_of(config, 2).kept)
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 3
    for granularity in (Recompute.selective, Recompute.full):
        changed = copy.deepcopy(config)
        changed.model.recompute_granularity = granularity
        kept.append(_of(changed, 2).kept)
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 5


def test_a_capacity_bounds_the_rows_of_experts():
    free = _micro(tiny_moe_config)
    bounded = _micro(tiny_moe_config, moe__moe_expert_capacity_factor=0.5)
    assert _of(free).kept - _of(bounded).kept == 4 * 32 * (3 * 24 + 32) + 32 * (2 * 8 + 4 + 8)
    assert _of(free) == _of(_micro(tiny_moe_config, moe__moe_expert_capacity_factor=1.5))
