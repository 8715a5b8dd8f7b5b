"""The list of legal layouts, and a layout written into a description."""

from __future__ import annotations

import copy
import itertools

import pytest

from recipes.config import Precision
from recipes.topology import Layout, layout_of
from recipes.validation import prepare
from recipes.validation.layouts import layout_problems, legal_layouts, with_layout
from tests.tiny import tiny_config, tiny_moe_config
from tests.unit.test_layouts import EXPERTS, PP2, TP2, UNLIKE, _config, _problems


@pytest.mark.parametrize(
    ("config", "world_size", "count"),
    [
        (_config(), 1, 3),
        # Tensor size 1; 2 without and with sequence parallelism; three ZeRO stages each. Two stages, with ZeRO 0 or 1.
        (_config(), 2, 9 + 2),
        (_config(), 4, 9 + 6),  # 4 divides neither 2 key/value heads nor 2 layers
        (_config(model__num_layers=4), 4, 9 + 6 + 2),
        (tiny_moe_config(), 2, 24 + 2),
        (tiny_moe_config(model__num_query_groups=4), 4, 63 + 16),
        (tiny_moe_config(model__num_query_groups=4), 8, 75 + 42),
        (tiny_moe_config(train__global_batch_size=2), 4, 30 + 16),  # the batch cannot be shared by 4
        (tiny_moe_config(**UNLIKE, moe__num_moe_experts=None, moe__moe_layer_freq=1), 4, 30 + 16),  # 4 and 6: no EP 4
        (_config(zero__overlap_comm=True), 2, 6),  # without stage 0, without a pipeline
        (_config(zero__offload_optimizer=True, train__precision=Precision.bf16), 2, 6 + 1),
        (_config(zero__offload_optimizer=True), 2, 6 + 1),
    ],
)
def test_all_legal_layouts_are_listed_once(config, world_size, count, tmp_path):
    found = legal_layouts(config, world_size)
    assert len(found) == len(set(found)) == count and legal_layouts(config, world_size) == found
    config.train.micro_batch_size = 1
    everything = [
        Layout(world_size, tp, pp, ep, etp, sequence, stage)
        for tp, pp, ep, etp in itertools.product((1, 2, 4, 8), repeat=4)
        for sequence, stage in itertools.product((False, True), (0, 1, 2))
        if etp in (1, tp) and world_size % (tp * pp) == 0 and world_size % (pp * ep * etp) == 0
        if tp > 1 or not sequence
    ]
    experts = config.moe.has_experts
    legal = [
        layout
        for layout in everything
        if (experts or (layout.expert_parallel_size, layout.expert_tensor_parallel_size) == (1, 1))
        and not _problems(with_layout(config, layout), world_size, tmp_path)
    ]
    assert set(found) == set(legal)


def test_the_list_starts_with_plain_data_parallelism_and_ends_with_the_largest_tensor_size():
    found = legal_layouts(tiny_moe_config(), 4)
    assert found[:3] == [Layout(4, zero_stage=stage) for stage in (0, 1, 2)]
    assert found[-1] == Layout(4, 2, 2, 2, 1, sequence_parallel=True, zero_stage=1)
    sizes = [(layout.tensor_parallel_size, layout.pipeline_parallel_size) for layout in found]
    assert sizes == sorted(sizes) and set(sizes) == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_zero_3_is_for_dense_models_in_one_stage():
    found = legal_layouts(_config(), 4, zero_stages=(1, 3))
    divided = {layout for layout in found if layout.zero_stage == 3}
    assert {(layout.tensor_parallel_size, layout.pipeline_parallel_size) for layout in divided} == {(1, 1), (2, 1)}
    assert legal_layouts(tiny_moe_config(), 4, zero_stages=(3,)) == []


def test_the_present_layout_changes_neither_the_list_nor_itself():
    config = tiny_moe_config()
    before = legal_layouts(config, 4)
    changed = with_layout(config, Layout(16, 4, 1, 2, 4, sequence_parallel=True, zero_stage=1))
    assert legal_layouts(changed, 4) == before
    changed.parallel.pipeline_model_parallel_size, changed.parallel.num_layers_in_first_pipeline_stage = 3, 5
    assert legal_layouts(changed, 4) == before


def test_a_description_takes_a_layout_and_gives_it_back():
    for config in (tiny_config(), tiny_moe_config()):
        untouched = copy.deepcopy(config)
        for layout in legal_layouts(config, 4):
            changed = with_layout(config, layout)
            assert layout_of(changed, 4) == layout and not list(layout_problems(changed, 4))
            assert changed.parallel.data_parallel_size == layout.data_parallel_size
            given = changed.parallel.expert_tensor_parallel_size
            assert given == (None if config.moe.num_moe_experts is None else layout.expert_tensor_parallel_size)
        changed.model.num_layers = 7  # a deep copy
        assert config == untouched


def test_preparing_fills_in_the_sizes_that_follow(tmp_path):
    sizes = []
    for changes in (TP2, TP2 | EXPERTS, TP2 | EXPERTS | {"parallel__expert_tensor_parallel_size": 1}, EXPERTS):
        parallel = prepare(_config(**changes), 8, launch_dir=tmp_path).parallel
        sizes.append((parallel.data_parallel_size, parallel.expert_tensor_parallel_size))
    assert sizes == [(4, None), (4, 2), (4, 1), (8, 1)]
    assert prepare(_config(**TP2 | PP2), 8, launch_dir=tmp_path).parallel.data_parallel_size == 2
