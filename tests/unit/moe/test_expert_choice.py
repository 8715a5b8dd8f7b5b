"""Experts that choose: their tokens, the same by token, and who sees the future."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.moe.expert_choice import by_token, choose_tokens

SCORES = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.9, 0.05, 0.05]])


def test_each_expert_takes_its_best_tokens():
    chosen_TE = choose_tokens(SCORES, 2)
    assert chosen_TE.long().tolist() == [[1, 1, 1], [0, 1, 0], [0, 0, 1], [1, 0, 0]]  # of .1 and .1 the first
    ids_TK, made_TK = by_token(chosen_TE, SCORES)
    assert ids_TK[0].tolist() == [0, 1, 2] and made_TK.sum(1).tolist() == [3, 1, 1, 1]
    assert ids_TK[1:, 0].tolist() == [1, 2, 0] and made_TK[:, 0].all()


def test_a_later_token_takes_the_place_of_an_earlier_one():
    """Why such a model is not causal."""
    assert choose_tokens(SCORES[:3], 1)[:, 0].tolist() == [True, False, False]
    assert choose_tokens(SCORES, 1)[:, 0].tolist() == [False, False, False, True]


@given(st.integers(1, 12), st.integers(1, 6), st.data())
@settings(deadline=None)
def test_by_token_is_the_same_choice(tokens, experts, data):
    scores_TE = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    limit = data.draw(st.integers(1, tokens))
    chosen_TE = choose_tokens(scores_TE, limit)
    assert chosen_TE.sum(0).tolist() == [limit] * experts
    mine_TE = chosen_TE[: data.draw(st.integers(1, tokens))]  # of a rank, perhaps without any choice
    ids_TK, made_TK = by_token(mine_TE, scores_TE[: len(mine_TE)])
    again_TE = torch.zeros_like(mine_TE)
    for t in range(len(mine_TE)):
        assert len(set(ids_TK[t].tolist())) == ids_TK.shape[1]
        again_TE[t, ids_TK[t][made_TK[t]]] = True
    assert torch.equal(again_TE, mine_TE)
