"""Activations that the backward pass computes again instead of keeping them.

`full` keeps the input of each block only (Chen et al. 2016, arXiv 1604.06174); `selective` recomputes single modules (Korthikanti
et al. 2022, arXiv 2205.05198, sec. 5). What is computed again draws the same dropout and reports no statistics a second time.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from recipes.moe.context import MoeContext


def recomputed(function: Callable[..., Any], moe: MoeContext | None, *inputs: Any, **named: Any) -> Any:
    """`function(*inputs, **named)`, of which only the inputs are kept for the backward pass."""
    if not torch.is_grad_enabled():
        return function(*inputs, **named)
    states = get_cuda_rng_tracker().get_states()
    routing = contextlib.nullcontext() if moe is None else moe.again(moe.keys_T)
    contexts = lambda: (contextlib.nullcontext(), _again(states, routing))  # noqa: E731
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts, **named)


@contextlib.contextmanager
def _again(states: dict[str, torch.Tensor], routing: contextlib.AbstractContextManager) -> Iterator[None]:
    """Around the second computation: the generators of the first; what routers went by, and no statistics."""
    tracker = get_cuda_rng_tracker()
    now = tracker.get_states()
    tracker.set_states(states)
    try:
        with routing:
            yield
    finally:
        tracker.set_states(now)


def recompute_module(module: nn.Module, moe: MoeContext | None) -> None:
    """Let `module` keep only its inputs."""
    forward = module.forward
    module.forward = lambda *inputs, **named: recomputed(forward, moe, *inputs, **named)  # type: ignore[method-assign]


class NormOutputs:
    """Keeps the inputs of norms in place of their outputs, which the matrix product behind each would save.

    Use it as a context around the forward pass of `norms` and of what follows them.
    """

    def __init__(self, norms: list[nn.Module]):
        self._outputs: dict[tuple[int, int], tuple[weakref.ref, Callable[[], torch.Tensor]]] = {}
        for norm in norms:
            norm.register_forward_hook(self._remember)

    def _remember(self, norm: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        x = inputs[0].detach()

        def again() -> torch.Tensor:
            with torch.no_grad():
                return type(norm).forward(norm, x)

        # By address, since what is saved may be a view; the reference tells when the memory has become another tensor's.
        self._outputs[output.data_ptr(), output.numel()] = weakref.ref(output), again

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._outputs.clear()

    def _pack(self, tensor: torch.Tensor) -> Any:
        output, again = self._outputs.get((tensor.data_ptr(), tensor.numel()), (None, None))
        return tensor if output is None or output() is None else (again, tensor.shape)

    def _unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        again, shape = kept
        return again().view(shape)
