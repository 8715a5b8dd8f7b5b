"""Which ranks hold which part of each logical tensor, and which of them writes it to a checkpoint.

    description, layout -> held_boxes -> owners -> digest, compared by the ranks

Every rank works these tables out for itself, so they may depend on nothing else: not on what a rank happens to hold, such as rows
of the vocabulary that are padding on some ranks only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from recipes.config import Config
from recipes.logical import Shard, divided_axis, expert_counts, logical_tensors, padded_vocab_size, stage_layers
from recipes.topology import Layout, Role

Dims = tuple[int, ...]
Owners = Mapping[tuple[str, Dims], int]  # rank by the name of a tensor and the offsets of a box of it


@dataclass(frozen=True)
class HeldBox:
    """The elements [offsets, offsets + shape) of a logical tensor, and the ranks that hold them, ascending."""

    name: str
    offsets: Dims
    shape: Dims
    ranks: tuple[int, ...]


def tensor_stages(config: Config, stages: int) -> dict[str, tuple[int, ...]]:
    """The pipeline stages, of `stages`, that hold each logical tensor: a tied embedding is also copied to the last one."""
    stage_of = {layer: stage for stage, layers in enumerate(stage_layers(config, stages)) for layer in layers}
    last, tied = stages - 1, config.model.share_embeddings_and_output_weights
    found: dict[str, tuple[int, ...]] = {}
    for name in logical_tensors(config):
        module, number, *_ = name.split(".")
        if module == "layers":
            found[name] = (stage_of[int(number)],)
        elif module == "embedding":
            found[name] = (0, last) if tied and last else (0,)
        else:
            found[name] = (last,)
    return found


def held_boxes(config: Config, layout: Layout) -> list[HeldBox]:
    """Every box of every logical tensor, in the order of the model. Those of a tensor tile it."""
    places = [{role: layout.index(role, rank) for role in Role} for rank in range(layout.world_size)]

    @functools.cache
    def at(stages: tuple[int, ...], **where: int) -> tuple[int, ...]:
        wanted = {Role[role]: place for role, place in where.items()}
        return tuple(
            rank
            for rank, place in enumerate(places)
            if place[Role.pp] in stages and all(place[role] == index for role, index in wanted.items())
        )

    counts, stages = expert_counts(config), tensor_stages(config, layout.pipeline_parallel_size)
    rows = padded_vocab_size(config.model, layout.tensor_parallel_size)
    found = []
    for name, tensor in logical_tensors(config).items():
        words, where = name.split("."), {}
        if ".moe.experts." in name:
            where["ep"] = int(words[4]) * layout.expert_parallel_size // counts[int(words[1])]
        role = Role.etp if ".moe." in name else Role.tp
        count = layout.size(role) if divided_axis(name) is not None else 1
        for index in range(count):
            offsets, shape = Shard(index, count).box(tensor, rows if words[0] in ("embedding", "head") else None)
            if math.prod(shape):
                ranks = at(stages[name], **where, **({role.name: index} if count > 1 else {}))
                found.append(HeldBox(name, offsets, shape, ranks))
    return found


def owners(config: Config, layout: Layout) -> Owners:
    """The rank that writes each box: of those that hold it the one that has the fewest elements to write so far."""
    load = [0] * layout.world_size
    found = {}
    for box in held_boxes(config, layout):
        owner = min(box.ranks, key=load.__getitem__)
        load[owner] += math.prod(box.shape)
        found[box.name, box.offsets] = owner
    return found


def digest(table: Owners) -> str:
    """SHA-256 of such a table."""
    return hashlib.sha256(json.dumps(list(table.items())).encode()).hexdigest()
