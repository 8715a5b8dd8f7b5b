"""Scores, choices, gates and capacity as numbers, and against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.config import MoeConfig, ScoreFunction, SecondExpert
from recipes.moe.router import Routing, capacity, kept, route, router_logits, scores, sinkhorn_prices
from tests.unit.moe import oracle

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
SIGMOID = ScoreFunction.sigmoid


def described(
    topk: int, pre_softmax: bool = True, function: ScoreFunction = ScoreFunction.softmax, **more
) -> MoeConfig:
    """Top-k routing."""
    known = dict(moe_router_topk=topk, moe_router_pre_softmax=pre_softmax, moe_router_score_function=function)
    return MoeConfig(**known, **{f"moe_router_{name}": value for name, value in more.items()})


@pytest.mark.parametrize(("pre_softmax", "expected"), [(True, [0.643914, 0.236883]), (False, [0.731059, 0.268941])])
def test_gates_before_and_after_selection(pre_softmax, expected):
    found = route(LOGITS, described(2, pre_softmax))
    assert found.ids_TK.tolist() == [[0, 1]]
    torch.testing.assert_close(found.gates_TK, torch.tensor([expected]), rtol=0, atol=2e-6)
    torch.testing.assert_close(found.probs_TE, torch.softmax(LOGITS, 1))


def test_gates_of_sigmoids():
    """sigmoid(2) = .880797, sigmoid(1) = .731059; DeepSeek-V3 renormalises and multiplies by 2.5."""
    for more, expected in (
        ({"norm_topk_prob": False}, [0.880797, 0.731059]),
        ({}, [0.546449, 0.453551]),
        ({"topk_scaling_factor": 2.5}, [1.366123, 1.133877]),
    ):
        found = route(LOGITS, described(2, function=SIGMOID, **more))
        assert found.ids_TK.tolist() == [[0, 1]]
        torch.testing.assert_close(found.gates_TK, torch.tensor([expected]), rtol=0, atol=2e-6)
        torch.testing.assert_close(found.probs_TE, torch.sigmoid(LOGITS) / torch.sigmoid(LOGITS).sum())
    assert route(LOGITS, described(1, function=SIGMOID)).gates_TK.item() == pytest.approx(0.880797, abs=2e-6)


@pytest.mark.parametrize("function", ScoreFunction)
@pytest.mark.parametrize("pre_softmax", [True, False])
def test_biases_change_choices_and_not_gates(function, pre_softmax):
    moe = described(2, pre_softmax or function is SIGMOID, function)
    bias_E = torch.tensor([0.0, -5.0, 0.0, 5.0])
    found = route(LOGITS, moe, bias_E)
    assert found.ids_TK.tolist() == [[3, 0]]
    chosen = scores(LOGITS, function)[:, [3, 0]]
    if function is SIGMOID or not pre_softmax:
        chosen = chosen / chosen.sum()
    torch.testing.assert_close(found.gates_TK, chosen)
    torch.testing.assert_close(found.probs_TE, route(LOGITS, moe).probs_TE)
    for shift in (-3.0, 7.0):  # the same for all experts changes nothing
        assert route(LOGITS, moe, bias_E + shift).ids_TK.tolist() == [[3, 0]]


def test_only_the_best_groups_are_open():
    """Groups (0 1) (2 3) (4 5) of logits 5 -9 | 3 3 | 4 0. Of the two best per group the sums are -4 6 4."""
    logits = torch.tensor([[5.0, -9.0, 3.0, 3.1, 4.0, 0.0]])
    chosen = lambda **more: route(logits, described(2, False, num_groups=3, **more)).ids_TK.tolist()  # noqa: E731
    assert chosen(group_topk=1) == [[3, 2]]
    assert chosen(group_topk=2) == [[0, 4]]  # one expert per group decides
    assert chosen(group_topk=3) == [[0, 4]]
    four = described(4, False, num_groups=3, group_topk=2)
    assert route(logits, four).ids_TK.tolist() == [[4, 3, 2, 5]]
    biased = route(logits, described(2, function=SIGMOID, num_groups=3, group_topk=1), -10 + torch.eye(6)[4])
    assert biased.ids_TK.tolist() == [[4, 5]]  # closed groups stay closed although all sums are below zero


def test_scores_are_fp32_whatever_the_type_of_the_model():
    """Both rows are exact in bf16; their product with x is 1 and 1 + 2^-8, which bf16 rounds to 1: a tie."""
    x = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    rows = torch.tensor([[1.0, 0.0], [1.0, 2.0**-8]], dtype=torch.bfloat16)
    assert torch.equal(x @ rows.t(), torch.ones(1, 2, dtype=torch.bfloat16))
    logits = router_logits(x, rows)
    assert logits.dtype == torch.float32 and logits.tolist() == [[1.0, 1.00390625]]
    found = route(logits, described(1))
    assert found.ids_TK.item() == 1 and found.gates_TK.dtype == torch.float32


@pytest.mark.parametrize("level", [-200.0, 200.0, -1e30])
@pytest.mark.parametrize("moe", [described(2, False), described(2, function=SIGMOID)], ids=["softmax", "sigmoid"])
def test_extreme_scores_give_finite_gates_and_gradients(moe, level):
    logits = torch.full((3, 4), level, requires_grad=True)
    found = route(logits, moe)
    gates, probs = found.gates_TK, found.probs_TE
    torch.testing.assert_close(gates, torch.full((3, 2), 0.5))
    (gates.square().sum() + probs.square().sum()).backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "factor", "minimum", "expected"),
    [
        (4, 2, 2, 1.5, 0, 4),  # 6 by the formula, but there are only 4 tokens
        (5, 1, 4, 1.0, 0, 2),
        (16, 2, 4, 1.25, 0, 10),
        (16, 2, 4, 0.01, 0, 1),
        (16, 2, 4, 0.01, 3, 3),
        (2, 1, 8, 1.0, 4, 2),  # the minimum cannot exceed the tokens either
        (100, 1, 10, 1.1, 0, 11),  # 100 x 1.1 / 10 is 11.000000000000002 in floats
    ],
)
def test_capacity(tokens, topk, experts, factor, minimum, expected):
    assert capacity(tokens, topk, experts, factor, minimum) == expected


def kept_of(by_probability: bool, made_TK: torch.Tensor | None = None) -> list[list[bool]]:
    """Choices 0 1 | 1 0 | 0 2 among three experts that take one token each."""
    ids_TK = torch.tensor([[0, 1], [1, 0], [0, 2]])
    gates_TK = torch.tensor([[0.6, 0.4], [0.5, 0.5], [0.9, 0.1]])
    routing = Routing(torch.zeros(3, 3), torch.zeros(3, 3), ids_TK, gates_TK, made_TK)
    routing = replace(routing, keep_TK=kept(routing, 1, by_probability))
    used_TK = routing.used_TK
    assert int(routing.dropped) == (6 if made_TK is None else int(made_TK.sum())) - int(used_TK.sum())
    return used_TK.tolist()


def test_who_is_turned_away():
    assert kept_of(by_probability=False) == [[True, False], [True, False], [False, True]]
    assert kept_of(by_probability=True) == [[False, False], [True, False], [True, True]]


@pytest.mark.parametrize("by_probability", [True, False])
def test_a_choice_that_is_not_made_takes_no_place(by_probability):
    """Left are 1 | 0 | 0 2; the third token's first choice comes before the second token's second one."""
    made_TK = torch.tensor([[False, True], [False, True], [True, True]])
    assert kept_of(by_probability, made_TK) == [[False, True], [False, False], [True, True]]


@given(data=st.data(), tokens=st.integers(1, 12), experts=st.integers(1, 9), seed=st.integers(0, 99))
@settings(deadline=None)
def test_choices_and_queues_are_the_oracles(data, tokens, experts, seed):
    topk, limit = data.draw(st.integers(1, experts)), data.draw(st.integers(1, tokens))
    by_probability, pre_softmax = data.draw(st.booleans()), data.draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    x_TH, router = (torch.randn(n, 3, generator=generator) for n in (tokens, experts))
    router *= data.draw(st.sampled_from([0.1, 1.0, 30.0]))
    found = route(router_logits(x_TH, router), described(topk, pre_softmax))
    ids_TK, gates_TK, keep_TK = found.ids_TK, found.gates_TK, kept(found, limit, by_probability)
    fitting = oracle.fitting(ids_TK.tolist(), gates_TK.tolist(), experts, limit, by_probability)
    assert {(t, k) for t, k in keep_TK.nonzero().tolist()} == fitting
    loads = torch.bincount(ids_TK[keep_TK], minlength=experts)
    assert loads.tolist() == torch.bincount(ids_TK.reshape(-1), minlength=experts).clamp(max=limit).tolist()


@given(data=st.data(), tokens=st.integers(1, 9), per_group=st.integers(1, 3), groups=st.integers(1, 4))
@settings(deadline=None)
def test_scores_groups_biases_and_gates_are_the_oracles(data, tokens, per_group, groups):
    experts, seed = per_group * groups, data.draw(st.integers(0, 99))
    chosen = data.draw(st.integers(1, groups))
    topk = chosen * data.draw(st.integers(1, per_group))
    function = data.draw(st.sampled_from(ScoreFunction))
    pre_softmax = function is SIGMOID or data.draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(tokens, experts, generator=generator).double()
    bias_E = data.draw(st.sampled_from([None, torch.randn(experts, generator=generator).double()]))
    options = oracle.Options(
        sigmoid=function is SIGMOID,
        renormalise=data.draw(st.sampled_from([None, True, False])) if pre_softmax else None,
        scaling=data.draw(st.sampled_from([1.0, 2.5])),
        num_groups=groups,
        group_topk=chosen,
        bias=None if bias_E is None else bias_E.tolist(),
    )
    more = {"norm_topk_prob": options.renormalise, "topk_scaling_factor": options.scaling}
    grouped = {"num_groups": groups, "group_topk": chosen} if groups > 1 else {}
    found = route(logits_TE, described(topk, pre_softmax, function, **more, **grouped), bias_E)
    for t, logits_E in enumerate(logits_TE):
        scores_E, probs_E = oracle.scores_of(logits_E, options)
        best = oracle.best_experts(logits_E, scores_E, topk, pre_softmax, options)
        assert found.ids_TK[t].tolist() == best
        torch.testing.assert_close(
            found.gates_TK[t], torch.stack(oracle.gates_of(scores_E, best, pre_softmax, options))
        )
        torch.testing.assert_close(found.probs_TE[t], probs_E)


def test_choices_are_those_of_megatron_core():
    """Its group-limited choice, and its function with all options, on 64 tokens."""
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    logits_TE = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    bias_E = torch.randn(16, generator=torch.Generator().manual_seed(1))
    for topk, groups, chosen, function, pre_softmax, bias in (
        (4, 4, 2, SIGMOID, True, bias_E),
        (4, 4, 2, ScoreFunction.softmax, True, None),
        (4, 4, 2, ScoreFunction.softmax, False, None),
        (3, None, None, SIGMOID, True, bias_E),
        (6, 8, 3, SIGMOID, True, None),
    ):
        moe = described(topk, pre_softmax, function, num_groups=groups, group_topk=chosen, topk_scaling_factor=2.5)
        found = route(logits_TE, moe, bias)
        theirs, _ = moe_utils.topk_routing_with_score_function(
            logits_TE,
            topk,
            use_pre_softmax=pre_softmax,
            num_groups=groups,
            group_topk=chosen,
            scaling_factor=2.5,
            score_function=function.name,
            expert_bias=bias,
        )
        torch.testing.assert_close(torch.zeros(64, 16).scatter_(1, found.ids_TK, found.gates_TK), theirs)


def test_a_second_expert_is_used_when_twice_its_part_exceeds_chance():
    """Gates .7311 and .2689: twice the second is .5379."""
    moe = described(2, False)
    moe.moe_second_expert = SecondExpert.threshold
    logits_TE = LOGITS.expand(3, 4)
    found = route(logits_TE, moe, uniform_T=torch.tensor([0.0, 0.53, 0.54]))
    assert found.made_TK.tolist() == [[True, True], [True, True], [True, False]]
    assert found.counts_E.tolist() == [3, 2, 0, 0]
    assert found.chosen_TE.tolist() == [[True, True, False, False]] * 2 + [[True, False, False, False]]
    torch.testing.assert_close(found.gates_TK, route(logits_TE, moe).gates_TK)
    raw = described(2, True)  # not renormalised: the same parts
    raw.moe_second_expert = SecondExpert.threshold
    assert torch.equal(route(logits_TE, raw, uniform_T=torch.tensor([0.0, 0.53, 0.54])).made_TK, found.made_TK)


def gumbel(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return -torch.empty(shape).exponential_(generator=torch.Generator().manual_seed(seed)).log()


def test_a_sampled_second_expert_comes_in_proportion_to_its_probability():
    """Probabilities .6439 .2369 .0871 .0321: of the second, given the first, .6652 .2447 .0900."""
    moe = described(2, False)
    moe.moe_second_expert = SecondExpert.sampled
    found = route(LOGITS.expand(40000, 4), moe, noise_TE=gumbel((40000, 4), 0))
    assert found.ids_TK[:, 0].unique().tolist() == [0]  # the first is never drawn
    share_E = torch.bincount(found.ids_TK[:, 1], minlength=4) / 40000
    torch.testing.assert_close(share_E, torch.tensor([0.0, 0.6652, 0.2447, 0.0900]), rtol=0, atol=0.01)
    chosen_TK = LOGITS.expand(40000, 4).gather(1, found.ids_TK)
    torch.testing.assert_close(found.gates_TK, torch.softmax(chosen_TK, 1))  # of the logits without noise


def test_gumbel_noise_draws_experts_in_proportion_to_their_probability():
    found = route(LOGITS.expand(40000, 4), described(1), noise_TE=gumbel((40000, 4), 1))
    share_E = torch.bincount(found.ids_TK[:, 0], minlength=4) / 40000
    torch.testing.assert_close(share_E, torch.softmax(LOGITS[0], 0), rtol=0, atol=0.01)
    torch.testing.assert_close(found.gates_TK, found.probs_TE.gather(1, found.ids_TK))


def test_prices_even_out_the_load():
    """Of 4096 tokens that all prefer the first experts."""
    logits_TE = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0)) + torch.linspace(2, -2, 8)
    prices_E = sinkhorn_prices(logits_TE)
    assert (prices_E[1:] > prices_E[:-1]).all()
    before, after = (route(logits_TE, described(1), noise_TE=noise).counts_E for noise in (None, prices_E))
    assert before.max() > 4 * 512 and after.max() < 1.2 * 512
    plan_TE = torch.softmax(logits_TE + prices_E, 1)
    torch.testing.assert_close(plan_TE.sum(0), torch.full((8,), 512.0), rtol=1e-3, atol=0)
    torch.testing.assert_close(sinkhorn_prices(logits_TE + 50), prices_E - 0.0, rtol=1e-3, atol=1e-3)
    assert torch.isfinite(sinkhorn_prices(1e4 * logits_TE)).all()
