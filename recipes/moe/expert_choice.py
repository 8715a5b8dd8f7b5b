"""Experts choose tokens: every expert takes equally many, each those that ask for it most (Zhou et al. 2022, arXiv 2202.09368).

Whether a token is taken depends on all others of the micro-batch, later ones of its own sequence among them: what such a model
predicts, in training and in evaluation, has seen a little of the future.
"""

from __future__ import annotations

import torch


def choose_tokens(scores_TE: torch.Tensor, limit: int) -> torch.Tensor:
    """Each expert's `limit` tokens with the largest scores (of equal ones the first): bool [T, E]."""
    order_TE = torch.argsort(scores_TE, dim=0, descending=True, stable=True)
    return torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(0, order_TE[:limit], True)


def by_token(chosen_TE: torch.Tensor, scores_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, the best first, and which places are used: int64 and bool [T, K].

    K is the largest number of experts that took the same token, which the host has to know.
    """
    width = max(1, int(chosen_TE.sum(1).max()))
    values_TK, ids_TK = scores_TE.masked_fill(~chosen_TE, -1.0).topk(width, dim=1)
    return ids_TK, values_TK >= 0
