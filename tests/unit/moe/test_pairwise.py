"""Every pair of options of router, balance, dispatch and experts that can go together, against the oracle.

The sample is greedy: of some random legal descriptions, again and again the one with most pairs that none before had.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
from typing import Any

import pytest

from recipes.config import Activation, AuxLossScope, Config, MoeBackend, RouterType, ScoreFunction, TokenDropPolicy
from recipes.validation.experts import check_experts
from tests.ranks import run_ranks
from tests.unit.moe.comparing import BOUND, compare
from tests.unit.moe.layers import layer_config

PARTS = 3
GROUPED = ("moe_router_num_groups", "moe_router_group_topk")
SHARED = ("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_use_residual")
CAPACITY = ("moe_expert_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity", "moe_token_drop_policy")
COUNTS = ("num_moe_experts", "num_moe_experts_per_layer")
RAMP = ("moe_loss_coeff_ramp", "moe_aux_loss_coeff_end", "moe_z_loss_coeff_end")
# Name of an option -> the keys of the group moe that make it, and its values.
OPTIONS: dict[str, tuple[tuple[str, ...], list[tuple[Any, ...]]]] = {
    "backend": (("backend",), [(value,) for value in MoeBackend]),
    "router": (("moe_router_type",), [(value,) for value in RouterType]),
    "topk": (("moe_router_topk",), [(1,), (2,), (4,)]),
    "order": (("moe_router_pre_softmax",), [(True,), (False,)]),
    "scores": (("moe_router_score_function",), [(value,) for value in ScoreFunction]),
    "norm": (("moe_router_norm_topk_prob",), [(None,), (True,), (False,)]),
    "scaling": (("moe_router_topk_scaling_factor",), [(None,), (2.5,)]),
    "groups": (GROUPED, [(None, None), (4, 2), (2, 1)]),
    "biases": (("moe_router_enable_expert_bias",), [(False,), (True,)]),
    "scope": (("aux_loss_scope",), [(value,) for value in AuxLossScope]),
    "balance": (("moe_aux_loss_coeff",), [(0.0,), (0.1,)]),
    "z": (("moe_z_loss_coeff",), [(0.0,), (0.01,)]),
    "ramp": (RAMP, [(None, None, None), ((0, 10), 0.3, None), ((0, 10), None, 0.03)]),
    "capacity": (
        CAPACITY,
        [
            (None, None, 0, TokenDropPolicy.probs),
            (1.0, None, 0, TokenDropPolicy.probs),
            (0.5, 2.0, 2, TokenDropPolicy.position),
            (None, 1.0, 0, TokenDropPolicy.position),
        ],
    ),
    "shared": (SHARED, [(None, False, False), (5, False, False), (5, True, False), (5, False, True)]),
    "activation": ((), [(value,) for value in Activation]),
    "counts": (COUNTS, [(8, None), (None, (12, 8)), (None, (4, 8))]),
}
Case = tuple[tuple[str, tuple[Any, ...]], ...]


def described(case: Case) -> Config:
    """Two layers, the second with 8 experts."""
    config = layer_config(4, 2, moe__num_moe_experts=8, moe__moe_layer_freq=1)
    for name, value in case:
        if name == "activation":
            (config.model.activation,) = value
        for key, item in zip(OPTIONS[name][0], value, strict=False):
            setattr(config.moe, key, list(item) if isinstance(item, tuple) else item)
    return config


def drawn(chance: random.Random) -> Case:
    """Any legal case; half of the values are defaults, since many exclude each other."""
    while True:
        case = []
        for name, (_, values) in OPTIONS.items():
            case.append((name, values[0] if chance.random() < 0.5 else chance.choice(values)))
        if next(check_experts(described(tuple(case)), 1), None) is None:
            return tuple(case)


def pairs(case: Case) -> set[tuple]:
    return set(itertools.combinations(((name, str(value)) for name, value in case), 2))


@functools.cache
def sample(seed: int = 7, candidates: int = 1500) -> list[Case]:
    chance = random.Random(seed)
    left = {case: pairs(case) for case in (drawn(chance) for _ in range(candidates))}
    missing = set().union(*left.values())
    chosen: list[Case] = []
    while missing:
        chosen.append(max(left, key=lambda case: len(left[case] & missing)))
        missing -= left.pop(chosen[-1])
    return chosen


def test_the_sample_has_every_value_and_many_pairs():
    cases = sample()
    seen = {(name, str(value)) for case in cases for name, value in case}
    assert seen == {(name, str(value)) for name, (_, values) in OPTIONS.items() for value in values}
    assert len(set().union(*map(pairs, cases))) > 800 and len(cases) < 120
    for one, other in (
        (("router", (RouterType.expert_choice,)), ("shared", (5, False, True))),
        (("biases", (True,)), ("groups", (4, 2))),
        (("scores", (ScoreFunction.sigmoid,)), ("capacity", (1.0, None, 0, TokenDropPolicy.probs))),
        (("backend", (MoeBackend.deepspeed,)), ("shared", (5, True, False))),
        (("biases", (True,)), ("counts", (None, (12, 8)))),
        (("router", (RouterType.hash,)), ("counts", (None, (4, 8)))),
        (("scope", (AuxLossScope.global_batch,)), ("counts", (None, (12, 8)))),
    ):
        assert any(one in case and other in case for case in cases), (one, other)


@pytest.mark.parametrize("part", range(PARTS))
def test_layers_are_the_oracles(part):
    run_ranks(f"{__name__}:compare_all", 1, sample()[part::PARTS])


def compare_all(rank: int, world_size: int, cases: list[Case]) -> None:
    """In a process that has joined a group."""
    from recipes.launcher import rank_environment
    from recipes.train.job import start_process

    start_process(Config(), rank_environment(os.environ))
    compare_all_here(cases)


def compare_all_here(cases: list[Case], bound: float = BOUND) -> None:
    for number, case in enumerate(cases):
        try:
            compare(described(case), seed=100 + number, previous_E=[3, 1, 4, 1, 5, 9, 2, 6], bound=bound, number=1)
        except AssertionError as error:
            raise AssertionError(f"{dict(case)}: {error}") from error
