"""Small layers of experts with given weights, to compare with the oracle. Only `build` imports DeepSpeed."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from recipes.config import Config
from recipes.logical import Piece, Place, Shard, block_pieces, logical_tensors
from recipes.topology import Layout, Role
from tests.tiny import tiny_moe_config

if TYPE_CHECKING:
    from recipes.moe.layer import MoeLayer

_PREFIX = re.compile(r"layers\.\d+\.moe\.")


def layer_config(sequence: int = 4, batch: int = 3, **changes: Any) -> Config:
    """Hidden 8, experts 6 wide, top-2 of 4; a step is one micro-batch of `batch` sequences."""
    sizes = {"model__hidden_size": 8, "model__seq_length": sequence, "moe__moe_ffn_hidden_size": 6}
    steps = {"train__global_batch_size": batch, "train__micro_batch_size": batch}
    return tiny_moe_config(**{**sizes, **steps, **changes})


def random_weights(config: Config, seed: int = 0, layer: int = 0) -> dict[str, torch.Tensor]:
    """float64 weights of a layer by short name, of deviation 0.5."""
    generator = torch.Generator().manual_seed(seed)
    return {
        _short(name): 0.5 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in logical_tensors(config).items()
        if name.startswith(f"layers.{layer}.moe.")
    }


def build(config: Config, weights: dict[str, torch.Tensor], layout: Layout | None = None, number: int = 0) -> MoeLayer:
    """The layer of that number with the given weights in fp32, on the device of this rank; its context is `layer.context`."""
    from recipes.groups import enter
    from recipes.moe.context import MoeContext
    from recipes.moe.layer import MoeLayer

    context = MoeContext(config, enter(layout or Layout(1)))
    layer = MoeLayer(SimpleNamespace(params_dtype=torch.float32), config, context, number)
    with torch.no_grad():
        for name, parameter, piece in pieces(layer, config):
            piece.write(parameter, weights[name].float())
    return layer.to(context.report.device)


def pieces(layer: MoeLayer, config: Config) -> list[tuple[str, torch.nn.Parameter, Piece]]:
    """(short name, parameter, piece) of all weights that this rank holds."""
    groups = layer.context.groups
    place = Place(experts=Shard(groups.index(Role.ep), groups.size(Role.ep)))
    return [
        (_short(piece.name), parameter, piece)
        for name, parameter in layer.named_parameters()
        for piece in block_pieces(config, layer.layer, f"mlp.{name}", tuple(parameter.shape), place)
    ]


def gradients(layer: MoeLayer, config: Config) -> dict[str, torch.Tensor]:
    """The gradient of each weight by short name, on the CPU; a missing one is an error."""
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
    return {name: piece.read(parameter.grad).clone().cpu() for name, parameter, piece in pieces(layer, config)}


def _short(name: str) -> str:
    return _PREFIX.sub("", name, count=1).removesuffix(".weight")
