"""What rounding alone can do to each tensor: the computation once more, every result off at random by a few of its last bits.

Monte Carlo arithmetic (Parker 1997). A sum that cancels, such as the gradient of the only key that a token can attend to, is
nothing but the rounding of its terms, and no other order of the same sums agrees with it any better.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

UNIT = 2**-23  # distance from 1 to the next fp32 number
# Results are changed by up to this, relative: large beside what rounding does by itself, small enough for effects to be linear.
AMPLITUDE = 16 * UNIT
_SENSITIVE = 2  # times as sensitive as the median tensor: no more than the others of its kind
# Operators that move or set numbers and compute none; those whose results are views are known by their schema.
_EXACT = {
    "clone", "copy_", "_to_copy", "cat", "stack", "index", "index_select", "gather", "embedding", "constant_pad_nd", "zero_",
    "fill_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros",
    "ones", "ones_like", "new_ones", "full", "full_like", "new_full", "scalar_tensor", "arange", "lift_fresh", "where", "neg",
    "abs", "relu", "clamp", "max", "min", "amax", "amin", "topk", "sort", "masked_fill", "masked_fill_", "slice_backward",
    "select_backward", "rand", "randn", "rand_like", "randn_like", "uniform_", "normal_", "eq", "ne", "triu", "tril",
}  # fmt: skip


class RandomRounding(TorchDispatchMode):
    """Within it every computed fp32 number is multiplied by 1 + AMPLITUDE x (a random number of -1 .. 1)."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket.__name__ not in _EXACT:
            results = result if isinstance(result, tuple | list) else (result,)
            for tensor, returned in zip(results, func._schema.returns, strict=False):
                is_view = returned.alias_info is not None and not returned.alias_info.is_write
                if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32 and not is_view:
                    self._round(tensor)
        return result

    def _round(self, tensor: torch.Tensor) -> None:
        factor = torch.rand(tensor.shape, generator=self.generator, dtype=torch.float64)
        tensor.copy_(tensor.double() * factor.mul_(2).sub_(1).mul_(AMPLITUDE).add_(1))


def term_norms(
    compute: Callable[[RandomRounding], Mapping[str, np.ndarray]], plain: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """For each tensor of `plain` the norm that would make its rounding an ordinary one.

    Ordinary is up to twice what the median tensor has, relative to its norm. The result is below the tensor's own norm unless the
    sums behind it cancel. `compute` gives the tensors again, with the rounding that it is handed.
    """
    again = compute(RandomRounding())
    errors = {name: float(np.linalg.norm(again[name].astype(np.float64) - tensor)) for name, tensor in plain.items()}
    norms = {name: float(np.linalg.norm(tensor)) for name, tensor in plain.items()}
    median = statistics.median([errors[name] / norm for name, norm in norms.items() if norm] or [0.0])
    return {name: error / (_SENSITIVE * median) for name, error in errors.items()} if median else {}
