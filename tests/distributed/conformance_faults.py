"""Faults that the conformance tests put into every rank before it builds a model. Each is a mistake that leaves losses as they are,
or nearly so."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch

from recipes import placement
from recipes.checkpoint import save as saving
from recipes.checkpoint.format import Box, Checkpoint
from recipes.config import Config
from recipes.engine import Engine
from recipes.logical import LocalParameter, Piece
from recipes.model import gpt
from recipes.model.gpt import GPT
from recipes.moe.context import MoeContext
from recipes.moe.layer import MoeLayer
from recipes.topology import Layout, Role

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
    gpt.check_complete = lambda *_: None  # which would refuse to build it


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


def owner_by_true_elements(rank: int) -> None:
    """Which rank writes what is worked out from the true elements that this rank holds, of which padded ones have fewer."""

    def alone(config: Config, layout: Layout) -> placement.Owners:
        held = placement.held_boxes(config, layout)
        mine = {box.name: math.prod(box.shape) for box in held if rank in box.ranks}
        load, found = [0] * layout.world_size, {}
        for box in held:
            owner = min(box.ranks, key=load.__getitem__)
            load[owner] += mine.get(box.name, 0)
            found[box.name, box.offsets] = owner
        return found

    saving.owners = alone


def owner_by_true_elements_unnoticed(rank: int) -> None:
    """The same, and the ranks do not compare their tables."""
    owner_by_true_elements(rank)
    saving.digest = lambda table: ""


def _before_writing(change: Any) -> None:
    """Let `change` have the boxes of each shard before they are written."""
    original = saving.write_shard
    saving.write_shard = lambda folder, file, kind, boxes: original(folder, file, kind, change(list(boxes)))


def moment_lost(rank: int) -> None:
    """A moment of one matrix is stored as zeros."""

    def lost(boxes: list[Box]) -> list[Box]:
        name = "exp_avg_sq/layers.0.attention.out.weight"
        return [replace(box, tensor=torch.zeros_like(box.tensor)) if box.name == name else box for box in boxes]

    _before_writing(lost)


def boxes_swapped(rank: int) -> None:
    """Two matrices of one shape are stored under each other's names."""

    def swapped(boxes: list[Box]) -> list[Box]:
        names = {f"{EXPERT}.gate.weight": f"{EXPERT}.up.weight", f"{EXPERT}.up.weight": f"{EXPERT}.gate.weight"}
        return [replace(box, name=names.get(box.name, box.name)) for box in boxes]

    _before_writing(swapped)


def moment_not_loaded(rank: int) -> None:
    """Loading leaves one moment as it was."""
    original = Engine.load_state

    def forgetful(self: Engine, entry: LocalParameter, states: dict[str, torch.Tensor]) -> None:
        original(self, entry, states | {"exp_avg": torch.zeros_like(states["exp_avg"])})

    Engine.load_state = forgetful  # type: ignore[method-assign]


def part_of_another_rank_loaded(rank: int) -> None:
    """Each of two ranks loads the other's half of a divided matrix."""
    original = Checkpoint.read

    def read(self: Checkpoint, kind: str, name: str, offsets: Any = None, shape: Any = None) -> torch.Tensor:
        if name == "layers.0.attention.q.weight" and offsets is not None and shape[0] < self.tensors(kind)[name][0][0]:
            offsets = (shape[0] - offsets[0], *offsets[1:])
        return original(self, kind, name, offsets, shape)

    Checkpoint.read = read  # type: ignore[method-assign]


def steps_not_loaded(rank: int) -> None:
    """The number of updates, which corrects the bias of the moments, is not restored."""
    Engine.set_applied_steps = lambda self, steps: None  # type: ignore[method-assign]
