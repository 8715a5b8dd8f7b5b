"""Tokens to the ranks of their experts and back, without padding.

T tokens, K choices per token, A assignments (kept token-choice pairs, A <= T K), R rows that arrive at this rank, L local experts.

    x_TH --rows--> x_AH sorted by global expert --all-to-all--> x_RH --sort--> by local expert -> experts -> back the same way

Rows are always collected (`out[i] = rows[place[i]]`, added up per token where it has several), never strewn: on CPU that is
three times as fast, and on CUDA the order of additions does not vary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from recipes import collectives
from recipes.moe.recycled import recycler


@dataclass(frozen=True)
class Plan:
    """Who goes where: made once from the routing, used for the way there and back.

    `order_A`: kept assignments (t K + k) sorted by global expert. `places_A`: of the kept assignments in their own order, the
    row in `order_A`. `starts_T`: where those of each token begin in `places_A`; None when each token has exactly one.
    `sizes_L`: rows for each local expert. With expert parallelism also rows sent to and received from each rank, the order that
    sorts received rows by local expert, and the one that undoes it.
    """

    order_A: torch.Tensor
    places_A: torch.Tensor
    starts_T: torch.Tensor | None
    sizes_L: list[int]
    sent: list[int]
    received: list[int]
    sort_R: torch.Tensor | None
    unsort_R: torch.Tensor | None


def make_plan(ids_TK: torch.Tensor, keep_TK: torch.Tensor | None, num_experts: int, group) -> Plan:
    """Sort assignments by expert and tell every rank of `group` (None: one rank) how many rows it will get."""
    flat = ids_TK.reshape(-1)
    order_A = torch.argsort(flat, stable=True)
    if keep_TK is not None:
        order_A = order_A[keep_TK.reshape(-1)[order_A]]
        flat = flat[keep_TK.reshape(-1)]
    places_A, starts_T = _places(order_A, ids_TK.shape, keep_TK)
    counts_E = torch.bincount(flat, minlength=num_experts)
    if group is None:
        return Plan(order_A, places_A, starts_T, counts_E.tolist(), [], [], None, None)
    size = collectives.group_size(group)
    counts_PL = counts_E.view(size, -1)
    arriving_PL = collectives.exchange_equal(counts_PL, group)  # [source rank, local expert]
    local = arriving_PL.shape[1]
    experts_R = torch.arange(local, device=flat.device).repeat(size).repeat_interleave(arriving_PL.reshape(-1))
    table = torch.cat((counts_PL.sum(1), arriving_PL.sum(1), arriving_PL.sum(0))).tolist()  # one copy to the host
    sizes_L, sent, received = table[2 * size :], table[:size], table[size : 2 * size]
    sort_R = torch.argsort(experts_R, stable=True)
    return Plan(order_A, places_A, starts_T, sizes_L, sent, received, sort_R, _inverse(sort_R))


def _places(
    order_A: torch.Tensor, shape: torch.Size, keep_TK: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`places_A` and `starts_T` of a plan for ids of this shape."""
    tokens, topk = shape
    if keep_TK is None:
        places_A = _inverse(order_A)
        return places_A, None if topk == 1 else torch.arange(0, tokens * topk, topk, device=order_A.device)
    kept_TK = keep_TK.reshape(-1)
    places = torch.empty_like(kept_TK, dtype=torch.int64)
    places[order_A] = torch.arange(len(order_A), device=order_A.device)
    counts_T = keep_TK.sum(1)
    return places[kept_TK], torch.cumsum(counts_T, 0) - counts_T


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def scatter_to_experts(x_TH: torch.Tensor, plan: Plan, topk: int, group) -> torch.Tensor:
    """Rows for the local experts, sorted by local expert: [R, H]."""
    x_AH = _Gather.apply(x_TH, plan, topk)
    if plan.sort_R is None:
        return x_AH
    x_RH = collectives.exchange_rows(x_AH, plan.sent, plan.received, group)
    return _Permute.apply(x_RH, plan.sort_R, plan.unsort_R)


def gather_from_experts(y_RH: torch.Tensor, plan: Plan, gates_TK: torch.Tensor, group) -> torch.Tensor:
    """Outputs weighted by their gates and summed per token: [T, H]. A token with no kept choice gets zero."""
    if plan.sort_R is not None:
        y_RH = _Permute.apply(y_RH, plan.unsort_R, plan.sort_R)
        y_RH = collectives.exchange_rows(y_RH, plan.received, plan.sent, group)
    return _Combine.apply(y_RH, gates_TK, plan)


def branch(x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens twice, for the router and for the experts; both gradients are added up in recycled memory."""
    return _Branch.apply(x_TH)


class _Branch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x_TH.view_as(x_TH), x_TH.view_as(x_TH)

    @staticmethod
    @once_differentiable
    def backward(ctx, one_TH: torch.Tensor | None, other_TH: torch.Tensor | None):
        if one_TH is None or other_TH is None:
            return other_TH if one_TH is None else one_TH
        return torch.add(one_TH, other_TH, out=recycler.empty_like(one_TH))


class _Gather(torch.autograd.Function):
    """x_TH[order // K]: the rows of the assignments. The gradient of a token is the sum over its kept choices."""

    @staticmethod
    def forward(ctx, x_TH: torch.Tensor, plan: Plan, topk: int) -> torch.Tensor:
        ctx.plan = plan
        return _collect(x_TH, plan.order_A // topk if topk > 1 else plan.order_A)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_AH: torch.Tensor):
        return _sum_per_token(grad_AH, ctx.plan, None), None, None


class _Combine(torch.autograd.Function):
    """The sum over a token's kept choices of gate times row."""

    @staticmethod
    def forward(ctx, y_AH: torch.Tensor, gates_TK: torch.Tensor, plan: Plan) -> torch.Tensor:
        ctx.save_for_backward(y_AH, gates_TK)
        ctx.plan = plan
        return _sum_per_token(y_AH, plan, gates_TK.to(y_AH.dtype).reshape(-1).index_select(0, plan.order_A))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TH: torch.Tensor):
        y_AH, gates_TK = ctx.saved_tensors
        order_A = ctx.plan.order_A
        grad_AH = _collect(grad_TH, order_A // gates_TK.shape[1] if gates_TK.shape[1] > 1 else order_A)
        grad_gates = gates_TK.new_zeros(gates_TK.numel())
        product_AH = torch.mul(y_AH, grad_AH, out=recycler.empty_like(y_AH))
        grad_gates[order_A] = product_AH.sum(-1, dtype=gates_TK.dtype)
        gates_A1 = gates_TK.reshape(-1).index_select(0, order_A)[:, None].to(y_AH.dtype)
        return grad_AH.mul_(gates_A1), grad_gates.view_as(gates_TK), None


class _Permute(torch.autograd.Function):
    """rows[order]; `inverse` is the order that undoes it."""

    @staticmethod
    def forward(ctx, rows_RH: torch.Tensor, order_R: torch.Tensor, inverse_R: torch.Tensor) -> torch.Tensor:
        ctx.inverse_R = inverse_R
        return _collect(rows_RH, order_R)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RH: torch.Tensor):
        return _collect(grad_RH, ctx.inverse_R), None, None


def _collect(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """rows[places]."""
    out = recycler.empty((len(places), *rows.shape[1:]), rows)
    return torch.index_select(rows, 0, places, out=out)


def _sum_per_token(rows_AH: torch.Tensor, plan: Plan, weights_A: torch.Tensor | None) -> torch.Tensor:
    """The sum of each token's rows, times the weights of the rows if given: [T, H]."""
    if plan.starts_T is None:
        rows_TH = _collect(rows_AH, plan.places_A)
        return rows_TH if weights_A is None else rows_TH.mul_(weights_A.index_select(0, plan.places_A)[:, None])
    if len(rows_AH) == 0:
        return rows_AH.new_zeros(len(plan.starts_T), rows_AH.shape[1])
    weights_A = None if weights_A is None else weights_A.index_select(0, plan.places_A)
    return F.embedding_bag(plan.places_A, rows_AH, plan.starts_T, mode="sum", per_sample_weights=weights_A)
