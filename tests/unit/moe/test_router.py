"""Scores, choices, gates and capacity as numbers, and against the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.moe.router import capacity, kept, route, router_logits
from tests.unit.moe import oracle

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


@pytest.mark.parametrize(("pre_softmax", "expected"), [(True, [0.6439, 0.2369]), (False, [0.7311, 0.2689])])
def test_gates_before_and_after_selection(pre_softmax, expected):
    ids_TK, gates_TK, probs_TE = route(LOGITS, 2, pre_softmax)
    assert ids_TK.tolist() == [[0, 1]]
    torch.testing.assert_close(gates_TK, torch.tensor([expected]), rtol=0, atol=5e-5)
    torch.testing.assert_close(probs_TE, torch.softmax(LOGITS, 1))


def test_scores_are_fp32_whatever_the_type_of_the_model():
    """Both rows are exact in bf16; their product with x is 1 and 1 + 2^-8, which bf16 rounds to 1: a tie."""
    x = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    rows = torch.tensor([[1.0, 0.0], [1.0, 2.0**-8]], dtype=torch.bfloat16)
    assert torch.equal(x @ rows.t(), torch.ones(1, 2, dtype=torch.bfloat16))
    logits = router_logits(x, rows)
    assert logits.dtype == torch.float32 and logits.tolist() == [[1.0, 1.00390625]]
    ids, gates, _ = route(logits, 1, pre_softmax=True)
    assert ids.item() == 1 and gates.dtype == torch.float32


@pytest.mark.parametrize("level", [-200.0, 200.0, -1e30])
def test_extreme_scores_give_finite_gates_and_gradients(level):
    logits = torch.full((3, 4), level, requires_grad=True)
    _, gates, probs = route(logits, 2, pre_softmax=False)
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
    ids_TK, gates_TK, _ = route(router_logits(x_TH, router), topk, pre_softmax)
    keep_TK = kept(ids_TK, gates_TK, experts, limit, by_probability)
    fitting = oracle.fitting(ids_TK.tolist(), gates_TK.tolist(), experts, limit, by_probability)
    assert {(t, k) for t, k in keep_TK.nonzero().tolist()} == fitting
    loads = torch.bincount(ids_TK[keep_TK], minlength=experts)
    assert loads.tolist() == torch.bincount(ids_TK.reshape(-1), minlength=experts).clamp(max=limit).tolist()
