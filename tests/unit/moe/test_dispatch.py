"""The way to the experts and back on one rank: order, dropped assignments, gradients."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.moe.dispatch import make_plan, through_experts
from recipes.moe.rows import combine, gather

IDS = torch.tensor([[2, 0], [0, 3], [2, 3], [3, 0]])
KEEP = torch.tensor([[True, True], [False, True], [True, True], [False, False]])


def test_rows_arrive_by_expert_in_token_order():
    plan = make_plan(IDS, None, 4, None)
    assert plan.sizes_L == [3, 0, 2, 3]
    rows_A1 = gather(torch.arange(4.0)[:, None], plan.rows)
    assert rows_A1[:, 0].tolist() == [0, 1, 3, 0, 2, 1, 2, 3]
    plan = make_plan(IDS, KEEP, 4, None)
    assert plan.sizes_L == [1, 0, 2, 2]
    assert gather(torch.arange(4.0)[:, None], plan.rows)[:, 0].tolist() == [0, 0, 2, 1, 2]


def test_gradients_by_finite_differences():
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    for keep in (None, KEEP, torch.zeros_like(KEEP)):
        plan = make_plan(IDS, keep, 4, None)
        scale = torch.arange(1.0, len(plan.order_A) + 1, dtype=torch.float64)[:, None]

        def experts(x_NH, gates_R, plan, scale=scale):
            return combine((gather(x_NH, plan.local) * scale).sin(), gates_R, plan.local)

        def there_and_back(x_TH, gates_TK, plan=plan, experts=experts):
            return through_experts(x_TH, gates_TK, plan, None, experts)

        assert torch.autograd.gradcheck(there_and_back, (x, gates))


@given(data=st.data(), tokens=st.integers(1, 20), experts=st.integers(1, 8), seed=st.integers(0, 99))
@settings(deadline=None)
def test_every_kept_assignment_passes_its_expert_once(data, tokens, experts, seed):
    topk = data.draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :topk]
    keep_TK = torch.rand(tokens, topk, generator=generator) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    x_TH, gates_TK = torch.randn(tokens, 2, generator=generator), torch.rand(tokens, topk, generator=generator)
    plan = make_plan(ids_TK, keep_TK, experts, None)
    assert sum(plan.sizes_L) == keep_TK.sum() and len(plan.sizes_L) == experts
    factors = torch.arange(1.0, experts + 1)  # expert e multiplies by e + 1
    factors_A = factors.repeat_interleave(torch.tensor(plan.sizes_L))
    expected = ((factors[ids_TK] * gates_TK * keep_TK)[..., None] * x_TH[:, None]).sum(1)
    multiply = lambda x_NH, gates_R, plan: combine(gather(x_NH, plan.rows) * factors_A[:, None], gates_R, plan.rows)  # noqa: E731
    torch.testing.assert_close(through_experts(x_TH, gates_TK, plan, None, multiply), expected)
