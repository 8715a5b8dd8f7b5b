"""Layouts: illegal ones are refused with their numbers, the legal ones listed, and what is accepted can be built.

Legality is judged here a second time, by sums of the test's own.
"""

from __future__ import annotations

import copy
import random
import re

import pytest

from recipes.config import Config, Precision
from recipes.topology import layout_of
from recipes.validation import prepare, problems
from recipes.validation.layouts import legal_layouts
from tests.tiny import change, tiny_config

UNLIKE = {"moe__num_moe_experts_per_layer": [4, 6], "moe__moe_ffn_hidden_size": 24}
EXPERTS = {"moe__num_moe_experts": 8, "moe__moe_ffn_hidden_size": 24}


def _problems(config: Config, world_size: int, tmp_path) -> list[str]:
    config.data.path = None
    return problems(config, world_size, launch_dir=tmp_path, dry_run=True)


def _config(**changes) -> Config:
    """4 heads, 2 key/value heads, width 48, 16 tokens; 8 sequences per step, one by one."""
    return tiny_config(**{"train__micro_batch_size": 1} | changes)


# Changes -> ranks -> what the one message must say.
TP2 = {"parallel__tensor_model_parallel_size": 2}
TP4 = {"parallel__tensor_model_parallel_size": 4, "model__num_query_groups": 4}
PP2 = {"parallel__pipeline_model_parallel_size": 2}
FIRST, LAST = (f"parallel__num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
CASES = [
    (
        TP2 | {"parallel__data_parallel_size": 2},
        2,
        ["data_parallel_size=2 x tensor_model_parallel_size=2 = 4 ranks", "2 processes were started", "start 4, or", "null"],
    ),
    (
        TP2 | {"parallel__data_parallel_size": 2},
        3,
        ["= 4 ranks but 3 processes were started; start 4"],
    ),
    (TP2, 1, ["tensor_model_parallel_size=2", "1 process was started", "use 1, or start 2"]),
    (TP4, 6, ["tensor_model_parallel_size=4", "6 processes were started", "one of 1, 2, or start 4"]),
    (TP2 | {"train__global_batch_size": 3}, 4, ["=3", "micro_batch_size=1 x data-parallel 2 = 2", "try 2 or 4"]),
    (TP4 | {"model__num_query_groups": 2}, 4, ["size=4 must divide model.num_query_groups=2; use one of 1, 2"]),
    (
        TP4 | {"model__num_attention_heads": 6, "model__num_query_groups": None, "model__kv_channels": 8},
        4,
        ["size=4 must divide model.num_attention_heads=6; use one of 1, 2, or another model.num_attention_heads"],
    ),
    (TP4 | {"model__ffn_hidden_size": 46}, 4, ["size=4 must divide model.ffn_hidden_size=46; use one of 1, 2"]),
    (
        TP4 | {"model__ffn_hidden_size": None, "model__hidden_size": 24, "model__kv_channels": 6} | EXPERTS
        | {"moe__moe_ffn_hidden_size": None, "parallel__expert_tensor_parallel_size": 3},
        4,
        ["expert_tensor_parallel_size=3 must be 1 or parallel.tensor_model_parallel_size=4; use one of 1, 4"],
    ),
    (
        TP2 | {"model__seq_length": 15, "parallel__sequence_parallel": True},
        2,
        ["size=2 must divide model.seq_length=15", "sequence_parallel=true", "use 1, or another model.seq_length"],
    ),
    (
        TP2 | EXPERTS | {"model__seq_length": 15, "parallel__expert_tensor_parallel_size": 1},
        2,
        ["size=2 must divide model.seq_length=15", "expert_tensor_parallel_size=1", "use 1"],
    ),
    (
        {"parallel__sequence_parallel": True},
        2,
        ["sequence_parallel=true", "tensor_model_parallel_size=1", "set that size to 2, or use parallel.sequence_parallel=false"],
    ),
    (
        {"parallel__sequence_parallel": True, "model__seq_length": 15},
        2,
        ["sequence_parallel=true", "tensor_model_parallel_size=1", "; use parallel.sequence_parallel=false"],
    ),
    (
        {"parallel__expert_tensor_parallel_size": 2} | EXPERTS,
        2,
        ["expert_tensor_parallel_size=2 must be 1 or parallel.tensor_model_parallel_size=1; use 1"],
    ),
    (
        TP2 | {"parallel__expert_tensor_parallel_size": 1},
        2,
        ["parallel.expert_tensor_parallel_size=1 has no effect in a dense model"],
    ),
    (
        TP4 | EXPERTS | {"moe__moe_ffn_hidden_size": 26},
        4,
        ["moe_ffn_hidden_size=26", "expert_tensor_parallel_size=4 (null: tensor_model_parallel_size)", "24 or 28", "size=1"],
    ),
    (
        TP4 | EXPERTS | {"moe__moe_shared_expert_intermediate_size": 6, "parallel__expert_tensor_parallel_size": 4},
        4,
        ["shared_expert_intermediate_size=6", "expert_tensor_parallel_size=4; try 4 or 8", "size=1"],
    ),
    (
        TP2 | EXPERTS | {"parallel__expert_model_parallel_size": 4},
        4,
        [
            "parallel.expert_model_parallel_size=4 x expert_tensor_parallel_size=2 = 8 must divide 4 ranks",
            "(data-parallel 2 x tensor-parallel 2); use one of 1, 2, or start 8 processes",
            "parallel.data_parallel_size=4",
        ],
    ),
    (
        TP2 | EXPERTS | {"parallel__expert_model_parallel_size": 8, "parallel__expert_tensor_parallel_size": 1},
        4,
        ["size=8 x expert_tensor_parallel_size=1 = 8 must divide 4 ranks", "use one of 1, 2, 4, or start 8"],
    ),
    (
        TP2 | EXPERTS | {"parallel__expert_model_parallel_size": 3, "moe__num_moe_experts": 9},
        2,
        ["size=3 x expert_tensor_parallel_size=2 = 6 must divide 2 ranks", "use 1, or start 6", "data_parallel_size=3"],
    ),
    (
        TP2 | EXPERTS | {"parallel__expert_model_parallel_size": 4, "moe__num_moe_experts": 6}
        | {"parallel__expert_tensor_parallel_size": 1},
        4,
        ["moe.num_moe_experts=6 must be divisible by parallel.expert_model_parallel_size=4; try 4 or 8"],
    ),
    (
        UNLIKE | {"parallel__expert_model_parallel_size": 4},
        4,
        ["moe.num_moe_experts_per_layer[1]=6 must be divisible by parallel.expert_model_parallel_size=4; try 4 or 8"],
    ),
    (
        UNLIKE | {"parallel__expert_model_parallel_size": 8, "moe__num_moe_experts_per_layer": [8, 16]},
        4,
        ["expert_model_parallel_size=8 must divide the data-parallel size 4", "use one of 1, 2, 4, or start 8"],
    ),
    (
        UNLIKE | {"zero__stage": 3},
        2,
        ["zero.stage=3 with moe.num_moe_experts_per_layer=[4,6]"],
    ),
    (
        UNLIKE | {"model__add_bias_linear": True},
        2,
        ["model.add_bias_linear=true with moe.num_moe_experts_per_layer=[4,6]"],
    ),
    (
        TP4 | EXPERTS | {"moe__moe_ffn_hidden_size": 26, "parallel__expert_tensor_parallel_size": 3},
        4,
        ["expert_tensor_parallel_size=3 must be 1 or parallel.tensor_model_parallel_size=4; use 1"],  # 4: not 26
    ),
    (
        EXPERTS | {"parallel__tensor_model_parallel_size": 3, "moe__moe_ffn_hidden_size": 9, "model__num_query_groups": None},
        6,
        ["size=3 must divide model.num_attention_heads=4; use 1, or another"],  # 2: not 9
    ),
    (PP2, 3, ["pipeline_model_parallel_size=2 must divide", "3 processes were started; use 1, or start 2 processes or a"]),
    (
        PP2 | {"parallel__data_parallel_size": 2},
        2,
        ["data_parallel_size=2 x pipeline_model_parallel_size=2 = 4 ranks but 2 processes", "start 4, or", "null"],
    ),
    (
        PP2 | TP2 | {"parallel__data_parallel_size": 2},
        4,
        ["size=2 x tensor_model_parallel_size=2 x pipeline_model_parallel_size=2 = 8 ranks but 4 processes"],
    ),
    (
        PP2 | TP4 | {"model__num_layers": 6},
        12,
        ["pipeline_model_parallel_size=2 x tensor_model_parallel_size=4 = 8 must divide", "use one of 1, 3, or start 8 proc"],
    ),
    (PP2 | TP2 | {"train__global_batch_size": 3}, 8, ["=3", "micro_batch_size=1 x data-parallel 2 = 2", "try 2 or 4"]),
    (
        {"parallel__pipeline_model_parallel_size": 4},
        4,
        ["size=4 must be at most model.num_layers=2, as each stage needs a layer; use one of 1, 2, or more layers"],
    ),
    ({FIRST: 1}, 2, ["num_layers_in_first_pipeline_stage=1 has no effect with", "size=1; use more stages, or null"]),
    (PP2 | {FIRST: 2}, 2, ["first_pipeline_stage=2 leaves none of model.num_layers=2 for 1 other stage", "use at most 1, or null"]),
    (
        {"parallel__pipeline_model_parallel_size": 3, LAST: 3, "model__num_layers": 4},
        3,
        ["last_pipeline_stage=3 leaves 1 of model.num_layers=4 for 2 other stages, each of which needs one; use at most 2, or"],
    ),
    (
        {"parallel__pipeline_model_parallel_size": 3, FIRST: 2, LAST: 3, "model__num_layers": 4},
        3,
        ["first_pipeline_stage=2 + num_layers_in_last_pipeline_stage=3 = 5 leaves none of", "at most 3 in all, or null"],
    ),
    (
        PP2 | {FIRST: 2, LAST: 3, "model__num_layers": 4},
        2,
        ["first_pipeline_stage=2 + num_layers_in_last_pipeline_stage=3 = 5 must be model.num_layers=4, as there is no other"],
    ),
    (
        PP2 | EXPERTS | {"parallel__expert_model_parallel_size": 4},
        4,
        ["expert_model_parallel_size=4 must divide the data-parallel size 2", "use one of 1, 2, or start 8", "_size=4"],
    ),
    (
        PP2 | TP2 | EXPERTS | {"parallel__expert_model_parallel_size": 4},
        8,
        [
            "size=4 x expert_tensor_parallel_size=2 = 8 must divide 4 ranks of each pipeline stage (data-parallel 2 x",
            "use one of 1, 2, or start 16 processes (to plan only: parallel.data_parallel_size=4)",
        ],
    ),
    (PP2 | {"zero__stage": 2}, 2, ["zero.stage=2 with parallel.pipeline_model_parallel_size=2: DeepSpeed", "use zero.stage=1"]),
    (PP2 | {"zero__stage": 1, "zero__overlap_comm": True}, 2, ["zero.overlap_comm=true has no effect", "switches it off"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "world_size", "expected"), CASES, ids=[str(case[0]) for case in CASES])
def test_each_problem_is_one_message_with_its_sum_and_a_way_out(changes, world_size, expected, tmp_path):
    found = _problems(_config(**changes), world_size, tmp_path)
    assert len(found) == 1, found
    assert [part for part in expected if part not in found[0]] == [], found[0]


@pytest.mark.parametrize(
    "changes",
    [
        PP2 | {FIRST: 1, LAST: 1},
        PP2 | {LAST: 1},
        PP2 | {"zero__stage": 1, "zero__offload_optimizer": True},
        PP2 | {"zero__stage": 1, "zero__offload_optimizer": True, "train__precision": Precision.bf16},
        PP2 | TP2 | EXPERTS | {"parallel__expert_model_parallel_size": 2, "parallel__sequence_parallel": True},
        PP2 | EXPERTS | {"parallel__expert_model_parallel_size": 4, "train__global_batch_size": 4},
        PP2 | {"train__global_batch_size": 4},  # one micro-batch: a pipeline that is idle half of the time, but correct
    ],
)  # fmt: skip
def test_pipelines_that_can_run_are_left_alone(changes, tmp_path):
    assert _problems(_config(**changes), 8, tmp_path) == []


def test_the_width_of_dense_layers_matters_only_where_there_are_some(tmp_path):
    config = _config(**TP4 | EXPERTS | {"model__ffn_hidden_size": 46})
    assert _problems(config, 4, tmp_path) == []
    config.moe.moe_layer_freq = 2
    assert len(_problems(config, 4, tmp_path)) == 1


def test_all_problems_of_a_layout_come_together(tmp_path):
    config = _config(**TP4 | EXPERTS | {"model__num_query_groups": 2, "model__ffn_hidden_size": 46})
    config.moe.moe_layer_freq, config.moe.moe_ffn_hidden_size, config.moe.num_moe_experts = 2, 26, 3
    config.parallel.expert_model_parallel_size = 2
    found = _problems(config, 4, tmp_path)
    parts = ("num_query_groups=2", "ffn_hidden_size=46", "moe_ffn_hidden_size=26", "size=2 x", "num_moe_experts=3")
    assert len(found) == len(parts) and all(any(part in message for message in found) for part in parts), found


def _draw(random_: random.Random) -> tuple[Config, int]:
    """A small description that is right in all that has nothing to do with its layout, and a number of ranks."""
    pick = random_.choice
    heads = pick([2, 4, 6, 8])
    config = tiny_config(
        model__num_attention_heads=heads,
        model__num_query_groups=pick([None, *(n for n in (1, 2, 3, 4) if heads % n == 0)]),
        model__kv_channels=8,
        model__ffn_hidden_size=pick([32, 40, 46, 48]),
        model__seq_length=pick([14, 15, 16, 24]),
        train__micro_batch_size=pick([1, 2]),
        train__global_batch_size=pick([4, 8, 12]),
        parallel__tensor_model_parallel_size=pick([1, 1, 2, 2, 3, 4]),
        parallel__sequence_parallel=random_.random() < 0.3,
        parallel__pipeline_model_parallel_size=pick([1, 1, 1, 2, 2, 3, 4]),
        parallel__num_layers_in_first_pipeline_stage=pick([None, None, None, 1, 2]),
        parallel__num_layers_in_last_pipeline_stage=pick([None, None, None, 1, 2]),
        model__num_layers=pick([2, 3, 4, 4]),
        parallel__data_parallel_size=pick([None, None, None, 1, 2, 4]),
        zero__stage=pick([0, 1, 2]),
    )
    if random_.random() < 0.7:
        change(
            config,
            {
                "moe__num_moe_experts": pick([4, 6, 8, 9]),
                "moe__moe_layer_freq": pick([1, 2]),
                "moe__moe_ffn_hidden_size": pick([None, 18, 20, 24]),
                "moe__moe_shared_expert_intermediate_size": pick([None, None, 10, 12]),
                "parallel__expert_model_parallel_size": pick([1, 2, 2, 3, 4, 8]),
                "parallel__expert_tensor_parallel_size": pick([None, 1, 1, 2, 4]),
            },
        )
    return config, pick([1, 2, 2, 3, 4, 4, 6, 8, 8, 16])


def _faults(config: Config, world_size: int) -> list[tuple[str, ...]]:
    """What is wrong with a drawn layout: for each fault the numbers that a message must show together."""
    model, moe, parallel, train = config.model, config.moe, config.parallel, config.train
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    tensor, etp = f"tensor_model_parallel_size={tp}", parallel.expert_tensor_parallel_size or tp
    faults: list[tuple[str, ...]] = []

    def must_divide(by: int, shown: str, value: int, key: str) -> None:
        if value % by:
            faults.append((shown, f"{key}={value}"))

    pp, given = parallel.pipeline_model_parallel_size, parallel.data_parallel_size
    data, rest = divmod(world_size, tp * pp)
    ranks_are_known = rest == 0 and given in (None, data)
    if not ranks_are_known:
        culprit = f"data_parallel_size={given}" if given not in (None, world_size / tp / pp) else tensor
        if culprit == tensor and world_size % tp == 0:
            culprit = f"pipeline_model_parallel_size={pp}"
        faults.append((f"{world_size} process", culprit))
    elif train.global_batch_size % (train.micro_batch_size * data):
        product = f"= {train.micro_batch_size * data}"
        faults.append((f"train.global_batch_size={train.global_batch_size}", f"data-parallel {data} {product}"))
    faults += _stage_faults(config)
    must_divide(tp, tensor, model.num_attention_heads, "model.num_attention_heads")
    must_divide(tp, tensor, model.num_query_groups or tp, "model.num_query_groups")
    experts_everywhere = moe.num_moe_experts is not None and moe.moe_layer_freq == 1
    must_divide(tp, tensor, tp if experts_everywhere else model.ffn_hidden_size or 0, "model.ffn_hidden_size")
    if parallel.sequence_parallel or (moe.num_moe_experts is not None and etp == 1):
        must_divide(tp, tensor, model.seq_length, "model.seq_length")
    if parallel.sequence_parallel and tp == 1:
        faults.append(("sequence_parallel=true", tensor))
    if moe.num_moe_experts is None:
        return faults
    must_divide(ep, f"expert_model_parallel_size={ep}", moe.num_moe_experts, "moe.num_moe_experts")
    if etp not in (1, tp):
        return [*faults, (f"expert_tensor_parallel_size={etp}", tensor)]
    key = "ffn_hidden_size" if moe.moe_ffn_hidden_size is None else "moe_ffn_hidden_size"
    shown = f"expert_tensor_parallel_size={etp}"
    must_divide(etp, shown, moe.moe_ffn_hidden_size or model.ffn_hidden_size or 0, key)
    must_divide(etp, shown, moe.moe_shared_expert_intermediate_size or etp, "moe_shared_expert_intermediate_size")
    if ranks_are_known and data * tp % (ep * etp):
        product = f" x expert_tensor_parallel_size={etp} = {ep * etp}" if tp > 1 else ""
        ranks = f"{data * tp} ranks" if tp > 1 else f"data-parallel size {data}"
        faults.append((f"expert_model_parallel_size={ep}{product}", ranks))
    return faults


def _stage_faults(config: Config) -> list[tuple[str, ...]]:
    """The same of the layers of pipeline stages, and of ZeRO with them."""
    parallel, layers = config.parallel, config.model.num_layers
    pp, size = (
        parallel.pipeline_model_parallel_size,
        f"pipeline_model_parallel_size={parallel.pipeline_model_parallel_size}",
    )
    ends = {"first": parallel.num_layers_in_first_pipeline_stage, "last": parallel.num_layers_in_last_pipeline_stage}
    given = {f"num_layers_in_{end}_pipeline_stage={count}": count for end, count in ends.items() if count is not None}
    at_ends = list(ends.values()) if pp > 1 else []  # numbers of layers of all stages, None: free
    counts = [*at_ends[:1], *[None] * (pp - 2), *at_ends[1:]] if pp > 1 else [None]
    faults: list[tuple[str, ...]] = [(size, "zero.stage=2")] if pp > 1 and config.zero.stage == 2 else []
    if pp > layers:
        return [*faults, (size, f"model.num_layers={layers}")]
    if pp == 1:
        return [*faults, (size, *given)] if given else faults
    least = sum(1 if count is None else count for count in counts)
    if least > layers or (None not in counts and least < layers):
        faults.append((f"model.num_layers={layers}", *given))
    return faults


def _check_ways_out(config: Config, world_size: int, found: list[str], tmp_path) -> None:
    """A value that a message proposes is refused no more."""
    for message in found:
        if proposal := re.match(r"parallel\.(\w+)=.*; use (?:one of )?(\d+(?:, \d+)*)", message):
            for number in proposal[2].split(", "):
                changed = change(copy.deepcopy(config), {f"parallel__{proposal[1]}": int(number)})
                again = [
                    text
                    for text in _problems(changed, world_size, tmp_path)
                    if text.startswith(f"parallel.{proposal[1]}=")
                ]
                assert not again, (message, again)


def test_300_illegal_layouts_are_refused_with_their_numbers_and_the_accepted_can_be_built(tmp_path):
    random_, refused, accepted = random.Random(4), 0, 0
    while refused < 300 or accepted < 60:
        config, world_size = _draw(random_)
        found, faults = _problems(config, world_size, tmp_path), _faults(config, world_size)
        unexplained = [
            numbers for numbers in faults if not any(all(n in message for n in numbers) for message in found)
        ]
        assert not unexplained, (unexplained, found)
        assert bool(found) == bool(faults), found
        if found:
            refused += 1
            _check_ways_out(config, world_size, found, tmp_path)
            continue
        accepted += 1
        layout, prepared = layout_of(config, world_size), prepare(config, world_size, launch_dir=tmp_path)
        assert prepared.parallel.data_parallel_size == layout.data_parallel_size
        assert layout_of(prepared, world_size) == layout
        assert layout in legal_layouts(config, world_size)
    assert refused < 2000
