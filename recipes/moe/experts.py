"""The experts of one rank as stacks of matrices, and their forward and backward as one autograd function.

L local experts, R rows sorted by expert, H hidden, F expert width, G = 2F for gated experts (gate rows, then up rows), else F.

Indexing `w1[e]` inside autograd would write a gradient of the whole stack per expert; here each expert's matrix product goes
straight into its slice of one gradient. Rows pass both layers of their expert while they are in the cache. Kept for the backward
pass are the input, what the first matrices make of it, the activations unless they are to be made again, and, with gates, the
results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from recipes.moe.products import product_for
from recipes.moe.rows import Rows, weigh_gradient
from recipes.recycled import recycler


def activate(h_RG: torch.Tensor, gated: bool) -> torch.Tensor:
    if not gated:
        return F.gelu(h_RG)
    gate_RF, up_RF = h_RG.chunk(2, dim=-1)
    return F.silu(gate_RF) * up_RF


def _activate_into(h_RG: torch.Tensor, gated: bool, out_RF: torch.Tensor) -> torch.Tensor:
    """`activate` with its result in `out_RF`."""
    if not gated:
        return torch.ops.aten.gelu.out(h_RG, out=out_RF)
    gate_RF, up_RF = h_RG.chunk(2, dim=-1)
    return torch.ops.aten.silu.out(gate_RF, out=out_RF).mul_(up_RF)


def _activate_backward(
    grad_RF: torch.Tensor, h_RG: torch.Tensor, gated: bool, a_RF: torch.Tensor | None, scratch_RF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The activations, made again in the scratch unless they were kept, and the gradient of `h_RG` from theirs, which it may
    overwrite."""
    if not gated:
        a_RF = _activate_into(h_RG, gated, scratch_RF) if a_RF is None else a_RF
        return a_RF, torch.ops.aten.gelu_backward.grad_input(grad_RF, h_RG, grad_input=grad_RF)
    gate_RF, up_RF = h_RG.chunk(2, dim=-1)
    silu_RF = torch.ops.aten.silu.out(gate_RF, out=scratch_RF)
    grad_RG = torch.empty_like(h_RG)
    grad_gate_RF, grad_up_RF = grad_RG.chunk(2, dim=-1)
    torch.mul(grad_RF, silu_RF, out=grad_up_RF)
    torch.ops.aten.silu_backward.grad_input(grad_RF.mul_(up_RF), gate_RF, grad_input=grad_gate_RF)
    return silu_RF.mul_(up_RF) if a_RF is None else a_RF, grad_RG


class GroupedMLP(torch.autograd.Function):
    """out_NH = the sum over an input row's rows of gate (1 without gates) times act(x w1[e]^T) w2[e]^T, e the row's expert.

    An expert without rows gets a zero gradient. Whether activations are kept for the backward pass or computed again:
    `keep_activation`.
    """

    @staticmethod
    def forward(
        ctx,
        x_NH: torch.Tensor,
        gates_R: torch.Tensor | None,
        w1_LGH: torch.Tensor,
        w2_LHF: torch.Tensor,
        rows: Rows,
        sizes_L: list[int],
        gated: bool,
        keep_activation: bool = True,
    ) -> torch.Tensor:
        ctx.one_kernel = _has_kernel(x_NH, w1_LGH, w2_LHF)
        forward: Callable[..., tuple] = _forward_in_one_kernel if ctx.one_kernel else _forward_by_expert
        h_RG, a_RF, y_RH = forward(x_NH, rows, w1_LGH, w2_LHF, sizes_L, gated, keep_activation)
        ctx.save_for_backward(x_NH, gates_R, None if gates_R is None else y_RH, w1_LGH, w2_LHF, h_RG, a_RF)
        ctx.rows, ctx.sizes_L, ctx.gated = rows, sizes_L, gated
        return rows.put_back(y_RH, gates_R)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NH: torch.Tensor):
        x_NH, gates_R, y_RH, *inside = ctx.saved_tensors
        grad_y_RH, grad_gates_R = ctx.rows.take(grad_NH), None
        if gates_R is not None:
            grad_gates_R = weigh_gradient(grad_y_RH, y_RH, gates_R)
        backward: Callable[..., tuple] = _backward_in_one_kernel if ctx.one_kernel else _backward_by_expert
        grad_x_RH, *grads = backward(x_NH, ctx.rows, *inside, grad_y_RH, ctx.sizes_L, ctx.gated)
        return ctx.rows.put_back(grad_x_RH, None), grad_gates_R, *grads, None, None, None, None


def _has_kernel(*tensors: torch.Tensor) -> bool:
    """Whether one kernel multiplies the rows of all experts: bf16 on CUDA, each row a multiple of 16 bytes."""
    return all(t.is_cuda and t.dtype is torch.bfloat16 and t.shape[-1] % 8 == 0 for t in tensors)


def _forward_in_one_kernel(x_NH, rows: Rows, w1_LGH, w2_LHF, sizes_L: list[int], gated: bool, keep_activation: bool):
    ends_L = _ends(sizes_L, x_NH.device)
    h_RG = torch._grouped_mm(rows.take(x_NH), w1_LGH.transpose(1, 2), offs=ends_L)
    a_RF = activate(h_RG, gated)
    return h_RG, a_RF if keep_activation else None, torch._grouped_mm(a_RF, w2_LHF.transpose(1, 2), offs=ends_L)


def _backward_in_one_kernel(x_NH, rows: Rows, w1_LGH, w2_LHF, h_RG, a_RF, grad_RH, sizes_L: list[int], gated: bool):
    ends_L = _ends(sizes_L, x_NH.device)
    grad_a_RF = torch._grouped_mm(grad_RH, w2_LHF, offs=ends_L)
    a_RF, grad_h_RG = _activate_backward(grad_a_RF, h_RG, gated, a_RF, torch.empty_like(grad_a_RF))
    grad_w1_LGH = torch._grouped_mm(grad_h_RG.t(), rows.take(x_NH), offs=ends_L)
    grad_w2_LHF = torch._grouped_mm(grad_RH.t(), a_RF, offs=ends_L)
    for expert in (expert for expert, size in enumerate(sizes_L) if size == 0):
        grad_w1_LGH[expert].zero_()  # the kernel need not write what is a sum over nothing
        grad_w2_LHF[expert].zero_()
    return torch._grouped_mm(grad_h_RG, w1_LGH, offs=ends_L), grad_w1_LGH, grad_w2_LHF


def _ends(sizes_L: list[int], device: torch.device) -> torch.Tensor:
    """The row behind the last one of each expert."""
    return torch.tensor(sizes_L).cumsum(0).to(device, torch.int32, non_blocking=True)


def _forward_by_expert(x_NH, rows: Rows, w1_LGH, w2_LHF, sizes_L: list[int], gated: bool, keep_activation: bool):
    count = len(rows.source_R)
    h_RG = recycler.empty((count, w1_LGH.shape[1]), x_NH)
    y_RH = recycler.empty((count, w2_LHF.shape[1]), x_NH)
    a_RF = recycler.empty((count, w2_LHF.shape[2]), x_NH) if keep_activation else None
    by_rows = (tensor.split(sizes_L) for tensor in (rows.source_R, h_RG, y_RH))
    each_a, multiply = _by_expert(a_RF, x_NH, w2_LHF, sizes_L), product_for(x_NH, w1_LGH, w2_LHF)
    for source, h, y, a, w1, w2 in zip(*by_rows, each_a, w1_LGH.unbind(), w2_LHF.unbind(), strict=True):
        if gated:
            multiply(x_NH, w1.t(), h, a_rows=source)
            _activate_into(h, gated, a)
        else:
            multiply(x_NH, w1.t(), h, a_rows=source, gelu=a)
        multiply(a, w2.t(), y)
    return h_RG, a_RF, y_RH


def _by_expert(a_RF: torch.Tensor | None, like, w2_LHF, sizes_L: list[int]) -> Sequence[torch.Tensor]:
    """The activations of each expert; without any, room for them, the same for all."""
    if a_RF is not None:
        return a_RF.split(sizes_L)
    scratch_RF = recycler.empty((max(sizes_L), w2_LHF.shape[2]), like)
    return [scratch_RF[:size] for size in sizes_L]


def _backward_by_expert(x_NH, rows: Rows, w1_LGH, w2_LHF, h_RG, a_RF, grad_RH, sizes_L: list[int], gated: bool):
    grad_x_RH = recycler.empty_like(grad_RH)
    grad_w1_LGH, grad_w2_LHF = recycler.empty_like(w1_LGH), recycler.empty_like(w2_LHF)
    grads_a, scratch = (_by_expert(None, x_NH, w2_LHF, sizes_L) for _ in range(2))
    each_a = [None] * len(sizes_L) if a_RF is None else a_RF.split(sizes_L)
    by_rows = (tensor.split(sizes_L) for tensor in (rows.source_R, h_RG, grad_RH, grad_x_RH))
    by_expert = (stack.unbind() for stack in (w1_LGH, w2_LHF, grad_w1_LGH, grad_w2_LHF))
    multiply = product_for(x_NH, grad_RH, w1_LGH, w2_LHF)
    for source, h, grad_y, grad_x, kept_a, grad_a, room, w1, w2, grad_w1, grad_w2 in zip(
        *by_rows, each_a, grads_a, scratch, *by_expert, strict=True
    ):
        if gated:
            multiply(grad_y, w2, grad_a)
            a, grad_h = _activate_backward(grad_a, h, gated, kept_a, room)
        else:
            a, grad_h = room if kept_a is None else kept_a, grad_a
            multiply(grad_y, w2, grad_a, slope_at=h, gelu=room if kept_a is None else None)
        multiply(grad_y.t(), a, grad_w2, streams=True)
        multiply(grad_h, w1, grad_x)
        multiply(grad_h.t(), x_NH, grad_w1, streams=True, b_rows=source)
    return grad_x_RH, grad_w1_LGH, grad_w2_LHF
