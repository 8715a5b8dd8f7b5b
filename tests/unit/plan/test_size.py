"""Sizes against published totals and against sums worked out by hand."""

from __future__ import annotations

import copy
import io
import math
import os
from pathlib import Path

import pytest
from rich.console import Console

from recipes.config import Activation, Config, ModelConfig, MoeConfig, OptimizerName, Precision, Recompute
from recipes.launcher import rank_environment
from recipes.logical import logical_tensors
from recipes.plan.shapes import Held, held_weights, local_shape
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
from recipes.topology import Cluster, Layout, Role, layout_of
from recipes.validation import problems
from tests.ranks import forked, run_ranks

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


# Of the published weight files, and the active ones as their reports give them. OLMoE's norms of queries and keys have one
# weight for each of 2048 channels, ours for each of the 128 of a head.
PUBLISHED_EXPERTS = {
    "mixtral_8x7b": (46_702_792_704, 12.9),
    "qwen3_30b_a3b": (30_532_122_624, 3.35),
    "olmoe_1b_7b": (6_919_161_856 - 16 * 2 * (2048 - 128), 1.28),
}


@pytest.mark.parametrize("name", PUBLISHED_EXPERTS)
def test_parameters_with_experts_are_the_published_ones(name):
    config = compose([f"model={name}", f"moe={name}"])
    total, active_billions = PUBLISHED_EXPERTS[name]
    assert total_parameters(config) == total
    assert active_parameters(config) / 1e9 == pytest.approx(active_billions, rel=0.004)  # as rounded there


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


def _experts(**changes) -> Config:
    """The small model with 4 experts of width 6, top-2, in layer 0, and a shared one of width 10."""
    config = _small()
    values = dict(num_moe_experts=4, moe_layer_freq=2, moe_ffn_hidden_size=6, moe_shared_expert_intermediate_size=10)
    config.moe = MoeConfig(**values | {"moe_router_topk": 2} | changes)
    return config


ATTENTION = BLOCK - 3 * 8 * 16
EXPERT, SHARED, ROUTER = 3 * 8 * 6, 3 * 8 * 10, 4 * 8


def test_parameters_and_flops_with_experts_by_hand():
    outside = 2 * ATTENTION + 3 * 8 * 16 + SHARED + ROUTER + 10 * 8  # matrices; the norms come on top
    config = _experts()
    assert total_parameters(config) == outside + NORMS + 4 * EXPERT
    assert active_parameters(config) == outside + NORMS + 2 * EXPERT
    assert flops_per_token(config) - flops_per_token(_small()) == 6 * (2 * EXPERT + SHARED + ROUTER - 3 * 8 * 16)
    every_layer = _experts(moe_layer_freq=1, moe_shared_expert_intermediate_size=None)
    assert total_parameters(every_layer) == 2 * (ATTENTION + ROUTER + 4 * EXPERT) + NORMS + 10 * 8


@forked
def test_a_built_model_has_the_planned_weights():
    from recipes.model.gpt import GPT, registry

    for config in (_experts(), _experts(moe_layer_freq=1), _small()):
        entries = registry(GPT(config), config)
        assert sum(entry.parameter.numel() for entry in entries) == total_parameters(config) + 6 * 8  # padding rows


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
        (3, Precision.fp32, 4 / 4 + 4, 4 / 4, 12 / 4),  # every parameter is so small that each rank keeps it, too
        (3, Precision.bf16, 2 / 4 + 2, 4 / 4, 12 / 4),
    ],
)
def test_bytes_per_rank_by_hand(stage, precision, weights, gradients, optimizer):
    expected = RankBytes(int(HELD * weights), int(HELD * gradients), int(HELD * optimizer))
    assert _bytes(stage, precision) == expected
    assert expected.total == HELD * (weights + gradients + optimizer)


def test_parameters_that_zero_3_keeps_whole():
    """Up to 100,000 elements, where q, k and v are one parameter, gate and up another."""
    config = _small(hidden_size=256, num_attention_heads=4, num_query_groups=1, ffn_hidden_size=512, vocab_size=600)
    config.zero.stage = 3
    out, norms = 2 * 256 * 256, 5 * 256
    held = out + norms + 2 * ((256 + 2 * 64) * 256 + 3 * 256 * 512) + 608 * 256
    assert bytes_per_rank(config, 2).weights == 4 * (held // 2 + out + norms + 2 * (256 + 2 * 64) * 256)
    config.model.num_query_groups = 2  # 512 x 256
    assert bytes_per_rank(config, 2).weights == 4 * (held // 2 + 2 * 64 * 256 + out + norms)


@pytest.mark.parametrize("tied", [True, False])
def test_stages_by_hand(tied):
    """Two layers with one norm each before attention and feed-forward part; the last stage has one more, and the head."""
    config = _small(share_embeddings_and_output_weights=tied)
    config.parallel.pipeline_model_parallel_size = 2
    block, table = BLOCK + 2 * 8, 16 * 8
    assert held_weights(config, Layout(2, 1, 2)) == [Held(block + table, 0), Held(block + 8 + table, 0)]
    heaviest = block + 8 + table
    assert bytes_per_rank(config, 2) == RankBytes(4 * heaviest, 4 * heaviest, 8 * heaviest), (
        "ZeRO has nothing to divide"
    )
    assert bytes_per_rank(config, 4) == RankBytes(4 * heaviest, 4 * heaviest, 12 * heaviest // 2)
    assert [stage["bytes"]["weights"] for stage in plan(config, 2)["stages"]] == [4 * (heaviest - 8), 4 * heaviest]


def test_experts_of_a_stage_by_hand():
    config = _experts(moe_layer_offset=1)  # in the second of two layers
    config.parallel.pipeline_model_parallel_size = config.parallel.expert_model_parallel_size = 2
    first, second = held_weights(config, Layout(4, 1, 2, 2))
    assert first == Held(BLOCK + 2 * 8 + 16 * 8, 0)
    assert second == Held(ATTENTION + SHARED + ROUTER + 3 * 8 + 16 * 8, 4 * EXPERT // 2)


@pytest.mark.parametrize(("size", "copies"), [(1, 4), (2, 2), (4, 1)])
def test_bytes_per_rank_with_experts_by_hand(size, copies):
    """4 ranks: the dense part is divided over 4, the experts of a rank over the ranks that hold the same ones."""
    config = _experts()
    config.parallel.expert_model_parallel_size, config.zero.stage = size, 2
    dense = 2 * ATTENTION + 3 * 8 * 16 + SHARED + ROUTER + NORMS + 16 * 8
    local = 4 * EXPERT // size
    part = dense // 4 + local // copies
    assert bytes_per_rank(config, 4) == RankBytes(4 * (dense + local), 4 * part, 12 * part)


# Layouts of 8 ranks -> ranks that share a matrix, an expert, experts; copies of the experts' and of the dense part.
FOLDED = {
    "TP 2": (2, 1, 1, 8, 4),
    "TP 2, EP 8": (2, 1, 8, 1, 4),
    "TP 2, EP 2, ETP 2": (2, 2, 2, 2, 4),
    "TP 4, EP 2, ETP 4": (4, 4, 2, 1, 2),
    "TP 4, EP 4": (4, 1, 4, 2, 2),
}


@pytest.mark.parametrize("name", FOLDED)
def test_bytes_per_rank_under_tensor_parallelism_by_hand(name):
    """Matrices and padded vocabulary are divided by TP, experts by EP x ETP, the shared expert by ETP, norms and router not."""
    tensor, parts, size, expert_copies, copies = FOLDED[name]
    config = _experts(num_moe_experts=8, moe_ffn_hidden_size=12, moe_shared_expert_intermediate_size=16)
    config.model.num_query_groups = 4
    parallel, config.zero.stage = config.parallel, 2
    parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size = tensor, parts
    parallel.expert_model_parallel_size = size
    matrices = 2 * 4 * 8 * 8 + 3 * 8 * 16  # attention of both layers, the dense feed-forward part
    router, shared, experts = 8 * 8, 3 * 8 * 16, 8 * 3 * 8 * 12
    dense = (
        matrices // tensor + router + NORMS + shared // parts + 16 * 8
    )  # each rank has 16 rows, one or none of them true
    local = experts // (size * parts)
    held, part = dense + local, math.ceil(dense / copies) + math.ceil(local / expert_copies)
    assert bytes_per_rank(config, 8) == RankBytes(4 * held, 4 * part, 12 * part)


def test_shapes_on_a_rank_by_hand():
    """All kinds of tensors, on the third of four tensor-parallel ranks or any other."""
    config = _experts(moe_ffn_hidden_size=12, moe_shared_expert_intermediate_size=16)
    model = config.model
    model.num_query_groups, model.vocab_size, model.make_vocab_size_divisible_by = 4, 70, 8
    model.share_embeddings_and_output_weights, model.qk_layernorm, model.add_qkv_bias = False, True, True
    expected = {
        "embedding.weight": (24, 8),  # 70 rows are padded to 96
        "head.weight": (24, 8),
        "final_norm.weight": (8,),
        "layers.0.attention_norm.weight": (8,),
        "layers.0.attention.q.weight": (2, 8),
        "layers.0.attention.v.bias": (2,),
        "layers.0.attention.q_norm.weight": (2,),
        "layers.0.attention.out.weight": (8, 2),
        "layers.0.moe.router.weight": (4, 8),
        "layers.1.ffn.gate.weight": (4, 8),
        "layers.1.ffn.down.weight": (8, 4),
    }
    in_experts = {"experts.3.up.weight": (12, 8), "experts.3.down.weight": (8, 12), "shared.gate.weight": (16, 8)}
    divided = {"experts.3.up.weight": (3, 8), "experts.3.down.weight": (8, 3), "shared.gate.weight": (4, 8)}
    for parts, shapes in ((1, in_experts), (4, divided)):
        layout = Layout(4, 4, expert_tensor_parallel_size=parts)
        found = {name: local_shape(tensor, config, layout) for name, tensor in logical_tensors(config).items()}
        assert {name: found[name] for name in expected} == expected
        assert {name: found[f"layers.0.moe.{name}"] for name in shapes} == shapes


def test_biases_behind_divided_columns_are_whole():
    config = _small(add_bias_linear=True)
    tensors = logical_tensors(config)
    names = [f"layers.1.{name}.bias" for name in ("attention.q", "attention.out", "ffn.up", "ffn.down")]
    assert [local_shape(tensors[name], config, Layout(2, 2)) for name in names] == [(4,), (8,), (8,), (8,)]


def built_weights(rank: int, world_size: int, configs: list[Config]) -> list[tuple[int, Held]]:
    """This rank's stage of built models, and what their parameters have there."""
    from recipes.model.gpt import GPT
    from recipes.train.job import start_process

    start_process(configs[0], rank_environment(os.environ))
    found = []
    for config in configs:
        layout = layout_of(config, world_size)
        parameters = list(GPT(config, layout).parameters())
        experts = sum(p.numel() for p in parameters if not getattr(p, "allreduce", True))
        held = Held(sum(p.numel() for p in parameters) - experts, experts)
        found.append((layout.index(Role.pp, rank), held))
    return found


def test_ranks_of_a_built_model_have_the_planned_weights():
    configs = []
    for sequence, size, parts, tied, stages in (
        (False, 1, 1, True, 1),
        (True, 4, 1, False, 1),
        (True, 2, 2, True, 1),
        (False, 1, 2, False, 1),
        (True, 2, 1, True, 2),
        (False, 1, 2, False, 2),
    ):
        config = _experts(moe_ffn_hidden_size=12, moe_shared_expert_intermediate_size=16)
        config.model.add_qkv_bias, config.model.share_embeddings_and_output_weights = True, tied
        config.model.qk_layernorm = tied
        parallel = config.parallel
        parallel.tensor_model_parallel_size, parallel.sequence_parallel = 2, sequence
        parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size = size, parts
        parallel.pipeline_model_parallel_size, config.model.num_layers = stages, 3
        configs.append(config)
    dense = _small(add_bias_linear=True, activation=Activation.gelu)
    dense.parallel.tensor_model_parallel_size = 2
    configs.append(dense)
    dense = copy.deepcopy(dense)
    dense.parallel.pipeline_model_parallel_size, dense.parallel.tensor_model_parallel_size = 4, 1
    dense.model.num_layers, dense.parallel.num_layers_in_first_pipeline_stage = 6, 1
    configs.append(dense)
    for rank in run_ranks("tests.unit.plan.test_size:built_weights", 4, configs):
        for config, (stage, held) in zip(configs, rank, strict=True):
            assert held == held_weights(config, layout_of(config, 4))[stage]


def test_sgd_has_no_moments():
    assert _bytes(0, Precision.fp32, optimizer=OptimizerName.sgd).optimizer == 0
    assert _bytes(1, Precision.bf16, optimizer=OptimizerName.sgd).optimizer == HELD


def test_more_ranks_never_cost_more():
    for stage in (0, 1, 2, 3):
        totals = [_bytes(stage, Precision.bf16, ranks).total for ranks in (1, 2, 3, 8)]
        assert totals == sorted(totals, reverse=True)


def test_plan_and_its_table_agree():
    config = compose(["experiment=gpt_125m_8gpu_h100_bf16"])
    sizes = plan(config, 8)
    assert sizes["accumulation"] * sizes["data_parallel_size"] * config.train.micro_batch_size == 256
    assert sizes["total_tokens"] == pytest.approx(300e9, rel=1e-4)
    assert sizes["bytes_per_rank"]["total"] == bytes_per_rank(config, 8).total
    text = _shown(config, 8)
    for key in ("total_params", "flops_per_token", "tokens_per_step"):
        assert f"{sizes[key]:,}" in text
    assert f"{sizes['bytes_per_rank']['optimizer']:,}" in text


def test_plan_of_experts_and_its_table_agree():
    config = compose(["experiment=qwen3_30b_a3b_64gpu_h100_bf16"])
    sizes = plan(config, 64)
    keys = ("num_moe_layers", "data_parallel_size", "expert_model_parallel_size", "expert_data_parallel_size")
    assert [sizes[key] for key in keys] == [48, 64, 8, 8]
    assert sizes["total_params"] == PUBLISHED_EXPERTS["qwen3_30b_a3b"][0] > sizes["active_params"]
    text = _shown(config, 64)
    for part in ("128 x 48 layers, top-8, width 768", "EP 8: 16 of the 128", "expert-data-parallel 8"):
        assert part in text


def test_plan_and_table_show_both_grids_and_the_nodes():
    config = compose(["experiment=moe_8x7b_64gpu_h100_bf16"])
    parallel = config.parallel
    parallel.data_parallel_size, parallel.tensor_model_parallel_size, parallel.sequence_parallel = 16, 4, True
    parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size = 8, 1
    assert problems(config, 64, launch_dir=Path(), dry_run=True) == []
    sizes = plan(config, 64, Cluster(8, 8))
    expected = {"world_size": 64, "data_parallel_size": 16, "tensor_model_parallel_size": 4, "sequence_parallel": True}
    expected |= {"expert_data_parallel_size": 8, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}
    assert sizes | expected == sizes
    assert sizes["nodes"] == {"num_nodes": 8, "accelerators_per_node": 8, "crossed_by": ["data", "expert data"]}
    assert sizes["accumulation"] * 16 * config.train.micro_batch_size == config.train.global_batch_size
    text = _shown(config, 64, Cluster(8, 8))
    for part in (
        "64 = data-parallel 16 x tensor-parallel 4 (sequence parallel), ZeRO",
        "EP 8: 1 of the 8 experts of a layer on each rank; 64 ranks = expert-data-parallel 8 x EP 8 x ETP 1",
        "8 x 8 ranks; groups that cross nodes: data, expert data",
    ):
        assert part in text
    parallel.expert_tensor_parallel_size, parallel.sequence_parallel = 4, False
    text = _shown(config, 64)
    assert "on each rank, 1/4 of each; 64 ranks = expert-data-parallel 2 x EP 8 x ETP 4" in text
    assert "sequence parallel" not in text and "nodes" not in text and "nodes" not in plan(config, 64)


def _shown(config: Config, world_size: int, cluster: Cluster | None = None) -> str:
    shown = io.StringIO()
    Console(width=200, file=shown).print(describe(config, world_size, cluster))
    return shown.getvalue()


def test_plan_and_table_show_stages_and_the_bubble():
    config = compose(["experiment=switch_8e", "data.path=null", "model.vocab_size=4096", "zero.stage=1"])
    parallel, config.model.num_layers, config.train.micro_batch_size = config.parallel, 5, 2
    parallel.pipeline_model_parallel_size = parallel.tensor_model_parallel_size = parallel.data_parallel_size = 2
    assert problems(config, 8, launch_dir=Path(), dry_run=True) == []
    sizes = plan(config, 8, Cluster(2, 4))
    assert [stage["layers"] for stage in sizes["stages"]] == [[0, 2], [3, 4]]
    assert (sizes["accumulation"], sizes["bubble_share"]) == (4, 1 / 5) and sizes["nodes"]["crossed_by"] == ["pipeline"]
    assert [stage["micro_batches"] for stage in sizes["stages"]] == [2, 1]
    for key in ("activation_bytes", "recomputed_bytes"):
        assert sizes[f"{key}_per_rank"] == max(stage[key] for stage in sizes["stages"])
    text = _shown(config, 8)
    for part in (
        "8 = data-parallel 2 x tensor-parallel 2 x 2 pipeline stages, ZeRO",
        "2, layers 0-2 | 3-4",
        "each stage waits for 20.0% of a step = 1 / (4 micro-batches + 1)",
        "8 ranks = expert-data-parallel 2 x EP 1 x ETP 2 x 2 pipeline stages",
        f"{sizes['activation_bytes_per_rank']:,}",
        "stage 0: what 2 micro-batches keep for the backward pass in plain torch, tokens spread evenly over experts",
        f"{max(stage['sum'] for stage in sizes['stages']):,}",
    ):
        assert part in text, part
    assert "again" not in text
    config.model.recompute_granularity = Recompute.full
    assert f"{plan(config, 8)['recomputed_bytes_per_rank']:,}" in _shown(config, 8)
    config.train.micro_batch_size = 8  # one at a time
    assert plan(config, 8)["bubble_share"] == 1 / 2 and "what a micro-batch keeps for" in _shown(config, 8)


def test_a_dense_plan_has_no_experts():
    config = _small()
    sizes = plan(config, 2)
    keys = ("num_moe_layers", "expert_model_parallel_size", "expert_data_parallel_size")
    assert [sizes[key] for key in keys] == [0, 1, 2]
    assert "expert" not in _shown(config, 2)


EQUAL_COMPUTE = ["switch_4e", "switch_8e", "switch_16e", "switch_32e", "top2_8e", "fine_grained_32e_top4_shared"]


@pytest.mark.parametrize("name", EQUAL_COMPUTE)
def test_laptop_experiments_cost_as_much_per_token_as_the_dense_one(name):
    """Within 3 %, router included, while they have more weights."""
    dense, sparse = (compose([f"experiment={choice}", "model.vocab_size=4096"]) for choice in ("dense", name))
    assert flops_per_token(sparse) == pytest.approx(flops_per_token(dense), rel=0.03)
    assert total_parameters(sparse) > 1.5 * total_parameters(dense)


def test_sizes_need_a_vocabulary():
    with pytest.raises(ValueError, match=r"model\.vocab_size=null"):
        total_parameters(Config())
