"""A small checkpoint of two ranks, written through the public functions."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recipes.checkpoint.format import Box, shard_name, write_shard
from recipes.checkpoint.manifest import ShardRecord
from recipes.checkpoint.rotate import begin, commit

Save = Callable[..., Path]


def tensors(step: int) -> dict[str, torch.Tensor]:
    """The logical parameters at a step: values tell steps apart."""
    return {
        "embedding.weight": torch.arange(24.0).view(6, 4) + 1000 * step,
        "norm.weight": torch.full((4,), float(step)),
    }


def write_rank(partial: Path, rank: int, step: int) -> list[ShardRecord]:
    """All files of one of two ranks: half the matrix each, the vector on rank 0, moments likewise, a generator."""
    boxes = []
    for name, tensor in tensors(step).items():
        if tensor.ndim == 2:
            boxes.append(Box(name, (6, 4), (3 * rank, 0), tensor[3 * rank : 3 * rank + 3]))
        elif rank == 0:
            boxes.append(Box.whole(name, tensor))
    moments = [
        Box(f"{state}/{box.name}", box.global_shape, box.offsets, box.tensor * factor)
        for state, factor in (("exp_avg", 0.5), ("exp_avg_sq", 0.25))
        for box in boxes
    ]
    generator = [Box.whole(f"rank_{rank:05d}/cpu", torch.arange(16, dtype=torch.uint8))]
    return [
        write_shard(partial, shard_name(kind, rank, 2), kind, of_kind)
        for kind, of_kind in (("model", boxes), ("optimizer", moments), ("rng", generator))
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """RUN/checkpoints, not made yet."""
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def save(root: Path) -> Save:
    """save(step) writes and commits a checkpoint below `root`."""

    def save(step: int, **trainer: object) -> Path:
        partial = begin(root, step)
        records = write_rank(partial, 0, step) + write_rank(partial, 1, step)
        return commit(partial, records, {"step": step, **trainer})

    return save
