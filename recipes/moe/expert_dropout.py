"""Experts whose hidden activations are dropped at random in training (Fedus et al. 2021, arXiv 2101.03961, sec. 2.4).

The same as `experts.GroupedMLP` in two parts, between which autograd sees the activations; that keeps more of them.
R rows sorted by expert, L local experts, I and O the widths that a matrix goes from and to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.autograd.function import once_differentiable

from recipes.moe.experts import activate
from recipes.moe.products import product_for


class GroupedLinear(torch.autograd.Function):
    """y_RO = x_RI w[e]^T for the expert e of each row. An expert without rows gets a zero gradient."""

    @staticmethod
    def forward(ctx, x_RI: torch.Tensor, w_LOI: torch.Tensor, sizes_L: list[int]) -> torch.Tensor:
        ctx.save_for_backward(x_RI, w_LOI)
        ctx.sizes_L = sizes_L
        y_RO, multiply = x_RI.new_empty(len(x_RI), w_LOI.shape[1]), product_for(x_RI, w_LOI)
        for x, w, y in zip(x_RI.split(sizes_L), w_LOI, y_RO.split(sizes_L), strict=True):
            multiply(x, w.t(), y)
        return y_RO

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RO: torch.Tensor):
        x_RI, w_LOI = ctx.saved_tensors
        grad_x, grad_w, multiply = torch.empty_like(x_RI), torch.empty_like(w_LOI), product_for(grad_RO, x_RI, w_LOI)
        by_rows = (rows.split(ctx.sizes_L) for rows in (x_RI, grad_x, grad_RO.contiguous()))
        for x, to_x, grad, w, to_w in zip(*by_rows, w_LOI, grad_w, strict=True):
            multiply(grad, w, to_x)
            multiply(grad.t(), x, to_w, streams=True)
        return grad_x, grad_w, None


def mlp_with_dropout(
    x_RH: torch.Tensor, w1_LGH: torch.Tensor, w2_LHF: torch.Tensor, sizes_L: list[int], gated: bool, dropout: float
) -> torch.Tensor:
    """Every rank draws for its own rows and columns."""
    a_RF = activate(GroupedLinear.apply(x_RH, w1_LGH, sizes_L), gated)
    with get_cuda_rng_tracker().fork():
        a_RF = F.dropout(a_RF, dropout)
    return GroupedLinear.apply(a_RF, w2_LHF, sizes_L)
