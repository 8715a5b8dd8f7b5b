"""Averages of checkpoints over logical tensors, without engine or process group.

    checkpoints of branches + weights -> Average, which reads like a checkpoint -> load_weights, or write -> a checkpoint

Nothing is held but the tensor that is asked for. Sums are fp64, what is read is fp32; moments are averaged like weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from recipes.checkpoint.format import Box, Checkpoint, shard_name, write_shard
from recipes.checkpoint.manifest import Dims
from recipes.checkpoint.rotate import begin, commit

Tensors = dict[str, tuple[Dims, torch.dtype]]
_SHARD_BYTES = 1 << 30  # of one file, and so the memory that writing takes


class Source(Protocol):
    """What is read like a `Checkpoint`."""

    @property
    def trainer(self) -> dict[str, Any]: ...

    def kinds(self) -> list[str]: ...

    def tensors(self, kind: str) -> Tensors: ...

    def read(self, kind: str, name: str, offsets: Dims | None = None, shape: Dims | None = None) -> torch.Tensor: ...


def check_alike(members: Mapping[str, Checkpoint]) -> None:
    """Raise ValueError naming the first branch whose tokenizer, vocabulary or tensors are not those of the first one."""
    (first, reference), *others = members.items()
    for name, member in others:
        sizes = [m.trainer["config"]["model"]["vocab_size"] for m in (reference, member)]
        tokenizers = [str(m.trainer.get("tokenizer")) for m in (reference, member)]
        if sizes[0] != sizes[1]:
            what = f"has a vocabulary of {sizes[1]} ids, {first} of {sizes[0]}"
        elif tokenizers[0] != tokenizers[1]:
            what = f"was trained with tokenizer {tokenizers[1][:12]}, {first} with {tokenizers[0][:12]}"
        elif different := sorted(set(member.tensors("model").items()) ^ set(reference.tensors("model").items())):
            tensor = different[0][0]
            shapes = [m.tensors("model").get(tensor, ("none at all",))[0] for m in (member, reference)]
            what = f"has {tensor} of shape {shapes[0]}, {first} of {shapes[1]}"
        else:
            continue
        raise ValueError(f"branch {name} ({member.path}) {what}; branches must be of one model and one tokenizer")


class Average:
    """The weighted average of branches. `weights` by name, those that are missing being 0; they are normalised.

    Raises ValueError for names that are no members, weights that sum to nothing, and members that differ in kind.
    """

    def __init__(self, members: Mapping[str, Checkpoint], weights: Mapping[str, float]):
        if unknown := sorted(weights.keys() - members.keys()):
            raise ValueError(f"{unknown[0]}: no such branch; there are {', '.join(members)}")
        total = sum(weights.values())
        if not total > 0 or min(weights.values()) < 0:
            raise ValueError(f"weights {dict(weights)}: must be at least 0, and one of them above 0")
        check_alike(members)
        self.members = dict(members)
        self.weights = {name: weights.get(name, 0.0) / total for name in members}
        self.path = Path("average of " + ", ".join(f"{weight:.3g} {name}" for name, weight in self.weights.items()))

    @property
    def _first(self) -> Checkpoint:
        return next(iter(self.members.values()))

    @property
    def trainer(self) -> dict[str, Any]:
        """That of the first branch, without its history."""
        return fresh_trainer(self._first.trainer)

    def kinds(self) -> list[str]:
        return self._first.kinds()

    def require(self, *kinds: str) -> None:
        for member in self.members.values():
            member.require(*kinds)

    def tensors(self, kind: str) -> Tensors:
        return self._first.tensors(kind)

    def read(self, kind: str, name: str, offsets: Dims | None = None, shape: Dims | None = None) -> torch.Tensor:
        """The average of one tensor or of a part of it; generators are the first branch's."""
        if kind == "rng":
            return self._first.read(kind, name, offsets, shape)
        total = torch.zeros((), dtype=torch.float64)
        for branch, weight in self.weights.items():
            if weight:
                total = total + weight * self.members[branch].read(kind, name, offsets, shape).double()
        return total.float()


def fresh_trainer(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer state of a checkpoint that no run has written: nothing is known of spikes, experts' load or W&B runs."""
    guard = {"accepted": [], "skipped": 0, "in_a_row": 0}
    return {**trainer, "guard": guard, "moe": None, "wandb_run_id": None}


def uniform(names: Mapping[str, Any]) -> dict[str, float]:
    """Equal weights."""
    return dict.fromkeys(names, 1 / len(names))


def write(source: Source, folder: Path, step: int, trainer: Mapping[str, Any], kinds: list[str] | None = None) -> Path:
    """Write `source` as checkpoint `step` below `folder`; returns the new step folder.

    `kinds` of tensors (default: all that it has). At most a gigabyte is held at a time.
    """
    partial = begin(folder, step)
    records = []
    for kind in source.kinds() if kinds is None else kinds:
        groups = list(_groups(source.tensors(kind)))
        for index, names in enumerate(groups):
            boxes = [Box.whole(name, source.read(kind, name)) for name in names]
            records.append(write_shard(partial, shard_name(kind, index, len(groups)), kind, boxes))
    return commit(partial, records, {**trainer, "step": step})


def _groups(tensors: Tensors) -> Iterator[list[str]]:
    """Names of tensors that go into one file."""
    names: list[str] = []
    size = 0
    for name, (shape, dtype) in tensors.items():
        more = torch.Size(shape).numel() * dtype.itemsize
        if names and size + more > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += more
    if names:
        yield names
