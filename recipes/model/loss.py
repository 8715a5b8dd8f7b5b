"""Cross entropy of each token, with the vocabulary whole or divided over tensor-parallel ranks.

T tokens, V vocabulary of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from recipes import collectives
from recipes.recycled import recycler

_PIECE = 1 << 19  # numbers, 2 MB


def token_losses(
    logits_SBV: torch.Tensor, labels_BS: torch.Tensor, first_row: int = 0, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Cross entropy of each position in fp32: [B, S].

    With a tensor-parallel `group` the logits are those of the V rows from `first_row` on (V may be 0), and every rank gets
    the losses of the whole vocabulary.
    """
    sequence, batch, vocab = logits_SBV.shape
    labels_T = labels_BS.transpose(0, 1).reshape(-1)
    logits_TV = logits_SBV.reshape(sequence * batch, vocab)
    losses_T = _CrossEntropy.apply(logits_TV, labels_T - first_row, group)
    return losses_T.view(sequence, batch).transpose(0, 1)


class _CrossEntropy(torch.autograd.Function):
    """`labels_T` count from this rank's first row and, with a group, may lie outside its rows.

    Each piece of a few rows is shifted, exponentiated and summed while it is in the cache; its exponentials wait in recycled
    memory, where the gradient overwrites them. Each rank shifts by its own maximum, and `scale_T` makes up for it.
    """

    @staticmethod
    def forward(ctx, logits_TV: torch.Tensor, labels_T: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        tokens, vocab = logits_TV.shape
        highest_T, sums_T = (
            logits_TV.new_full((tokens,), -torch.inf, dtype=torch.float32),
            labels_T.new_zeros(tokens).float(),
        )
        exps_TV = recycler.empty((tokens, vocab), sums_T)
        mine_T = (labels_T >= 0) & (labels_T < vocab)
        place_T1 = torch.where(mine_T, labels_T, 0)[:, None]
        for part in _pieces(logits_TV):
            piece, exps = logits_TV[part].float(), exps_TV[part]
            torch.amax(piece, 1, out=highest_T[part])
            torch.sub(piece, highest_T[part, None], out=exps)
            torch.sum(exps.exp_(), 1, out=sums_T[part])
        target_T = logits_TV.gather(1, place_T1).squeeze(1).float() if vocab else torch.zeros_like(sums_T)
        shift_T = highest_T.clone()
        if group is not None:
            collectives.max_over_ranks(shift_T, group)
        target_T = torch.where(mine_T, target_T - shift_T, 0.0)
        scale_T = (highest_T - shift_T).exp_()
        if group is not None:
            sums_T, target_T = collectives.sum_over_ranks(torch.stack((sums_T * scale_T, target_T)), group)
        ctx.save_for_backward(exps_TV, scale_T / sums_T, place_T1, mine_T)
        ctx.dtype = logits_TV.dtype
        return sums_T.log() - target_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_T: torch.Tensor):
        grad_TV, scale_T, place_T1, mine_T = ctx.saved_tensors
        for part in _pieces(grad_TV):
            piece = grad_TV[part].mul_((scale_T[part] * grad_T[part])[:, None])
            piece.scatter_add_(1, place_T1[part], -torch.where(mine_T[part], grad_T[part], 0.0)[:, None])
        return grad_TV.to(ctx.dtype), None, None


def _pieces(logits_TV: torch.Tensor) -> list[slice]:
    """Rows that fit into a core's cache together; on other devices all of them."""
    tokens, vocab = logits_TV.shape
    if not vocab:
        return []
    rows = max(1, _PIECE // vocab) if logits_TV.device.type == "cpu" else tokens
    return [slice(first, first + rows) for first in range(0, tokens, rows)]
