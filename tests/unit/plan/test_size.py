"""Sizes against published totals and against sums worked out by hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from recipes.config import Config, ModelConfig, OptimizerName, Precision
from recipes.plan.size import (
    RankBytes,
    active_parameters,
    bytes_per_rank,
    describe,
    flops_per_token,
    plan,
    total_parameters,
)
from recipes.pretrain import compose

# GPT-2 small has 124,439,808 with 1024 learned positions of 768, which rotary ones replace. The others are the element
# counts of the published weight files; Qwen3-0.6B is tied.
PUBLISHED = {
    "gpt_125m": 124_439_808 - 1024 * 768,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "qwen3_0b6": 596_049_920,
    "qwen3_8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    config = compose([f"model={name}"])
    assert total_parameters(config) == active_parameters(config) == PUBLISHED[name]


@pytest.mark.parametrize(("name", "billions"), [("gpt_350m", 0.354), ("gpt_1b3", 1.31), ("gpt_7b", 6.65)])
def test_parameters_have_the_size_in_the_name(name, billions):
    assert total_parameters(compose([f"model={name}"])) / 1e9 == pytest.approx(billions, rel=0.005)


def test_small_models_have_the_size_that_their_files_state():
    for name, millions in (("debug_1m", 0.9), ("laptop", 1.4)):
        config = compose([f"model={name}", "model.vocab_size=4096"])
        assert total_parameters(config) / 1e6 == pytest.approx(millions, rel=0.05)


def _small(**changes) -> Config:
    """2 layers, hidden 8, 4 heads of 2, 2 key/value heads, ffn 16, vocabulary 10 padded to 16, sequences of 4."""
    values = dict(
        num_layers=2, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=16, vocab_size=10
    )
    return Config(model=ModelConfig(**values | {"seq_length": 4, "make_vocab_size_divisible_by": 16} | changes))


BLOCK = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 16  # q, k and v, out, feed-forward
NORMS = (2 * 2 + 1) * 8


def test_parameters_by_hand():
    assert total_parameters(_small()) == 2 * BLOCK + NORMS + 10 * 8
    assert total_parameters(_small(share_embeddings_and_output_weights=False)) == 2 * BLOCK + NORMS + 2 * 10 * 8


@pytest.mark.parametrize("tied", [True, False])
def test_flops_by_hand(tied):
    """Forward and backward are three forwards; a position sees half of the sequence on average."""
    products = 2 * (2 * BLOCK + 10 * 8)
    scores_and_values = 2 * 2 * (2 * (4 / 2) * 4 * 2)
    config = _small(share_embeddings_and_output_weights=tied)
    assert flops_per_token(config) == 3 * (products + scores_and_values)


def test_flops_of_gpt3_175b_are_the_published_ones():
    """Brown et al. 2020, app. D: 3.14e23 for 300B tokens, by 6 per parameter, attention left out."""
    config = compose(["model=gpt_7b"])
    model = config.model
    model.num_layers, model.hidden_size, model.num_attention_heads, model.ffn_hidden_size = 96, 12288, 96, 4 * 12288
    attention = 6 * 96 * 2048 * 12288
    assert (flops_per_token(config) - attention) * 300e9 == pytest.approx(3.14e23, rel=0.01)


def _bytes(
    stage: int, precision: Precision, ranks: int = 4, optimizer: OptimizerName = OptimizerName.adamw
) -> RankBytes:
    config = _small()
    config.zero.stage, config.train.precision, config.optimizer.name = stage, precision, optimizer
    return bytes_per_rank(config, ranks)


HELD = 2 * BLOCK + NORMS + 16 * 8  # with padding rows; divisible by 4


@pytest.mark.parametrize(
    ("stage", "precision", "weights", "gradients", "optimizer"),
    [
        (0, Precision.fp32, 4, 4, 8),
        (1, Precision.fp32, 4, 4, 12 / 4),
        (2, Precision.fp32, 4, 4 / 4, 12 / 4),
        (0, Precision.bf16, 2, 2, 12),
        (1, Precision.bf16, 2, 2 + 4, 12 / 4),
        (2, Precision.bf16, 2, 4 / 4, 12 / 4),
    ],
)
def test_bytes_per_rank_by_hand(stage, precision, weights, gradients, optimizer):
    expected = RankBytes(int(HELD * weights), int(HELD * gradients), int(HELD * optimizer))
    assert _bytes(stage, precision) == expected
    assert expected.total == HELD * (weights + gradients + optimizer)


def test_sgd_has_no_moments():
    assert _bytes(0, Precision.fp32, optimizer=OptimizerName.sgd).optimizer == 0
    assert _bytes(1, Precision.bf16, optimizer=OptimizerName.sgd).optimizer == HELD


def test_more_ranks_never_cost_more():
    for stage in (0, 1, 2):
        totals = [_bytes(stage, Precision.bf16, ranks).total for ranks in (1, 2, 3, 8)]
        assert totals == sorted(totals, reverse=True)


def test_plan_and_its_table_agree():
    config = compose(["experiment=gpt_125m_8gpu_h100_bf16"])
    sizes = plan(config, 8)
    assert sizes["accumulation"] * sizes["data_parallel_size"] * config.train.micro_batch_size == 256
    assert sizes["total_tokens"] == pytest.approx(300e9, rel=1e-4)
    assert sizes["bytes_per_rank"]["total"] == bytes_per_rank(config, 8).total
    shown = io.StringIO()
    Console(width=200, file=shown).print(describe(config, 8))
    text = shown.getvalue()
    for key in ("total_params", "flops_per_token", "tokens_per_step"):
        assert f"{sizes[key]:,}" in text
    assert f"{sizes['bytes_per_rank']['optimizer']:,}" in text


def test_sizes_need_a_vocabulary():
    with pytest.raises(ValueError, match=r"model\.vocab_size=null"):
        total_parameters(Config())
