"""Cross entropy of each token from its last hidden state, with the vocabulary whole or divided over tensor-parallel ranks.

T tokens, V rows of this rank's part of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from recipes import collectives
from recipes.recycled import recycler

_PIECE = 1 << 19  # numbers, 2 MB


def token_losses(
    x_SBH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_BS: torch.Tensor,
    first_row: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Cross entropy in fp32 of each position, whose logits are x weight^T: [B, S].

    With a tensor-parallel `group` the weights are the V rows from `first_row` on (V may be 0), and every rank gets the losses of
    the whole vocabulary; its gradient of x is a part of the whole.
    """
    sequence, batch, hidden = x_SBH.shape
    labels_T = labels_BS.transpose(0, 1).reshape(-1) - first_row
    losses_T = _CrossEntropy.apply(x_SBH.reshape(-1, hidden), weight_VH, labels_T, group)
    return losses_T.view(sequence, batch).transpose(0, 1)


def losses_of_logits(logits_SBV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """The same of logits that are there already, of the whole vocabulary."""
    losses_T = F.cross_entropy(logits_SBV.flatten(0, 1).float(), labels_BS.t().flatten(), reduction="none")
    return losses_T.view(logits_SBV.shape[:2]).t()


class _CrossEntropy(torch.autograd.Function):
    """`labels_T` count from this rank's first row and, with a group, may lie outside its rows.

    The logits of a few tokens at a time are shifted, exponentiated and summed while they are in the cache; the exponentials wait
    in recycled memory, where the gradient overwrites them. Each rank shifts by its own maximum, and `scale_T` makes up for it.
    """

    @staticmethod
    def forward(ctx, x_TH: torch.Tensor, weight_VH: torch.Tensor, labels_T: torch.Tensor, group) -> torch.Tensor:
        tokens, vocab = len(x_TH), len(weight_VH)
        highest_T = x_TH.new_full((tokens,), -torch.inf, dtype=torch.float32)
        sums_T, target_T = torch.zeros_like(highest_T), torch.zeros_like(highest_T)
        exps_TV = recycler.empty((tokens, vocab), highest_T)
        mine_T = (labels_T >= 0) & (labels_T < vocab)
        place_T1 = torch.where(mine_T, labels_T, 0)[:, None]
        for part in _pieces(exps_TV):
            piece = exps_TV[part]
            if x_TH.dtype is torch.float32:
                torch.mm(x_TH[part], weight_VH.t(), out=piece)
            else:
                piece.copy_(x_TH[part] @ weight_VH.t())
            torch.amax(piece, 1, out=highest_T[part])
            target_T[part] = piece.gather(1, place_T1[part]).squeeze(1)
            torch.sum(piece.sub_(highest_T[part, None]).exp_(), 1, out=sums_T[part])
        shift_T = highest_T.clone()
        if group is not None:
            collectives.max_over_ranks(shift_T, group)
        target_T = torch.where(mine_T, target_T - shift_T, 0.0)
        scale_T = (highest_T - shift_T).exp_()
        if group is not None:
            sums_T, target_T = collectives.sum_over_ranks(torch.stack((sums_T * scale_T, target_T)), group)
        ctx.save_for_backward(x_TH, weight_VH, exps_TV, scale_T / sums_T, place_T1, mine_T)
        return sums_T.log() - target_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_T: torch.Tensor):
        x_TH, weight_VH, grad_TV, scale_T, place_T1, mine_T = ctx.saved_tensors
        for part in _pieces(grad_TV):
            piece = grad_TV[part].mul_((scale_T[part] * grad_T[part])[:, None])
            piece.scatter_add_(1, place_T1[part], -torch.where(mine_T[part], grad_T[part], 0.0)[:, None])
        grad_TV = grad_TV.to(x_TH.dtype)
        grad_weight_VH = torch.mm(grad_TV.t(), x_TH, out=recycler.empty_like(weight_VH))
        return grad_TV @ weight_VH, grad_weight_VH, None, None


def _pieces(numbers_TV: torch.Tensor) -> list[slice]:
    """Tokens whose numbers fit into the cache together; on other devices than CPUs all of them."""
    tokens, vocab = numbers_TV.shape
    if not vocab:
        return []
    rows = max(1, _PIECE // vocab) if numbers_TV.device.type == "cpu" else tokens
    return [slice(first, first + rows) for first in range(0, tokens, rows)]
