"""What one rank holds of the logical tensors: shapes under a layout, by arithmetic.

Tensor-parallel ranks divide the rows of q, k, v, gate and up (with their biases), the columns of out and down, and the padded
vocabulary (Shoeybi et al. 2019, arXiv 1909.08053, sec. 3); norms, router and the biases of out and down are whole everywhere.
Experts and shared experts are divided over expert-tensor-parallel ranks in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from recipes.config import Config
from recipes.logical import LogicalTensor, logical_tensors, num_moe_experts, padded_vocab_size
from recipes.topology import Layout

_ROWS_DIVIDED = ("q", "k", "v", "gate", "up")
_COLUMNS_DIVIDED = ("out", "down")


def local_shape(tensor: LogicalTensor, config: Config, layout: Layout) -> tuple[int, ...]:
    """Shape of a rank's part of `tensor`, vocabulary padding included; of an expert, on a rank that holds it."""
    shape = list(tensor.shape)
    if tensor.name in ("embedding.weight", "head.weight"):
        shape[0] = padded_vocab_size(config.model, layout.tensor_parallel_size)
    axis = _divided_axis(tensor)
    if axis is not None:
        in_experts = ".moe." in tensor.name
        count = layout.expert_tensor_parallel_size if in_experts else layout.tensor_parallel_size
        assert shape[axis] % count == 0, (tensor.name, shape, count)
        shape[axis] //= count
    return tuple(shape)


def _divided_axis(tensor: LogicalTensor) -> int | None:
    module, kind = tensor.name.split(".")[-2:]
    if module in ("embedding", "head", *_ROWS_DIVIDED):
        return 0
    return 1 if module in _COLUMNS_DIVIDED and kind == "weight" else None


@dataclass(frozen=True)
class Held:
    """Numbers of weights on one rank, padding included: `experts` those among which routers choose, `dense` all others."""

    dense: int
    experts: int


def held_weights(config: Config, layout: Layout) -> Held:
    """What each rank holds: all ranks hold equally much."""
    dense = experts = 0
    for name, tensor in logical_tensors(config).items():
        count = math.prod(local_shape(tensor, config, layout))
        if ".moe.experts." in name:
            experts += count
        else:
            dense += count
    if experts:
        assert num_moe_experts(config) % layout.expert_parallel_size == 0
    return Held(dense, experts // layout.expert_parallel_size)
