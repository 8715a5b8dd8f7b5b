"""From a canonical checkpoint into a live engine or a bare model, under any layout."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from recipes.checkpoint.format import MODEL, OPTIMIZER, RNG, Checkpoint
from recipes.checkpoint.rng import set_rng_state
from recipes.engine import Engine
from recipes.engine.state import full_shape
from recipes.logical import LocalParameter


def load_engine(checkpoint: Checkpoint, engine: Engine) -> bool:
    """Restore masters, moments and generators; returns whether the generators fit this layout.

    Raises ValueError naming the file when a file is missing or damaged, before anything is changed.
    """
    names = engine.state_names()
    checkpoint.require(MODEL, *((OPTIMIZER,) if len(names) > 1 else ()), RNG)
    for entry in engine.parameters:
        engine.load_state(entry, {name: _assemble(checkpoint, entry, name) for name in names})
    engine.set_applied_steps(checkpoint.trainer["applied_steps"])
    written_by = checkpoint.trainer["world_size"], checkpoint.trainer.get("tensor_parallel_size", 1)
    if written_by != (engine.layout.world_size, engine.layout.tensor_parallel_size):
        return False
    prefix = f"rank{dist.get_rank()}/"
    mine = [name for name in checkpoint.tensors(RNG) if name.startswith(prefix)]
    try:
        set_rng_state({name.removeprefix(prefix): checkpoint.read(RNG, name) for name in mine})
    except (KeyError, TypeError, OverflowError, RuntimeError, ValueError) as error:
        few = f"the generators of rank {dist.get_rank()} are no state of theirs"
        raise ValueError(f"{checkpoint.path}: {few} ({error!r:.200}); take another step") from error
    return True


def load_master_weights(checkpoint: Checkpoint, engine: Engine) -> None:
    """Copy the weights alone into an engine that has made no step; needs no optimizer files."""
    checkpoint.require("model")
    for entry in engine.parameters:
        engine.load_state(entry, {"master": _assemble(checkpoint, entry, "master")})


@torch.no_grad()
def load_weights(checkpoint: Checkpoint, parameters: list[LocalParameter]) -> None:
    """Copy the weights alone into the parameters of a model; needs no optimizer files."""
    checkpoint.require(MODEL)
    for entry in parameters:
        entry.parameter.copy_(_assemble(checkpoint, entry, "master"))


def _assemble(checkpoint: Checkpoint, entry: LocalParameter, name: str) -> torch.Tensor:
    """One state of a local parameter, fp32, put together from its logical pieces (padding stays zero)."""
    parameter: nn.Parameter = entry.parameter
    whole = torch.zeros(full_shape(parameter), dtype=torch.float32)
    for piece in entry.pieces:
        kind, key = (MODEL, piece.name) if name == "master" else (OPTIMIZER, f"{name}/{piece.name}")
        shape, dtype = checkpoint.tensors(kind).get(key, ((), None))
        if (tuple(shape), dtype) != (piece.global_shape, torch.float32):
            found, needed = f"{dtype} of shape {tuple(shape)}", f"{torch.float32} of shape {piece.global_shape}"
            raise ValueError(
                f"{checkpoint.path}: {kind} tensor {key} is {found}, the model needs {needed}; "
                "use the model.* settings that the checkpoint was trained with"
            )
        piece.write(whole, checkpoint.read(kind, key, piece.offsets, piece.shape))
    return whole.to(parameter.device)
