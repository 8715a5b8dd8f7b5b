"""Tokens to the ranks of their experts and back, without padding.

T tokens, K choices per token, A assignments (kept token-choice pairs, A <= T K), R rows that arrive at this rank, L local experts.

    one rank:    x_TH -> experts, which gather their rows and combine the results -> out_TH
    more ranks:  x_TH --gather--> x_AH sorted by global expert --all-to-all--> x_RH by source rank -> experts -> back the same way
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from recipes import collectives
from recipes.moe.rows import Rows, by_order, combine, gather, inverse


@dataclass(frozen=True)
class Plan:
    """Who goes where: made once from the routing, used for the way there and back.

    `order_A`: kept assignments (t K + k) sorted by global expert; `rows`: these as rows of the tokens. `local`: the rows for the
    local experts, of which there are `sizes_L`, among the rows that arrived here; `rows` itself for one rank. With more also the
    numbers of rows `sent` to and `received` from each.
    """

    order_A: torch.Tensor
    rows: Rows
    local: Rows
    sizes_L: list[int]
    sent: list[int]
    received: list[int]


# x_NH, gates of the rows or None, plan -> out_NH
Experts = Callable[[torch.Tensor, torch.Tensor | None, Plan], torch.Tensor]


def make_plan(ids_TK: torch.Tensor, keep_TK: torch.Tensor | None, num_experts: int, group) -> Plan:
    """Sort assignments by expert and tell every rank of `group` (None: one rank) how many rows it will get."""
    flat = ids_TK.reshape(-1)
    order_A = torch.argsort(flat, stable=True)
    if keep_TK is not None:
        order_A = order_A[keep_TK.reshape(-1)[order_A]]
        flat = flat[keep_TK.reshape(-1)]
    rows = _rows(order_A, ids_TK.shape, keep_TK)
    counts_E = torch.bincount(flat, minlength=num_experts)
    if group is None:
        return Plan(order_A, rows, rows, counts_E.tolist(), [], [])
    size = collectives.group_size(group)
    counts_PL = counts_E.view(size, -1)
    arriving_PL = collectives.exchange_equal(counts_PL, group)  # [source rank, local expert]
    local = arriving_PL.shape[1]
    experts_R = torch.arange(local, device=flat.device).repeat(size).repeat_interleave(arriving_PL.reshape(-1))
    table = torch.cat((counts_PL.sum(1), arriving_PL.sum(1), arriving_PL.sum(0))).tolist()  # one copy to the host
    sizes_L, sent, received = table[2 * size :], table[:size], table[size : 2 * size]
    return Plan(order_A, rows, by_order(torch.argsort(experts_R, stable=True)), sizes_L, sent, received)


def _rows(order_A: torch.Tensor, shape: torch.Size, keep_TK: torch.Tensor | None) -> Rows:
    """The kept assignments of ids of this shape, in this order, as rows of the tokens."""
    tokens, topk = shape
    source_A = order_A // topk if topk > 1 else order_A
    if keep_TK is None:
        starts_T = None if topk == 1 else torch.arange(0, tokens * topk, topk, device=order_A.device)
        return Rows(source_A, inverse(order_A), starts_T)
    kept = keep_TK.reshape(-1)
    places = torch.empty_like(kept, dtype=torch.int64)
    places[order_A] = torch.arange(len(order_A), device=order_A.device)
    counts_T = keep_TK.sum(1)
    return Rows(source_A, places[kept], torch.cumsum(counts_T, 0) - counts_T)


def through_experts(x_TH: torch.Tensor, gates_TK: torch.Tensor, plan: Plan, group, experts: Experts) -> torch.Tensor:
    """What the chosen experts, wherever they are, make of the tokens, weighted by gates and summed per token: [T, H]."""
    gates_A = gates_TK.reshape(-1).index_select(0, plan.order_A)
    if group is None:
        return experts(x_TH, gates_A, plan)
    x_RH = collectives.exchange_rows(gather(x_TH, plan.rows), plan.sent, plan.received, group)
    y_AH = collectives.exchange_rows(experts(x_RH, None, plan), plan.received, plan.sent, group)
    return combine(y_AH, gates_A, plan.rows)
