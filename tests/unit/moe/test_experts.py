"""The grouped feed-forward networks against one at a time, with experts without rows, and by finite differences."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.moe import experts
from recipes.moe.experts import GroupedMLP
from recipes.moe.rows import Rows, by_order
from tests.unit.moe import oracle


def case(sizes: list[int], gated: bool, hidden: int = 3, width: int = 2, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = (2 if gated else 1) * width
    shapes = ((sum(sizes), hidden), (len(sizes), rows, hidden), (len(sizes), hidden, width))
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def grouped(x_RH, w1_LGH, w2_LHF, sizes: list[int], gated: bool, keep: bool = True) -> torch.Tensor:
    """On rows that are sorted already, without gates."""
    in_order = by_order(torch.arange(len(x_RH), device=x_RH.device))
    return GroupedMLP.apply(x_RH, None, w1_LGH, w2_LHF, in_order, sizes, gated, keep)


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
    for keep in (True, False):
        assert torch.autograd.gradcheck(
            lambda *tensors, keep=keep: grouped(*tensors, sizes, gated, keep), case(sizes, gated)
        )


# Five tokens over three experts: in some order, each with two of them, and with some turned away.
PLACES = {
    "an order": ([2, 2, 1], by_order(torch.tensor([3, 0, 4, 2, 1]))),
    "two each": (
        [4, 1, 5],
        Rows(
            torch.tensor([0, 1, 2, 4, 3, 0, 1, 2, 3, 4]),
            torch.tensor([0, 5, 6, 1, 2, 7, 4, 8, 9, 3]),
            torch.arange(0, 10, 2),
        ),
    ),
    "some": ([1, 0, 3], Rows(torch.tensor([1, 1, 2, 4]), torch.tensor([1, 0, 2, 3]), torch.tensor([0, 0, 2, 3, 3]))),
    "none": ([0, 0, 0], Rows(torch.arange(0), torch.arange(0), torch.zeros(5, dtype=torch.int64))),
}


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("places", PLACES)
def test_gates_and_places_by_finite_differences(places, gated, keep, kernel, monkeypatch):
    """Rows that come from anywhere in the input, weighted and added up where they came from."""
    monkeypatch.setattr(experts, "_has_kernel", lambda *_: kernel)
    if kernel:  # of which only the products are torch's own
        monkeypatch.setattr(torch, "_grouped_mm", by_loop)
    sizes, rows = PLACES[places]
    generator = torch.Generator().manual_seed(2)
    x_NH = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    gates_R = torch.rand(sum(sizes), generator=generator, dtype=torch.float64, requires_grad=True)
    _, w1_LGH, w2_LHF = case(sizes, gated)

    def out(x_NH, gates_R, w1_LGH, w2_LHF):
        return GroupedMLP.apply(x_NH, gates_R, w1_LGH, w2_LHF, rows, sizes, gated, keep)

    assert torch.autograd.gradcheck(out, (x_NH, gates_R, w1_LGH, w2_LHF))
    y_RH = one_at_a_time(x_NH[rows.source_R], w1_LGH, w2_LHF, sizes, gated) * gates_R[:, None]
    expected = torch.zeros_like(x_NH).index_add(0, rows.source_R, y_RH)
    torch.testing.assert_close(out(x_NH, gates_R, w1_LGH, w2_LHF), expected)


def by_loop(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """torch._grouped_mm in any type: rows of `a` with a stack `b`, or columns of `a` with rows of `b` to a stack."""
    ends = [0, *offs.tolist()]
    parts = [slice(first, last) for first, last in itertools.pairwise(ends)]
    if b.dim() == 3:
        return torch.cat([a[part] @ matrix for part, matrix in zip(parts, b, strict=True)])
    return torch.stack([a[:, part] @ b[part] for part in parts])


@pytest.mark.parametrize("gated", [True, False])
def test_activations_made_again_are_the_same(gated):
    sizes = [3, 0, 5]
    tensors = [tensor.detach().float().requires_grad_() for tensor in case(sizes, gated, 16, 8)]
    kept, again = (
        torch.autograd.grad(grouped(*tensors, sizes, gated, keep).sin().sum(), tensors) for keep in (True, False)
    )
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


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
    out = grouped(*tensors, sizes, gated)
    expected = one_at_a_time(*tensors, sizes, gated)
    torch.testing.assert_close(out, expected)
    weight = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    found = torch.autograd.grad((out * weight).sum(), tensors)
    wanted = torch.autograd.grad((expected * weight).sum(), tensors, allow_unused=True)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs)
    for expert, size in enumerate(sizes):  # nothing came: exactly zero, and not what the memory held before
        assert size or not (found[1][expert].any() or found[2][expert].any())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 4], [0, 0, 7, 0, 1]])
def test_in_one_kernel_for_all_experts(sizes, gated, monkeypatch):
    """What runs on CUDA only, with torch's kernel for the CPU."""
    monkeypatch.setattr(experts, "_has_kernel", lambda *_: True)
    tensors = [tensor.detach().float().requires_grad_() for tensor in case(sizes, gated, hidden=16, width=8)]
    out = grouped(*tensors, sizes, gated)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = one_at_a_time(*exact, sizes, gated)
    weight = torch.linspace(-1, 2, out.numel()).view(out.shape)
    found = torch.autograd.grad((out * weight).sum(), tensors)
    wanted = torch.autograd.grad((expected * weight).sum(), exact)
    for ours, theirs in zip((out, *found), (expected, *wanted), strict=True):
        assert (ours.double() - theirs).abs().max() < 2e-6 * theirs.abs().max()  # sums of 24 products at most
    assert not any(found[1][expert].any() or found[2][expert].any() for expert, size in enumerate(sizes) if size == 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 40], [64, 128, 64, 0]])
def test_on_cuda_in_bf16(sizes, gated):
    """Against float64 on the same values, within what bf16 rounds; idle experts have zero gradients."""
    tensors = [t.detach().cuda().bfloat16().requires_grad_() for t in case(sizes, gated, hidden=64, width=32)]
    assert experts._has_kernel(*tensors)
    out = grouped(*tensors, sizes, gated)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    expected = one_at_a_time(*exact, sizes, gated)
    weight = torch.linspace(-1, 2, out.numel()).view(out.shape).bfloat16()
    found = torch.autograd.grad((out * weight.cuda()).sum(), tensors)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    for ours, theirs in zip((out, *found), (expected, *wanted), strict=True):
        assert (ours.double().cpu() - theirs).norm() <= 2e-2 * theirs.norm()
    assert not any(found[1][expert].any() or found[2][expert].any() for expert, size in enumerate(sizes) if size == 0)


def test_products_go_one_by_one_on_a_cpu_and_in_types_without_kernel():
    assert not experts._has_kernel(torch.zeros(8, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("experts_", "tokens"), [(8, 512), (64, 300)])
def test_fp32_gradients_at_real_widths(experts_, tokens, gated):
    """Matrices that are read ahead, gradients in recycled memory: 1e-5 of float64."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.bincount(torch.randint(experts_ - 1, (tokens,), generator=generator), minlength=experts_).tolist()
    tensors = [t.detach().float().requires_grad_() for t in case(sizes, gated, hidden=64, width=128)]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    for _ in range(2):  # the second time in memory that is not zero
        out = grouped(*tensors, sizes, gated)
        parts = zip(exact[0].split(sizes), exact[1].unbind(), exact[2].unbind(), strict=True)
        expected = torch.cat([experts.activate(x @ w1.t(), gated) @ w2.t() for x, w1, w2 in parts])
        pull = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        found = torch.autograd.grad(out, tensors, pull.float())
        wanted = torch.autograd.grad(expected, exact, pull)
        for ours, theirs in zip((out, *found), (expected, *wanted), strict=True):
            assert (ours.double() - theirs).norm() <= 1e-5 * theirs.norm()
        del out, found
