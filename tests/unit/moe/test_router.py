"""Scores, choices, gates and capacity as numbers, and against the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.config import MoeConfig, ScoreFunction
from recipes.moe.router import capacity, kept, route, router_logits, scores
from tests.unit.moe import oracle

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
SIGMOID = ScoreFunction.sigmoid


def described(
    topk: int, pre_softmax: bool = True, function: ScoreFunction = ScoreFunction.softmax, **more
) -> MoeConfig:
    """Top-k routing."""
    known = dict(moe_router_topk=topk, moe_router_pre_softmax=pre_softmax, moe_router_score_function=function)
    return MoeConfig(**known, **{f"moe_router_{name}": value for name, value in more.items()})


@pytest.mark.parametrize(("pre_softmax", "expected"), [(True, [0.6439, 0.2369]), (False, [0.7311, 0.2689])])
def test_gates_before_and_after_selection(pre_softmax, expected):
    ids_TK, gates_TK, probs_TE = route(LOGITS, described(2, pre_softmax))
    assert ids_TK.tolist() == [[0, 1]]
    torch.testing.assert_close(gates_TK, torch.tensor([expected]), rtol=0, atol=5e-5)
    torch.testing.assert_close(probs_TE, torch.softmax(LOGITS, 1))


def test_gates_of_sigmoids():
    """sigmoid(2) = .8808, sigmoid(1) = .7311; DeepSeek-V3 renormalises and multiplies by 2.5."""
    for more, expected in (
        ({"norm_topk_prob": False}, [0.8808, 0.7311]),
        ({}, [0.5464, 0.4536]),
        ({"topk_scaling_factor": 2.5}, [1.3661, 1.1339]),
    ):
        ids_TK, gates_TK, probs_TE = route(LOGITS, described(2, function=SIGMOID, **more))
        assert ids_TK.tolist() == [[0, 1]]
        torch.testing.assert_close(gates_TK, torch.tensor([expected]), rtol=0, atol=5e-5)
        torch.testing.assert_close(probs_TE, torch.sigmoid(LOGITS) / torch.sigmoid(LOGITS).sum())
    assert route(LOGITS, described(1, function=SIGMOID))[1].item() == pytest.approx(0.8808, abs=5e-5)


@pytest.mark.parametrize("function", ScoreFunction)
@pytest.mark.parametrize("pre_softmax", [True, False])
def test_biases_change_choices_and_not_gates(function, pre_softmax):
    moe = described(2, pre_softmax or function is SIGMOID, function)
    bias_E = torch.tensor([0.0, -5.0, 0.0, 5.0])
    ids_TK, gates_TK, probs_TE = route(LOGITS, moe, bias_E)
    assert ids_TK.tolist() == [[3, 0]]
    chosen = scores(LOGITS, function)[:, [3, 0]]
    if function is SIGMOID or not pre_softmax:
        chosen = chosen / chosen.sum()
    torch.testing.assert_close(gates_TK, chosen)
    torch.testing.assert_close(probs_TE, route(LOGITS, moe)[2])
    for shift in (-3.0, 7.0):  # the same for all experts changes nothing
        assert route(LOGITS, moe, bias_E + shift)[0].tolist() == [[3, 0]]


def test_only_the_best_groups_are_open():
    """Groups (0 1) (2 3) (4 5) of logits 5 -9 | 3 3 | 4 0. Of the two best per group the sums are -4 6 4."""
    logits = torch.tensor([[5.0, -9.0, 3.0, 3.1, 4.0, 0.0]])
    chosen = lambda **more: route(logits, described(2, False, num_groups=3, **more))[0].tolist()  # noqa: E731
    assert chosen(group_topk=1) == [[3, 2]]
    assert chosen(group_topk=2) == [[0, 4]]  # one expert per group decides
    assert chosen(group_topk=3) == [[0, 4]]
    four = described(4, False, num_groups=3, group_topk=2)
    assert route(logits, four)[0].tolist() == [[4, 3, 2, 5]]
    biased = route(logits, described(2, function=SIGMOID, num_groups=3, group_topk=1), -10 + torch.eye(6)[4])
    assert biased[0].tolist() == [[4, 5]]  # closed groups stay closed although all sums are below zero


def test_scores_are_fp32_whatever_the_type_of_the_model():
    """Both rows are exact in bf16; their product with x is 1 and 1 + 2^-8, which bf16 rounds to 1: a tie."""
    x = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    rows = torch.tensor([[1.0, 0.0], [1.0, 2.0**-8]], dtype=torch.bfloat16)
    assert torch.equal(x @ rows.t(), torch.ones(1, 2, dtype=torch.bfloat16))
    logits = router_logits(x, rows)
    assert logits.dtype == torch.float32 and logits.tolist() == [[1.0, 1.00390625]]
    ids, gates, _ = route(logits, described(1))
    assert ids.item() == 1 and gates.dtype == torch.float32


@pytest.mark.parametrize("level", [-200.0, 200.0, -1e30])
@pytest.mark.parametrize("moe", [described(2, False), described(2, function=SIGMOID)], ids=["softmax", "sigmoid"])
def test_extreme_scores_give_finite_gates_and_gradients(moe, level):
    logits = torch.full((3, 4), level, requires_grad=True)
    _, gates, probs = route(logits, moe)
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


def test_who_is_turned_away():
    ids_TK = torch.tensor([[0, 1], [1, 0], [0, 2]])
    gates_TK = torch.tensor([[0.6, 0.4], [0.5, 0.5], [0.9, 0.1]])
    first_choices_first = kept(ids_TK, gates_TK, 3, limit=1, by_probability=False)
    assert first_choices_first.tolist() == [[True, False], [True, False], [False, True]]
    largest_first = kept(ids_TK, gates_TK, 3, limit=1, by_probability=True)
    assert largest_first.tolist() == [[False, False], [True, False], [True, True]]


@given(data=st.data(), tokens=st.integers(1, 12), experts=st.integers(1, 9), seed=st.integers(0, 99))
@settings(deadline=None)
def test_choices_and_queues_are_the_oracles(data, tokens, experts, seed):
    topk, limit = data.draw(st.integers(1, experts)), data.draw(st.integers(1, tokens))
    by_probability, pre_softmax = data.draw(st.booleans()), data.draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    x_TH, router = (torch.randn(n, 3, generator=generator) for n in (tokens, experts))
    router *= data.draw(st.sampled_from([0.1, 1.0, 30.0]))
    ids_TK, gates_TK, _ = route(router_logits(x_TH, router), described(topk, pre_softmax))
    keep_TK = kept(ids_TK, gates_TK, experts, limit, by_probability)
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
    ids_TK, gates_TK, probs_TE = route(logits_TE, described(topk, pre_softmax, function, **more, **grouped), bias_E)
    for t, logits_E in enumerate(logits_TE):
        scores_E, probs_E = oracle.scores_of(logits_E, options)
        best = oracle.best_experts(logits_E, scores_E, topk, pre_softmax, options)
        assert ids_TK[t].tolist() == best
        torch.testing.assert_close(gates_TK[t], torch.stack(oracle.gates_of(scores_E, best, pre_softmax, options)))
        torch.testing.assert_close(probs_TE[t], probs_E)


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
        ids_TK, gates_TK, _ = route(logits_TE, moe, bias)
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
        torch.testing.assert_close(torch.zeros(64, 16).scatter_(1, ids_TK, gates_TK), theirs)
