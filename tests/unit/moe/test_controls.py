"""Fixed and random routing: balanced, different per layer and seed, and a function of the tokens so far alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.moe.controls import hash_table, prefix_keys, random_choice, salts


@given(st.data(), st.integers(1, 60), st.integers(1, 9), st.integers(0, 99), st.integers(0, 3))
@settings(deadline=None)
def test_every_expert_has_as_many_ids_and_a_token_different_experts(data, vocab_size, experts, seed, layer):
    topk = data.draw(st.integers(1, experts))
    table_VK = hash_table(vocab_size, experts, topk, seed, layer)
    assert table_VK.shape == (vocab_size, topk)
    for column_V in table_VK.t():
        counts_E = torch.bincount(column_V, minlength=experts)
        assert counts_E.max() - counts_E.min() <= 1
    assert all(len(set(row)) == topk for row in table_VK.tolist())
    assert torch.equal(table_VK, hash_table(vocab_size, experts, topk, seed, layer))


def test_tables_and_chances_differ_between_seeds_and_layers():
    tables = [hash_table(4096, 8, 2, seed, layer) for seed, layer in ((1, 0), (1, 1), (2, 0))]
    keys_T = prefix_keys(torch.arange(4096)[None])[0]
    chances = [random_choice(keys_T, salts(8, seed, layer), 1) for seed, layer in ((1, 0), (1, 1), (2, 0))]
    for found in (tables, chances):
        for one, other in ((0, 1), (0, 2), (1, 2)):
            same = (found[one][:, 0] == found[other][:, 0]).float().mean().item()
            assert same == pytest.approx(1 / 8, abs=0.04)


def test_chance_is_even_and_pairs_are_independent():
    keys_T = prefix_keys(torch.randint(0, 50, (64, 256), generator=torch.Generator().manual_seed(0))).reshape(-1)
    ids_TK = random_choice(keys_T, salts(8, 1, 0), 2)
    assert (ids_TK[:, 0] != ids_TK[:, 1]).all()
    for column_T in ids_TK.t():
        share_E = torch.bincount(column_T, minlength=8) / len(column_T)
        torch.testing.assert_close(share_E, torch.full((8,), 1 / 8), rtol=0, atol=0.02)
    following = ids_TK[:-1, 0] * 8 + ids_TK[1:, 0]  # of neighbours
    share = torch.bincount(following, minlength=64) / len(following)
    torch.testing.assert_close(share, torch.full((64,), 1 / 64), rtol=0, atol=0.006)


def test_chance_depends_on_the_tokens_so_far_and_on_nothing_else():
    tokens_BS = torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(1))
    keys_BS = prefix_keys(tokens_BS)
    assert torch.equal(
        prefix_keys(tokens_BS[1:2, :7]), keys_BS[1:2, :7]
    )  # neither on other samples nor on later tokens
    changed = tokens_BS.clone()
    changed[:, 5] += 1
    different = prefix_keys(changed) != keys_BS
    assert not different[:, :5].any() and different[:, 5:].all()
    swapped = tokens_BS[:, [1, 0, *range(2, 20)]]
    order_matters = (tokens_BS[:, 0] != tokens_BS[:, 1])[:, None]
    assert ((prefix_keys(swapped)[:, 2:] != keys_BS[:, 2:]) == order_matters).all()


def test_chance_starts_anew_with_each_document():
    tokens_BS = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(1))
    keys_BS = prefix_keys(tokens_BS, [[7, 1, 12], [20]])
    for begin, end in ((0, 7), (7, 8), (8, 20)):
        assert torch.equal(keys_BS[0, begin:end], prefix_keys(tokens_BS[:1, begin:end])[0])
    assert torch.equal(keys_BS[1], prefix_keys(tokens_BS)[1])
    assert (keys_BS[0, 7:] != prefix_keys(tokens_BS)[0, 7:]).all()
