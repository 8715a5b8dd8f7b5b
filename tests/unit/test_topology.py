"""Ranks and places, groups and nodes: by hand, by their laws, and against megatron-core's rank lists."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.config import Config, MoeConfig, Precision
from recipes.topology import Cluster, Layout, Role, layout_of, model_parallel_size, used_zero_stage
from tests.ranks import run_ranks

DENSE, EXPERTS = (Role.pp, Role.dp, Role.tp), (Role.pp, Role.edp, Role.ep, Role.etp)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def all_layouts(world_size: int) -> list[Layout]:
    """Every way to share ranks out, without sequence parallelism and ZeRO, which change no group."""
    return [
        Layout(world_size, tp, pp, ep, etp)
        for tp, pp, ep in itertools.product(_divisors(world_size), repeat=3)
        for etp in sorted({1, tp})
        if world_size % (tp * pp) == 0 and world_size % (pp * ep * etp) == 0
    ]


@st.composite
def layouts(draw) -> Layout:
    """Up to some dozens of ranks: both grids drawn around a common pipeline size."""
    pp, tp = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    stage = tp * draw(st.integers(1, 6))
    etp = draw(st.sampled_from(sorted({1, tp})))
    ep = draw(st.sampled_from(_divisors(stage // etp)))
    return Layout(pp * stage, tp, pp, ep, etp)


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_ranks_and_places_correspond_one_to_one(layout):
    for axes in (DENSE, EXPERTS):
        places = [tuple(layout.index(role, rank) for role in axes) for rank in range(layout.world_size)]
        assert sorted(places) == list(itertools.product(*(range(layout.size(role)) for role in axes)))
        for rank, place in enumerate(places):
            assert layout.rank_at(dict(zip(axes, place, strict=True))) == rank


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_groups_of_a_role_part_the_ranks_and_run_along_its_axis(layout):
    for axes in (DENSE, EXPERTS):
        for role in axes:
            groups = layout.groups(role)
            assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
            for group in groups:
                assert [layout.index(role, rank) for rank in group] == list(range(layout.size(role)))
                others = {tuple(layout.index(axis, rank) for axis in axes if axis is not role) for rank in group}
                assert len(others) == 1
                assert layout.group_of(role, group[0]) == layout.group_of(role, group[-1]) == group


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_stages_hold_the_same_ranks_in_both_grids(layout):
    """Only the pipeline axis is common: dense and expert groups of a rank lie within its stage."""
    per_stage = layout.world_size // layout.pipeline_parallel_size
    for role in (Role.dp, Role.tp, Role.edp, Role.ep, Role.etp):
        assert all(len({rank // per_stage for rank in group}) == 1 for group in layout.groups(role))


def test_the_example_of_the_docstring():
    layout = Layout(8, tensor_parallel_size=2, expert_parallel_size=4)
    drawn = {Role.tp: "01010101", Role.dp: "00112233", Role.ep: "01230123", Role.edp: "00001111"}
    for role, row in drawn.items():
        assert "".join(str(layout.index(role, rank)) for rank in range(8)) == row
    groups = [layout.group_of(role, 2) for role in drawn]
    assert groups == [[2, 3], [0, 2, 4, 6], [0, 1, 2, 3], [2, 6]]
    assert (layout.data_parallel_size, layout.expert_data_parallel_size) == (4, 2)


def test_experts_divided_like_the_matrices_around_them():
    """With as many parts of an expert as of a layer the two kinds of groups are the same."""
    layout = Layout(8, tensor_parallel_size=2, expert_parallel_size=2, expert_tensor_parallel_size=2)
    assert layout.groups(Role.etp) == layout.groups(Role.tp) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups(Role.ep) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups(Role.edp) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def megatron_differences(rank: int, world_size: int) -> tuple[int, list[str]]:
    """Layouts compared, and those in which a rank list is not megatron-core's for its default order."""
    from megatron.core.parallel_state import RankGenerator

    names = {Role.tp: "tp", Role.dp: "dp", Role.pp: "pp", Role.etp: "tp", Role.ep: "ep", Role.edp: "dp"}
    compared, wrong = 0, []
    for layout in (layout for ranks in range(1, 17) for layout in all_layouts(ranks)):
        size, order = layout.size, "tp-cp-ep-dp-pp"
        dense = RankGenerator(tp=size(Role.tp), ep=1, dp=size(Role.dp), pp=size(Role.pp), cp=1, order=order)
        experts = RankGenerator(
            tp=size(Role.etp), ep=size(Role.ep), dp=size(Role.edp), pp=size(Role.pp), cp=1, order=order
        )
        compared += 1
        for role, name in names.items():
            theirs = (dense if role in DENSE else experts).get_ranks(name)
            if sorted(theirs) != layout.groups(role):
                wrong.append(f"{layout}: {role}")
        if sorted(experts.get_ranks("pp")) != layout.groups(Role.pp):
            wrong.append(f"{layout}: stages of the experts")
    return compared, wrong


def test_all_rank_lists_are_megatron_cores():
    ((compared, wrong),) = run_ranks("tests.unit.test_topology:megatron_differences", 1)
    assert wrong == []
    assert compared == sum(len(all_layouts(ranks)) for ranks in range(1, 17)) > 300


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 3},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 4},
        {"expert_parallel_size": 8},
        {"tensor_parallel_size": 2, "expert_parallel_size": 4, "expert_tensor_parallel_size": 2},
        {"tensor_parallel_size": 4, "expert_tensor_parallel_size": 2},
        {"sequence_parallel": True},
    ],
)
def test_sizes_that_do_not_fit_four_ranks_make_no_layout(sizes):
    with pytest.raises(AssertionError):
        Layout(4, **sizes)


def test_a_rank_beyond_the_world_has_no_place():
    with pytest.raises(AssertionError):
        Layout(4).index(Role.dp, 4)
    with pytest.raises(AssertionError):
        Layout(4).rank_at({Role.pp: 0, Role.dp: 4, Role.tp: 0})
    with pytest.raises(AssertionError):
        Layout(4).rank_at({Role.pp: 0, Role.dp: 0})


def test_the_layout_of_a_description():
    config = Config()
    parallel = config.parallel
    parallel.tensor_model_parallel_size, parallel.sequence_parallel, config.zero.stage = 2, True, 2
    assert layout_of(config, 8) == Layout(8, 2, sequence_parallel=True, zero_stage=2)
    config.moe.num_moe_experts, parallel.expert_model_parallel_size = 8, 4
    assert layout_of(config, 8) == Layout(8, 2, 1, 4, 2, sequence_parallel=True, zero_stage=2)
    parallel.expert_tensor_parallel_size = 1
    assert layout_of(config, 8) == Layout(8, 2, 1, 4, 1, sequence_parallel=True, zero_stage=2)
    parallel.pipeline_model_parallel_size, config.zero.stage = 2, 1
    assert layout_of(config, 16) == Layout(16, 2, 2, 4, 1, sequence_parallel=True, zero_stage=1)
    assert model_parallel_size(config) == 4


@pytest.mark.parametrize(
    ("layout", "crossing"),
    [
        (Layout(8, 4, expert_parallel_size=4), {Role.dp, Role.edp}),
        (Layout(8, 2, expert_parallel_size=8), {Role.dp, Role.ep}),
        (Layout(8, 8, expert_parallel_size=2), {Role.tp, Role.edp}),
        (Layout(8, 4, pipeline_parallel_size=2, expert_parallel_size=4), {Role.pp}),
        (Layout(8, 4, expert_parallel_size=2, expert_tensor_parallel_size=4), {Role.dp, Role.ep}),
    ],
)
def test_groups_that_leave_a_node_of_four(layout, crossing):
    assert {role for role in Role if Cluster(2, 4).crosses_nodes(layout, role)} == crossing
    assert not any(Cluster(1, 8).crosses_nodes(layout, role) for role in Role)


def test_zero_is_not_used_where_it_has_nothing_to_divide():
    config = Config()
    for stage, alone in ((0, 0), (1, 0), (2, 0), (3, 3)):
        config.zero.stage = stage
        assert used_zero_stage(config, Layout(1)) == used_zero_stage(config, Layout(2, 2)) == alone
        assert used_zero_stage(config, Layout(2)) == stage
        # Two tensor-parallel ranks that route different tokens have copies of whole experts, whose moments can be divided.
        experts = Config(moe=MoeConfig(num_moe_experts=4), zero=config.zero)
        assert used_zero_stage(experts, Layout(2, 2)) == stage
        assert used_zero_stage(experts, Layout(2, 2, expert_parallel_size=2)) == alone
    config.zero.stage, config.zero.offload_optimizer = 1, True
    assert used_zero_stage(config, Layout(1)) == 1
    config.zero.offload_optimizer, config.train.precision = False, Precision.bf16
    assert used_zero_stage(config, Layout(1)) == 1
