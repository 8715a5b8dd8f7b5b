"""Routing as pure functions. T tokens, E experts, K experts per token. Everything is fp32, whatever the model's type."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
import torch.nn.functional as F


def router_logits(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
    """Scores before the softmax: fp32 [T, E]. Both factors are cast up first: bf16 products would tie and flip choices."""
    return F.linear(x_TH.float(), weight_EH.float())


def route(logits_TE: torch.Tensor, topk: int, pre_softmax: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose K experts per token: (ids_TK int64, gates_TK fp32, probs_TE fp32).

    `pre_softmax`: gates are the chosen entries of the softmax over all experts, as in Switch (Fedus et al. 2021,
    arXiv 2101.03961, eq. 2) and OLMoE; otherwise the softmax over the K chosen logits, as in Mixtral, which is the same as
    renormalising and has no denominator that could vanish.
    """
    probs_TE = torch.softmax(logits_TE, dim=-1)
    top_TK, ids_TK = torch.topk(logits_TE, topk, dim=-1)
    gates_TK = probs_TE.gather(1, ids_TK) if pre_softmax else torch.softmax(top_TK, dim=-1)
    return ids_TK, gates_TK, probs_TE


def capacity(tokens: int, topk: int, num_experts: int, factor: float, minimum: int = 0) -> int:
    """Most tokens that one expert takes of this rank's `tokens`: ceil(T K factor / E), at least `minimum`, at most T."""
    even_share = Fraction(str(factor)) * tokens * topk / num_experts  # exact: in floats ceil(100 x 1.1 / 10) is 12
    return min(tokens, max(minimum, math.ceil(even_share)))


def kept(
    ids_TK: torch.Tensor, gates_TK: torch.Tensor, num_experts: int, limit: int, by_probability: bool
) -> torch.Tensor:
    """Which assignments fit when each expert takes at most `limit`: bool [T, K].

    First come first served in token order (first choices before second ones), or the largest gates first.
    """
    ids_KT, gates_KT = ids_TK.t().reshape(-1), gates_TK.t().reshape(-1)
    if by_probability:
        by_gate = torch.argsort(gates_KT, descending=True, stable=True)
        order = by_gate[torch.argsort(ids_KT[by_gate], stable=True)]
    else:
        order = torch.argsort(ids_KT, stable=True)
    counts_E = torch.bincount(ids_KT, minlength=num_experts)
    starts_E = torch.cumsum(counts_E, 0) - counts_E
    place = torch.arange(len(order), device=order.device) - starts_E[ids_KT[order]]
    fits = torch.empty_like(order, dtype=torch.bool)
    fits[order] = place < limit
    return fits.view(ids_TK.shape[1], -1).t()
