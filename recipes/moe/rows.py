"""From tokens to the rows that experts work on, and back.

N rows of the input, R rows of the experts: sorted by expert, as many for each input row as experts have it, or none.

    x_NH --gather--> x_RH -> experts -> y_RH --combine--> out_NH, the sum over an input row's rows of gate times row

Rows are always collected (`out[i] = rows[place[i]]`, added up where there are several), never strewn: on CPU that is three times
as fast, and on CUDA the order of additions does not vary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from recipes.recycled import recycler


@dataclass(frozen=True)
class Rows:
    """`source_R`: the input row of each. `places_R`: the same rows in the order of the input. `starts_N`: where those of each
    input row begin in `places_R`; None when each has exactly one."""

    source_R: torch.Tensor
    places_R: torch.Tensor
    starts_N: torch.Tensor | None

    def take(self, x_NH: torch.Tensor) -> torch.Tensor:
        """x_NH[source_R]."""
        return collect(x_NH, self.source_R)

    def put_back(self, y_RH: torch.Tensor, weights_R: torch.Tensor | None) -> torch.Tensor:
        """The sum over each input row's rows, times their weights if given: [N, H]."""
        weights_R = None if weights_R is None else weights_R.to(y_RH.dtype).index_select(0, self.places_R)
        if self.starts_N is None:
            out_NH = collect(y_RH, self.places_R)
            return out_NH if weights_R is None else out_NH.mul_(weights_R[:, None])
        if len(y_RH) == 0:
            return y_RH.new_zeros(len(self.starts_N), y_RH.shape[1])
        return F.embedding_bag(self.places_R, y_RH, self.starts_N, mode="sum", per_sample_weights=weights_R)


def by_order(order_R: torch.Tensor) -> Rows:
    """Every input row once, in this order."""
    return Rows(order_R, inverse(order_R), None)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def collect(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """rows[places]."""
    out = recycler.empty((len(places), *rows.shape[1:]), rows)
    return torch.index_select(rows, 0, places, out=out)


def gather(x_NH: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The rows of the experts: [R, H]."""
    return _Gather.apply(x_NH, rows)


def combine(y_RH: torch.Tensor, gates_R: torch.Tensor | None, rows: Rows) -> torch.Tensor:
    """The experts' results, times their gates if given, added up per input row: [N, H]; zero for one without any."""
    return _Combine.apply(y_RH, gates_R, rows)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NH: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return rows.take(x_NH)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RH: torch.Tensor):
        return ctx.rows.put_back(grad_RH, None), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RH: torch.Tensor, gates_R: torch.Tensor | None, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        ctx.save_for_backward(*(() if gates_R is None else (y_RH, gates_R)))
        return rows.put_back(y_RH, gates_R)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NH: torch.Tensor):
        grad_RH = ctx.rows.take(grad_NH)
        if not (saved := ctx.saved_tensors):
            return grad_RH, None, None
        return grad_RH, weigh_gradient(grad_RH, *saved), None


def weigh_gradient(grad_RH: torch.Tensor, y_RH: torch.Tensor, gates_R: torch.Tensor) -> torch.Tensor:
    """The gradient of gates times rows -> of the rows, in place, and of the gates: [R]."""
    product_RH = torch.mul(y_RH, grad_RH, out=recycler.empty_like(y_RH))
    grad_RH.mul_(gates_R[:, None].to(grad_RH.dtype))
    return product_RH.sum(-1, dtype=gates_R.dtype)
