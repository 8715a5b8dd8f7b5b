"""The grouped feed-forward networks against one at a time, with experts without rows, and by finite differences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.moe.experts import GroupedMLP
from tests.unit.moe import oracle


def case(sizes: list[int], gated: bool, hidden: int = 3, width: int = 2, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = (2 if gated else 1) * width
    shapes = ((sum(sizes), hidden), (len(sizes), rows, hidden), (len(sizes), hidden, width))
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def one_at_a_time(x_RH, w1_LGH, w2_LHF, sizes: list[int], gated: bool) -> torch.Tensor:
    outs, start = [x_RH[:0]], 0
    for w1_GH, w2_HF, size in zip(w1_LGH, w2_LHF, sizes, strict=True):
        weights = {"e.down": w2_HF}
        weights |= dict(zip(("e.gate", "e.up"), w1_GH.chunk(2), strict=True)) if gated else {"e.up": w1_GH}
        outs += [oracle.feed_forward(x_H, weights, "e")[None] for x_H in x_RH[start : start + size]]
        start += size
    return torch.cat(outs)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sizes", [[2, 0, 1], [0, 3], [1], [0, 0]])
def test_gradients_by_finite_differences(sizes, gated):
    assert torch.autograd.gradcheck(lambda *tensors: GroupedMLP.apply(*tensors, sizes, gated), case(sizes, gated))


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    gated=st.booleans(),
    hidden=st.integers(1, 5),
    width=st.integers(1, 5),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=50)
def test_values_and_gradients_are_those_of_one_expert_at_a_time(sizes, gated, hidden, width, seed):
    tensors = case(sizes, gated, hidden, width, seed)
    out = GroupedMLP.apply(*tensors, sizes, gated)
    expected = one_at_a_time(*tensors, sizes, gated)
    torch.testing.assert_close(out, expected)
    weight = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    found = torch.autograd.grad((out * weight).sum(), tensors)
    wanted = torch.autograd.grad((expected * weight).sum(), tensors, allow_unused=True)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs)
    for expert, size in enumerate(sizes):  # nothing came: exactly zero, and not what the memory held before
        assert size or not (found[1][expert].any() or found[2][expert].any())
