"""From a live engine to a canonical checkpoint: ranks join fragments tensor by tensor and share the writing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recipes import collectives
from recipes.checkpoint.format import Box, shard_name, write_shard
from recipes.checkpoint.manifest import ShardRecord
from recipes.checkpoint.rng import rng_state
from recipes.checkpoint.rotate import begin, commit, rotate
from recipes.engine import Engine
from recipes.logical import Piece


class CheckpointError(RuntimeError):
    """The checkpoint could not be written; those before it are intact."""


def save(
    directory: Path,
    step: int,
    engine: Engine,
    trainer: dict[str, Any],
    keep: int | None,
    protect: list[Path],
    rng: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write step `step` below `directory`, and keep the newest `keep` (None: all) (a collective). Returns the new folder.

    `rng`: the generators' states after the step; None: as they are now.

    Raises CheckpointError on every rank when any rank could not write.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    partial = Path(_on_rank_zero(lambda: str(begin(directory, step))))
    records, problem = [], None
    boxes = _owned_boxes(engine, rank, world_size)
    boxes["rng"] = [Box.whole(f"rank{rank}/{name}", tensor) for name, tensor in (rng or rng_state()).items()]
    try:
        for kind, members in boxes.items():
            if members:
                records.append(write_shard(partial, shard_name(kind, rank, world_size), kind, members).to_dict())
    except (OSError, ValueError) as error:
        problem = f"rank {rank}: {error}"
    reports = collectives.gather_json({"records": records, "problem": problem})
    problems = [report["problem"] for report in reports if report["problem"]]
    if problems:
        raise CheckpointError(f"{problems[0]}; the checkpoints before step {step} are intact")

    def finish() -> str:
        return str(
            commit(partial, [ShardRecord.from_dict(r) for report in reports for r in report["records"]], trainer)
        )

    folder = Path(_on_rank_zero(finish))
    if keep is not None:
        _on_rank_zero(lambda: len(rotate(directory, keep, protect)))
    return folder


def _on_rank_zero(action: Any) -> Any:
    """The result of `action` on rank 0, on all ranks; what it refuses or fails at is a CheckpointError everywhere."""
    outcome = None
    if dist.get_rank() == 0:
        try:
            outcome = {"result": action()}
        except (OSError, ValueError) as error:
            outcome = {"problem": f"rank 0: {error}; the checkpoints before are intact"}
    outcome = collectives.broadcast_json(outcome)
    if "problem" in outcome:
        raise CheckpointError(outcome["problem"])
    return outcome["result"]


def _owned_boxes(engine: Engine, rank: int, world_size: int) -> dict[str, list[Box]]:
    """The boxes that this rank writes. Ranks with the same parameter join it, and the least loaded of them keeps it."""
    boxes: dict[str, list[Box]] = {"model": [], "optimizer": []}
    load = [0] * world_size
    for entry in engine.parameters:
        mine = False
        for replicas in engine.replica_groups(entry):  # every rank works out all owners, so that all agree
            owner = min(replicas, key=lambda member: load[member])
            load[owner] += entry.numel
            mine |= owner == rank
        states = engine.joined_state(entry)
        if not mine:
            continue
        for piece in entry.pieces:
            for name, state in states.items():
                kind, key = ("model", piece.name) if name == "master" else ("optimizer", f"{name}/{piece.name}")
                boxes[kind].append(_box(key, piece, state))
    return boxes


def _box(name: str, piece: Piece, state: torch.Tensor) -> Box:
    """In host memory, so that the boxes of a rank never lie on its device together."""
    return Box(name, piece.global_shape, piece.offsets, piece.read(state).float().cpu())
