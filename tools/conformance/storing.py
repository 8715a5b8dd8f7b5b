"""Does a layout's checkpoint hold what its ranks hold, and does another layout's become the same here?

after training: save -> compare;  in a fresh engine: load what the layout before has saved -> compare

Each rank compares its part of every master, moment and weight with the whole tensors of the files, bit by bit. So a state has the
same files in every layout, and each is loaded in the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from recipes.checkpoint.format import Checkpoint, open_checkpoint
from recipes.checkpoint.load import load_engine
from recipes.checkpoint.save import CheckpointError, save
from recipes.config import to_plain
from recipes.engine import Engine
from recipes.train.guard import SpikeGuard
from tools.conformance.compare import NOTHING, Shelf, Worst, difference


def put(engine: Engine, guard: SpikeGuard, shelf: Shelf) -> tuple[Path | None, Worst]:
    """Save what has been trained (a collective); returns the checkpoint and how far it is from what this rank holds.

    When nothing could be saved, which all ranks hear alike, there is none, and the reason stands in place of a tensor.
    """
    config, layout, moe = engine.model.config, engine.layout, engine.model.moe
    trainer = {
        "step": shelf.step,
        "consumed_samples": shelf.step * config.train.global_batch_size,
        "applied_steps": engine.applied_steps,
        "world_size": layout.world_size,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "guard": guard.state(),
        "moe": None if moe is None else moe.state(),
        "wandb_run_id": None,
        "tokenizer": "",
        "config": to_plain(config),
    }
    protect = [] if shelf.previous is None else [shelf.previous]
    try:
        path = save(shelf.folder, shelf.step, engine, trainer, keep=1, protect=protect)
    except CheckpointError as error:
        return None, Worst(math.inf, str(error))
    return path, stored_error(engine, open_checkpoint(path))


def take(engine: Engine, path: Path) -> Worst:
    """Load a checkpoint into a fresh engine (a collective); how far it is from what this rank then holds."""
    checkpoint = open_checkpoint(path)
    if engine.model.moe is not None:
        engine.model.moe.load(checkpoint.trainer["moe"])
    load_engine(checkpoint, engine)
    return stored_error(engine, checkpoint)


def stored_error(engine: Engine, checkpoint: Checkpoint) -> Worst:
    """The largest difference between a checkpoint and this rank's part of it (a collective): 0 if all bits are the same."""
    worst, whole = NOTHING, dict[tuple[str, str], torch.Tensor]()
    for kind, name, box, value in _held(engine):
        if (kind, name) not in whole:
            whole[kind, name] = checkpoint.read(kind, name)
        stored = whole[kind, name][box].to(value.dtype)
        worst = worst.or_worse(difference(value.float().numpy(), stored.float().numpy()), name)
    worst = worst.or_worse(float(checkpoint.trainer["applied_steps"] != engine.applied_steps), "applied_steps")
    moe = engine.model.moe
    if moe is not None:
        worst = worst.or_worse(float(checkpoint.trainer["moe"] != moe.state()), "moe")
    return worst


def _held(engine: Engine) -> Iterator[tuple[str, str, tuple[slice, ...], torch.Tensor]]:
    """Kind and name in a checkpoint, place in the tensor, and value, of all that this rank holds."""
    for entry in engine.parameters:
        states = engine.joined_state(entry)
        for piece in entry.pieces:
            for state, whole in states.items():
                kind, name = ("model", piece.name) if state == "master" else ("optimizer", f"{state}/{piece.name}")
                yield kind, name, piece.box, piece.read(whole)
    for piece, weight in engine.weights():
        yield "model", piece.name, piece.box, weight
