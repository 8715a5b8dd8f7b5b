"""Evaluation on ranks of which some have padding only."""

from __future__ import annotations

import pytest

from tests.unit.moe.padding import config_of

pytestmark = pytest.mark.distributed
LAYOUTS = {
    "data": {},
    "experts": {"parallel__expert_model_parallel_size": 2},
    "tensor": {"parallel__tensor_model_parallel_size": 2},
    "positions": {"parallel__tensor_model_parallel_size": 2, "parallel__expert_tensor_parallel_size": 1},
    "pipeline": {"parallel__pipeline_model_parallel_size": 2},
}
ROUTERS = ("capacity", "expert choice", "DeepSpeed's top-1", "shared", "random")


def check(run_ranks, world_size: int, layouts: tuple[str, ...], routers: tuple[str, ...]) -> None:
    cases = {(layout, router): config_of(router, **LAYOUTS[layout]) for layout in layouts for router in routers}
    ranks = run_ranks("tests.unit.moe.padding:of_cases", world_size, list(cases.values()))
    for number, case in enumerate(cases):
        for found, expected in (rank[number] for rank in ranks):
            assert found == pytest.approx(expected, abs=1e-6), case


def test_two_ranks(run_ranks):
    """The ninth sample is alone: with data parallelism the second rank has none."""
    check(run_ranks, 2, tuple(LAYOUTS), ROUTERS)


def test_four_ranks(run_ranks):
    check(run_ranks, 4, ("data", "experts"), ROUTERS[:3])
