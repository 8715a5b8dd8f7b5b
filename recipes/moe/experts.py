"""The experts of one rank as stacks of matrices, and their forward and backward as one autograd function.

L local experts, R rows sorted by expert, H hidden, F expert width, G = 2F for gated experts (gate rows, then up rows), else F.

Indexing `w1[e]` inside autograd would write a gradient of the whole stack per expert; here each expert's matrix product goes
straight into its slice of one gradient buffer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def activate(h_RG: torch.Tensor, gated: bool) -> torch.Tensor:
    if not gated:
        return F.gelu(h_RG)
    gate_RF, up_RF = h_RG.chunk(2, dim=-1)
    return F.silu(gate_RF) * up_RF


def _activate_backward(grad_RF: torch.Tensor, h_RG: torch.Tensor, gated: bool) -> torch.Tensor:
    if not gated:
        return torch.ops.aten.gelu_backward(grad_RF, h_RG)
    gate_RF, up_RF = h_RG.chunk(2, dim=-1)
    grad_RG = torch.empty_like(h_RG)
    grad_gate, grad_up = grad_RG.chunk(2, dim=1)
    torch.mul(grad_RF, F.silu(gate_RF), out=grad_up)
    grad_gate.copy_(torch.ops.aten.silu_backward(grad_RF * up_RF, gate_RF))
    return grad_RG


class GroupedMLP(torch.autograd.Function):
    """y_RH = act(x_RH w1[e]^T) w2[e]^T for the expert e of each row. An expert without rows gets a zero gradient."""

    @staticmethod
    def forward(ctx, x_RH, w1_LGH: torch.Tensor, w2_LHF: torch.Tensor, sizes_L: list[int], gated: bool) -> torch.Tensor:
        h_RG = x_RH.new_empty(len(x_RH), w1_LGH.shape[1])
        for rows, e in _spans(sizes_L):
            torch.mm(x_RH[rows], w1_LGH[e].t(), out=h_RG[rows])
        a_RF = activate(h_RG, gated)
        y_RH = x_RH.new_empty(len(x_RH), w2_LHF.shape[1])
        for rows, e in _spans(sizes_L):
            torch.mm(a_RF[rows], w2_LHF[e].t(), out=y_RH[rows])
        ctx.save_for_backward(x_RH, h_RG, w1_LGH, w2_LHF)
        ctx.sizes_L, ctx.gated = sizes_L, gated
        return y_RH

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RH: torch.Tensor):
        x_RH, h_RG, w1_LGH, w2_LHF = ctx.saved_tensors
        grad_RH = grad_RH.contiguous()
        a_RF = activate(h_RG, ctx.gated)
        grad_w1, grad_w2 = torch.empty_like(w1_LGH), torch.empty_like(w2_LHF)
        grad_a_RF = torch.empty_like(a_RF)
        for rows, e in _spans(ctx.sizes_L):
            torch.mm(grad_RH[rows], w2_LHF[e], out=grad_a_RF[rows])
            torch.mm(grad_RH[rows].t(), a_RF[rows], out=grad_w2[e])
        grad_h_RG = _activate_backward(grad_a_RF, h_RG, ctx.gated)
        grad_x_RH = torch.empty_like(x_RH)
        for rows, e in _spans(ctx.sizes_L):
            torch.mm(grad_h_RG[rows], w1_LGH[e], out=grad_x_RH[rows])
            torch.mm(grad_h_RG[rows].t(), x_RH[rows], out=grad_w1[e])
        for e, size in enumerate(ctx.sizes_L):
            if size == 0:
                grad_w1[e].zero_()
                grad_w2[e].zero_()
        return grad_x_RH, grad_w1, grad_w2, None, None


def _spans(sizes_L: list[int]):
    """(rows, expert) for every expert that has rows."""
    start = 0
    for expert, size in enumerate(sizes_L):
        if size:
            yield slice(start, start + size), expert
        start += size
