"""Auxiliary losses of the router, and biases in place of one; neither depends on how tokens are spread over ranks.

Convention: with f_e the share of all (token, choice) assignments that go to expert e (sum 1) and P_e the mean probability of
e, the load-balancing loss is E sum_e f_e P_e: 1 for a uniform router, E when all tokens take one expert (Fedus et al. 2021,
arXiv 2101.03961, eq. 4, for any K). f carries no gradient. The z-loss is mean(logsumexp(logits)^2) (Zoph et al. 2022,
arXiv 2202.08906, eq. 5).

A rank computes its part of each loss, such that the parts of all ranks add up to the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def balance_part(
    probs_TE: torch.Tensor, share_E: torch.Tensor, tokens: torch.Tensor | float, mask_T: torch.Tensor | None = None
) -> torch.Tensor:
    """E sum_e f_e sum_t p_te / tokens over the tokens given: their part of the loss of a batch of `tokens` tokens.

    `mask_T` is 1 for tokens that count, which `share_E` and `tokens` must then be of.
    """
    counting_TE = probs_TE if mask_T is None else probs_TE * mask_T[:, None]
    return probs_TE.shape[1] * (share_E * counting_TE.sum(0)).sum() / tokens


def sequence_balance_part(
    probs_SBE: torch.Tensor,
    ids_SBK: torch.Tensor,
    sequences: float,
    mask_SB: torch.Tensor | None = None,
    made_SBK: torch.Tensor | None = None,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts,
) -> torch.Tensor:
    """The loss of each sequence by itself, summed over the B given and divided by `sequences`, those of the whole batch.

    `mask_SB` is 1 for tokens that count; a sequence without any contributes nothing. `made_SBK`: which ids are choices, None for
    all. When the positions of a sequence are spread over ranks, `add_up` sums counts [B, E + 1] over them, and the result is
    this rank's part.
    """
    _, batch, experts = probs_SBE.shape
    mask_SB = torch.ones_like(probs_SBE[..., 0]) if mask_SB is None else mask_SB.to(probs_SBE.dtype)
    counted_SBK = mask_SB[..., None].expand(ids_SBK.shape)
    counted_SBK = counted_SBK.contiguous() if made_SBK is None else counted_SBK * made_SBK
    chosen_SBE = torch.zeros_like(probs_SBE).scatter_add_(2, ids_SBK, counted_SBK)
    counts_BE1 = add_up(torch.cat((chosen_SBE.sum(0), mask_SB.sum(0)[:, None]), dim=1))
    counts_BE, tokens_B1 = counts_BE1[:, :-1], counts_BE1[:, -1:].clamp(min=1)
    share_BE = counts_BE / counts_BE.sum(1, keepdim=True).clamp(min=1)
    mean_BE = (probs_SBE * mask_SB[..., None]).sum(0) / tokens_B1
    assert share_BE.shape == (batch, experts)
    return experts * (share_BE * mean_BE).sum() / sequences


def z_part(logits_TE: torch.Tensor, tokens: torch.Tensor | float) -> torch.Tensor:
    """sum_t logsumexp(logits_t)^2 / tokens over the tokens given."""
    return torch.logsumexp(logits_TE, dim=-1).square().sum() / tokens


def moved_biases(bias_E: torch.Tensor, counts_E: torch.Tensor, rate: float) -> torch.Tensor:
    """The biases of a layer after a step with these integer counts of all its experts: fp64 [E].

    Up by `rate` for an expert with less than the mean, down for one with more (Wang et al. 2024, arXiv 2408.15664, alg. 1), which
    is decided in integers. Then their mean is taken off: a number common to all experts of a layer changes no choice, but as
    more experts gain than lose, it would grow until a bias no longer resolves `rate`.
    """
    missing_E = counts_E.sum() - len(counts_E) * counts_E
    moved_E = bias_E + missing_E.sign().double() * rate
    return moved_E - moved_E.mean()


def coefficient(start: float, end: float | None, ramp: list[int] | None, step: int) -> float:
    """The weight of a loss at a step (from 1): `start` up to step ramp[0], `end` from step ramp[1] on, linear in between."""
    if end is None or ramp is None:
        return start
    first, last = ramp
    return start + (end - start) * min(1.0, max(0.0, (step - first) / (last - first)))


class AddLoss(torch.autograd.Function):
    """Identity on `out` that adds `scale` x `loss` to whatever loss is differentiated later (as in Megatron's auto scaler)."""

    @staticmethod
    def forward(ctx, out: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        ctx.loss = loss.detach()
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, torch.full_like(ctx.loss, ctx.scale), None
