"""Where the tokens of a domain go in a mix: counts with planted routers, and the information of expert and domain by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipes.btm.experts import expert_shares, specificity
from recipes.btm.mixing import as_mix
from recipes.config import DataConfig
from recipes.model.gpt import GPT, registry
from tests.ranks import forked
from tests.tiny import tiny_config

EXPERTS = 4


@forked
@torch.no_grad()
def test_shares_are_those_of_the_experts_that_routers_choose():
    """Made positive, what a router reads prefers the two experts whose rows are ones."""
    model = GPT(as_mix(tiny_config(), EXPERTS)).eval()
    routers = {piece.name: entry.parameter for entry in registry(model, model.config) for piece in entry.pieces}
    for block, best in zip(model.blocks, ([1, 3], [0, 1]), strict=True):
        block.inner.mlp.register_forward_pre_hook(lambda module, args: (args[0].abs() + 1, *args[1:]))
        weight_EH = routers[f"layers.{block.layer}.moe.router.weight"]
        weight_EH.zero_()
        weight_EH[best] = 1.0
    tokens_NS1 = np.random.default_rng(0).integers(0, 60, (5, 9))
    share_NE = expert_shares(model, tokens_NS1, 0, DataConfig(), batch_size=2)
    assert share_NE.tolist() == [[0, 0.5, 0, 0.5], [0.5, 0.5, 0, 0]]


def test_specificity_is_the_information_of_expert_and_domain():
    own = [np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([[0.0, 1.0], [0.5, 0.5]])]
    assert specificity(own) == pytest.approx(0.5)  # one bit in the first layer, none in the second
    uneven = [np.array([[0.75, 0.25]]), np.array([[0.25, 0.75]])]
    assert specificity(uneven) == pytest.approx(1 - (-0.75 * np.log2(0.75) - 0.25 * np.log2(0.25)))
    assert specificity([np.full((3, 8), 1 / 8)] * 5) == pytest.approx(0)
