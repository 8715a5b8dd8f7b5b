"""Tokens to the ranks of their experts and back, without padding.

A assignments (kept token-choice pairs, A <= T K), R rows that arrive at this rank, L local experts.

    x_TH --rows--> x_AH sorted by global expert --all-to-all--> x_RH --sort--> by local expert -> experts -> back the same way
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recipes import collectives


class _Gather(torch.autograd.Function):
    """x_TH[order // K]: the rows of the assignments `order`. The gradient of a token is the sum over its K choices."""

    @staticmethod
    def forward(ctx, x_TH: torch.Tensor, order_A: torch.Tensor, topk: int) -> torch.Tensor:
        ctx.save_for_backward(order_A)
        ctx.shape, ctx.topk = x_TH.shape, topk
        return x_TH[order_A // topk if topk > 1 else order_A]

    @staticmethod
    def backward(ctx, grad_AH: torch.Tensor):
        (order_A,) = ctx.saved_tensors
        tokens, hidden = ctx.shape
        spread = _spread(grad_AH, order_A, tokens * ctx.topk)
        return (spread.view(tokens, ctx.topk, hidden).sum(1) if ctx.topk > 1 else spread), None, None


class _Scatter(torch.autograd.Function):
    """Rows of the assignments `order` put back at their places among all T K; places of dropped ones are zero."""

    @staticmethod
    def forward(ctx, y_AH: torch.Tensor, order_A: torch.Tensor, places: int) -> torch.Tensor:
        ctx.save_for_backward(order_A)
        return _spread(y_AH, order_A, places)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad[ctx.saved_tensors[0]], None, None


def _spread(rows: torch.Tensor, order_A: torch.Tensor, places: int) -> torch.Tensor:
    out = rows.new_empty(places, rows.shape[1]) if len(order_A) == places else rows.new_zeros(places, rows.shape[1])
    return out.index_copy_(0, order_A, rows)


@dataclass(frozen=True)
class Plan:
    """Who goes where: made once from the routing, used for the way there and back.

    `order_A`: kept assignments (t K + k) sorted by global expert. `sizes_L`: rows for each local expert. With expert
    parallelism also rows sent to and received from each rank, and the order that sorts received rows by local expert.
    """

    order_A: torch.Tensor
    sizes_L: list[int]
    sent: list[int]
    received: list[int]
    sort_R: torch.Tensor | None


def make_plan(ids_TK: torch.Tensor, keep_TK: torch.Tensor | None, num_experts: int, group) -> Plan:
    """Sort assignments by expert and tell every rank of `group` (None: one rank) how many rows it will get."""
    flat = ids_TK.reshape(-1)
    order_A = torch.argsort(flat, stable=True)
    if keep_TK is not None:
        order_A = order_A[keep_TK.reshape(-1)[order_A]]
        flat = flat[keep_TK.reshape(-1)]
    counts_E = torch.bincount(flat, minlength=num_experts)
    if group is None:
        return Plan(order_A, counts_E.tolist(), [], [], None)
    size = collectives.group_size(group)
    counts_PL = counts_E.view(size, -1)
    arriving_PL = collectives.exchange_equal(counts_PL, group)  # [source rank, local expert]
    local = arriving_PL.shape[1]
    experts_R = torch.arange(local, device=flat.device).repeat(size).repeat_interleave(arriving_PL.reshape(-1))
    table = torch.cat((counts_PL.sum(1), arriving_PL.sum(1), arriving_PL.sum(0))).tolist()  # one copy to the host
    return Plan(order_A, table[2 * size :], table[:size], table[size : 2 * size], torch.argsort(experts_R, stable=True))


def scatter_to_experts(x_TH: torch.Tensor, plan: Plan, topk: int, group) -> torch.Tensor:
    """Rows for the local experts, sorted by local expert: [R, H]."""
    x_AH = _Gather.apply(x_TH, plan.order_A, topk)
    if plan.sort_R is None:
        return x_AH
    x_RH = collectives.exchange_rows(x_AH, plan.sent, plan.received, group)
    return _Gather.apply(x_RH, plan.sort_R, 1)


def gather_from_experts(y_RH: torch.Tensor, plan: Plan, gates_TK: torch.Tensor, group) -> torch.Tensor:
    """Outputs weighted by their gates and summed per token: [T, H]. A token with no kept choice gets zero."""
    if plan.sort_R is not None:
        y_RH = _Scatter.apply(y_RH, plan.sort_R, len(plan.sort_R))
        y_RH = collectives.exchange_rows(y_RH, plan.received, plan.sent, group)
    tokens, topk = gates_TK.shape
    y_TKH = _Scatter.apply(y_RH, plan.order_A, tokens * topk).view(tokens, topk, -1)
    weighted = y_TKH * gates_TK[..., None].to(y_TKH.dtype)
    return weighted.sum(1) if topk > 1 else weighted[:, 0]
