"""From a live engine to a canonical checkpoint: ranks join fragments tensor by tensor and share the writing.

layout -> owners (equal on all ranks, or nothing is written) -> each rank's boxes -> shards -> nothing missing -> commit
"""

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
from recipes.logical import logical_tensors
from recipes.placement import Owners, digest, owners


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
    owner = owners(engine.model.config, engine.layout)
    if not collectives.same_on_all_ranks(digest(owner)):
        raise CheckpointError(
            "the ranks do not agree on which of them writes which part of the model; run the same version of this program "
            f"with the same settings on all of them; the checkpoints before step {step} are intact"
        )
    partial = Path(_on_rank_zero(lambda: str(begin(directory, step))))
    records, problem = [], None
    boxes = _owned_boxes(engine, owner)
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
        written = [ShardRecord.from_dict(record) for report in reports for record in report["records"]]
        _check_complete(written, engine)
        return str(commit(partial, written, trainer))

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


def _owned_boxes(engine: Engine, owner: Owners) -> dict[str, list[Box]]:
    """The boxes that this rank writes. Ranks with the same parameter join it, and the owner of each piece keeps it."""
    boxes: dict[str, list[Box]] = {"model": [], "optimizer": []}
    for entry in engine.parameters:
        states = engine.joined_state(entry)
        mine = [piece for piece in entry.pieces if owner[piece.name, piece.offsets] == dist.get_rank()]
        for piece in mine:
            for name, state in states.items():
                value = piece.read(state).float().cpu()  # boxes of a rank never lie on its device together
                if len(mine) < len(entry.pieces):  # a view would keep the whole joined parameter in memory
                    value = value.clone()
                kind, key = _stored_as(name, piece.name)
                boxes[kind].append(Box(key, piece.global_shape, piece.offsets, value))
    return boxes


def _check_complete(written: list[ShardRecord], engine: Engine) -> None:
    """Raise ValueError naming a tensor that no rank has written any part of; holes in a tensor are the manifest's affair."""
    found = {(record.file.kind, name) for record in written for name in record.tensors}
    for name in logical_tensors(engine.model.config):
        for kind, key in (_stored_as(state, name) for state in engine.state_names()):
            if (kind, key) not in found:
                raise ValueError(f"{kind} tensor {key!r} was written by no rank")


def _stored_as(state: str, name: str) -> tuple[str, str]:
    """Kind and key of the master, or a moment, of a logical tensor."""
    return ("model", name) if state == "master" else ("optimizer", f"{state}/{name}")
