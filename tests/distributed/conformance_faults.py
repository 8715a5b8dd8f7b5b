"""Faults that the conformance tests put into every rank before it builds a model. Each is a mistake that leaves losses as they are,
or nearly so."""

from __future__ import annotations

import time
from typing import Any

import torch

from recipes.config import Config
from recipes.engine import Engine
from recipes.logical import LocalParameter, Piece
from recipes.model import gpt
from recipes.model.gpt import GPT
from recipes.moe.context import MoeContext
from recipes.moe.layer import MoeLayer
from recipes.topology import Role

EXPERT = "layers.1.moe.experts.5"
NORM = "layers.0.attention_norm.weight"


def _after(owner: type, name: str, act: Any) -> None:
    """Call `act(self, *arguments)` after each call of a method."""
    original = getattr(owner, name)

    def method(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        act(self, *arguments)

    setattr(owner, name, method)


def _pieces(entries: list[LocalParameter], prefix: str) -> list[tuple[LocalParameter, Piece]]:
    return [(entry, piece) for entry in entries for piece in entry.pieces if piece.name.startswith(prefix)]


def expert_gradient_twice(rank: int) -> None:
    """The gradient of one expert's second matrix counts twice."""

    def doubled(grad: torch.Tensor, piece: Piece) -> torch.Tensor:
        grad = grad.clone()
        piece.window(grad).mul_(2)
        return grad

    original = Engine.__init__

    def method(self: Engine, model: GPT, entries: list[LocalParameter], *more: Any) -> None:
        for entry, piece in _pieces(entries, f"{EXPERT}.down"):
            entry.parameter.register_hook(lambda grad, piece=piece: doubled(grad, piece))
        original(self, model, entries, *more)

    Engine.__init__ = method  # type: ignore[method-assign]


def router_not_summed(rank: int) -> None:
    """Each tensor-parallel rank keeps the part of the routers' gradient that comes from its own tokens."""

    def forget(layer: MoeLayer, *_: Any) -> None:
        layer.routed.router_weight.sequence_parallel = False

    _after(MoeLayer, "__init__", forget)


def norm_not_summed(rank: int) -> None:
    """The same for the weight of one norm under sequence parallelism."""
    from recipes import partial

    original = partial.add_up

    def add_up(model: GPT, *more: Any) -> None:
        model.blocks[0].inner.input_layernorm.weight.sequence_parallel = False  # type: ignore[union-attr, operator]
        original(model, *more)

    partial.add_up = add_up  # type: ignore[assignment]


def expert_left_out_of_norm(rank: int) -> None:
    """The gradient norm (without ZeRO's partitions) misses one expert."""
    original = Engine._gradient_parts

    def parts(self: Engine) -> list[tuple[int, list[torch.Tensor]]]:
        absent = _pieces(self.parameters, EXPERT)
        addresses = {self._own_gradient(entry.parameter).data_ptr() for entry, _ in absent}
        found = []
        for copies, tensors in original(self):
            kept = [tensor.clone() if tensor.data_ptr() in addresses else tensor for tensor in tensors]
            for tensor, copy in zip(tensors, kept, strict=True):
                for entry, piece in absent:
                    if self._own_gradient(entry.parameter).data_ptr() == tensor.data_ptr():
                        piece.window(copy).zero_()
            found.append((copies, kept))
        return found

    Engine._gradient_parts = parts  # type: ignore[method-assign]


def balance_per_shard(rank: int) -> None:
    """The balance loss is the mean of those that ranks compute each from the counts of its own tokens."""

    def as_if_all_were_alike(self: MoeContext, counts_E: torch.Tensor) -> torch.Tensor:
        return counts_E * (self.groups.layout.world_size // self.copies)

    MoeContext._sum_over_tokens = as_if_all_were_alike  # type: ignore[method-assign]


def replica_perturbed(rank: int) -> None:
    """The last rank's copy of one matrix is larger by a thousandth."""

    def perturb(engine: Engine, *_: Any) -> None:
        if rank == engine.layout.world_size - 1:
            for entry, piece in _pieces(engine.parameters, "layers.0.attention.q.weight"):
                piece.window(entry.parameter.data).mul_(1.001)

    _after(Engine, "__init__", perturb)


def stage_offset_off_by_one(rank: int) -> None:
    """The last pipeline stage takes its layers for those one before."""
    original = gpt.stage_layers

    def shifted(config: Config, stages: int) -> list[list[int]]:
        *others, last = original(config, stages)
        return [*others, [layer - (stages > 1) for layer in last]]

    gpt.stage_layers = shifted


def balance_twice_on_last_stage(rank: int) -> None:
    """The balance loss of the last pipeline stage's layers counts twice."""
    original = MoeContext._balance

    def doubled(self: MoeContext, *arguments: Any) -> torch.Tensor:
        last = self.groups.index(Role.pp) == self.groups.size(Role.pp) - 1
        return original(self, *arguments) * (1 + last)

    MoeContext._balance = doubled  # type: ignore[method-assign]


def tied_copies_not_summed(rank: int) -> None:
    """The first and the last pipeline stage keep the part of the tied embedding's gradient that comes from themselves."""
    from recipes.engine.pipeline import PipelineEngine

    PipelineEngine._tied_gradients = lambda self: []  # type: ignore[method-assign]


def stage_one_raises_and_stage_two_hangs(rank: int) -> None:
    """Rank 1 raises with ZeRO-1, and never gets anywhere with ZeRO-2."""
    original = GPT.__init__

    def method(self: GPT, config: Any, *more: Any) -> None:
        if rank == 1 and config.zero.stage == 1:
            raise ZeroDivisionError("planted fault")
        if rank == 1 and config.zero.stage == 2:
            time.sleep(3600)
        original(self, config, *more)

    GPT.__init__ = method  # type: ignore[method-assign]
