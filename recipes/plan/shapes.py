"""What one rank holds of the logical tensors: shapes under a layout, by arithmetic.

Tensor-parallel ranks divide the rows of q, k, v, gate and up (with their biases), the columns of out and down, and the padded
vocabulary (Shoeybi et al. 2019, arXiv 1909.08053, sec. 3); norms, router and the biases of out and down are whole everywhere.
Experts and shared experts are divided over expert-tensor-parallel ranks in the same way.
"""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass

from recipes.config import Config
from recipes.logical import LogicalTensor, divided_axis, expert_counts, padded_vocab_size, stage_layers, tensor_kinds
from recipes.topology import Layout

_IN_ONE_PARAMETER = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


def local_shape(tensor: LogicalTensor, config: Config, layout: Layout) -> tuple[int, ...]:
    """Shape of a rank's part of `tensor`, vocabulary padding included; of an expert, on a rank that holds it."""
    shape = list(tensor.shape)
    if tensor.name in ("embedding.weight", "head.weight"):
        shape[0] = padded_vocab_size(config.model, layout.tensor_parallel_size)
    axis = divided_axis(tensor.name)
    if axis is not None:
        in_experts = ".moe." in tensor.name
        count = layout.expert_tensor_parallel_size if in_experts else layout.tensor_parallel_size
        assert shape[axis] % count == 0, (tensor.name, shape, count)
        shape[axis] //= count
    return tuple(shape)


@dataclass(frozen=True)
class Held:
    """Numbers of weights on one rank, padding included: `experts` those among which routers choose, `dense` all others."""

    dense: int
    experts: int


def held_weights(config: Config, layout: Layout) -> list[Held]:
    """What each rank of every pipeline stage holds: the ranks of a stage hold equally much."""
    stages = stage_layers(config, layout.pipeline_parallel_size)
    stage_of = {layer: stage for stage, members in enumerate(stages) for layer in members}
    last = len(stages) - 1
    ends = {0, last} if config.model.share_embeddings_and_output_weights else {0}  # that hold the embedding
    dense, experts = [0] * len(stages), [0] * len(stages)
    for tensor, layers, copies in tensor_kinds(config):
        count = copies * math.prod(local_shape(tensor, config, layout))
        holders = collections.Counter(stage_of[layer] for layer in layers)
        if not layers:
            holders.update(ends if tensor.name == "embedding.weight" else {last})
        for stage, times in holders.items():
            (experts if ".moe.experts." in tensor.name else dense)[stage] += count * times
    assert not any(count % layout.expert_parallel_size for count in expert_counts(config).values())
    return [Held(*both) for both in zip(dense, (n // layout.expert_parallel_size for n in experts), strict=True)]


def small_weights(config: Config, layout: Layout, limit: int) -> int:
    """Weights of a dense model in one stage that lie in parameters of at most `limit` elements on a rank."""
    sizes: dict[str, int] = {}
    times: dict[str, int] = {}
    for tensor, layers, copies in tensor_kinds(config):
        *prefix, module, kind = tensor.name.split(".")
        parameter = ".".join((*prefix, _IN_ONE_PARAMETER.get(module, module), kind))
        sizes[parameter] = sizes.get(parameter, 0) + math.prod(local_shape(tensor, config, layout))
        times[parameter] = copies * (len(layers) or 1)
    return sum(size * times[parameter] for parameter, size in sizes.items() if size <= limit)
