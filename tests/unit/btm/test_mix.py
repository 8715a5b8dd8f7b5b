"""A mix of branches computes what its branches do, when routers have no choice or the branches no differences."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from recipes.btm.mix import Mix
from recipes.btm.mixing import as_mix
from recipes.checkpoint.format import Box, Checkpoint, open_checkpoint, shard_name, write_shard
from recipes.checkpoint.load import load_weights
from recipes.checkpoint.rotate import begin, commit
from recipes.config import Config, to_plain
from recipes.logical import initial_value, logical_tensors
from recipes.model.gpt import GPT, registry
from tests.ranks import forked
from tests.tiny import tiny_config

BRANCHES = "abc"


def stored(folder: Path, config: Config, seed: int) -> Checkpoint:
    """Weights of a branch, of which only the feed-forward parts depend on `seed`."""
    values = {
        name: initial_value(tensor, seed if ".ffn." in name else 1) for name, tensor in logical_tensors(config).items()
    }
    partial = begin(folder, 4)
    record = write_shard(partial, shard_name("model", 0, 1), "model", [Box.whole(*item) for item in values.items()])
    return open_checkpoint(commit(partial, [record], {"step": 4, "tokenizer": "t", "config": to_plain(config)}))


def loaded(source: Checkpoint | Mix, config: Config) -> GPT:
    model = GPT(config).eval()
    load_weights(source, registry(model, config))  # type: ignore[arg-type]
    return model


def mixed(members: dict[str, Checkpoint], topk: int, freq: int = 1) -> GPT:
    """With experts in every `freq`-th layer."""
    config = tiny_config(btm__mix_topk=topk, btm__mix_layer_freq=freq, model__init_method_std=0.3)
    mix = as_mix(config, len(members))
    return loaded(Mix(members, list(members), mix), mix)


IDS = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("topk", "freq"), [(2, 1), (3, 1), (2, 2)])
@forked
@torch.no_grad()
def test_equal_branches_are_one_of_them_whatever_the_routers(topk, freq, tmp_path):
    """Their gates add up to 1. Also with one choice of almost all the gate, and when all have the same."""
    config = tiny_config(model__init_method_std=0.3)
    branch = stored(tmp_path, config, seed=1)
    expected = loaded(branch, config).logits(IDS)
    model = mixed(dict.fromkeys(BRANCHES, branch), topk, freq)
    routers = [block.inner.mlp.routed.router for block in model.blocks if block.layer in model.moe.layers]
    assert len(routers) == 2 // freq
    for scale in (0.0, 1.0, 30.0):
        for router in routers:
            router.copy_(scale * torch.randn(router.shape))
        torch.testing.assert_close(model.logits(IDS), expected, rtol=1e-5, atol=1e-5)


@forked
@torch.no_grad()
def test_a_mix_whose_routers_choose_one_branch_is_that_branch(tmp_path):
    """The branches have all but their feed-forward parts in common."""
    from recipes.moe.router import route

    config = tiny_config(model__init_method_std=0.3)
    members = {name: stored(tmp_path / name, config, seed) for seed, name in enumerate(BRANCHES, start=1)}
    singles = [loaded(member, config).logits(IDS) for member in members.values()]
    model = mixed(members, 2)

    def certain(x_TH: torch.Tensor, *_, chosen: int):
        logits_TE = torch.zeros(len(x_TH), len(BRANCHES))
        logits_TE[:, chosen] = 100.0
        return route(logits_TE, model.config.moe), x_TH

    for number, expected in enumerate(singles):
        for block in model.blocks:
            block.inner.mlp.routed.choose = functools.partial(certain, chosen=number)
        torch.testing.assert_close(model.logits(IDS), expected, rtol=1e-5, atol=1e-5)
        assert all((expected - other).abs().max() > 0.1 for other in singles if other is not expected)
