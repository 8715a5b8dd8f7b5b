"""Weights that every tensor-parallel rank has whole but feeds with its share of the tokens or heads: a rank then has only its
part of their gradient, and the parts are added up.

They are: norms and row-parallel biases under sequence parallelism, the norms of queries and keys, routers, shared experts.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from recipes import collectives
from recipes.groups import Groups
from recipes.topology import Role


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Mark them as megatron-core and Transformer Engine mark norms and biases under sequence parallelism."""
    for parameter in parameters:
        parameter.sequence_parallel = True  # type: ignore[attr-defined]


def add_up(model: nn.Module, groups: Groups) -> None:
    """Let the backward pass sum the gradients of marked parameters over tensor-parallel ranks.

    By a hook on each, since ZeRO-2 reduces over data-parallel ranks while the backward pass is still going on.
    """
    group = groups.handle(Role.tp)
    if group is None:
        return
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(lambda grad: collectives.sum_over_ranks(grad.clone(), group))
