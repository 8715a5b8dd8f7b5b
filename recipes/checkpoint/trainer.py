"""What trainer.json must hold: one schema for all that read it, checked against the tensors beside it before anything is built.

Checkpoint -> check_trainer -> Config, whose model has exactly the tensors of the checkpoint
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from recipes.checkpoint.format import MODEL, OPTIMIZER, TRAINER, Checkpoint
from recipes.config import Config
from recipes.description import check_description, read_record
from recipes.logical import expert_counts, logical_tensors, padded_vocab_size
from recipes.validation import check_stored

_MAX_COUNT = 2**53  # of steps, samples, tokens: below it counts are exact as numbers of any type
_MAX_PADDING = 1 << 14  # rows of the embedding that no file holds, of a small vocabulary
_MOMENTS = ("exp_avg/", "exp_avg_sq/")
_NOT_IN_RUN_IDS = set("/\\#?%:")  # W&B refuses them


@dataclass(frozen=True)
class GuardState:
    """Of `train.guard.SpikeGuard`: gradient norms of the last accepted steps, skipped steps in all and up to now in a row."""

    accepted: list[float]
    skipped: int
    in_a_row: int


@dataclass(frozen=True)
class MoeState:
    """Of `moe.context.MoeContext`, by layer and expert: tokens of the step before, biases of the choice."""

    previous_counts: list[list[int]]
    bias: list[list[float]]
    steps: int


@dataclass(frozen=True)
class TrainerState:
    """The keys that every trainer.json has, without its config. Others are passed over."""

    step: int
    consumed_samples: int
    applied_steps: int
    world_size: int
    guard: GuardState
    moe: MoeState | None
    wandb_run_id: str | None
    tokenizer: str
    tensor_parallel_size: int = 1


def check_trainer(checkpoint: Checkpoint) -> Config:
    """The description stored in a checkpoint. Raises ValueError naming the file when its trainer.json does not have the schema,
    is of another step, or describes another model than the one whose tensors are there."""
    where = checkpoint.path / TRAINER
    try:
        state = read_record(TrainerState, checkpoint.trainer)
        _check_ranges(state, checkpoint.step)
        config = _config(checkpoint, state.world_size)
        _check_experts(state.moe, config)
    except ValueError as error:
        text = str(error)
        shown = text if text.startswith(str(checkpoint.path)) else f"{where}: {text}"
        raise ValueError(f"{shown}; it is damaged, or of another version: take another step") from error
    return config


def _check_ranges(state: TrainerState, step: int) -> None:
    if state.step != step:
        raise ValueError(f"step={state.step}, but the manifest is of step {step}")
    guard = state.guard
    counts = {"consumed_samples": state.consumed_samples, "applied_steps": state.applied_steps, "step": step}
    counts |= {"guard.skipped": guard.skipped, "guard.in_a_row": guard.in_a_row}
    counts |= {"moe.steps": state.moe.steps} if state.moe else {}
    sizes = {"world_size": state.world_size, "tensor_parallel_size": state.tensor_parallel_size}
    for low, values in ((0, counts), (1, sizes)):
        for key, value in values.items():
            if not low <= value < _MAX_COUNT:
                raise ValueError(f"{key}={value} must be at least {low} and below 2^53")
    if min(guard.accepted, default=0) < 0:
        raise ValueError(f"guard.accepted={min(guard.accepted)}: norms are at least 0")
    run_id = state.wandb_run_id
    if run_id is not None and not (
        0 < len(run_id) <= 128 and run_id.isprintable() and not _NOT_IN_RUN_IDS & set(run_id)
    ):
        raise ValueError(f"wandb_run_id={run_id!r:.80} is no id of a W&B run")


def _config(checkpoint: Checkpoint, world_size: int) -> Config:
    """The description, after bounds by what the files hold, so that neither checking nor building it takes more."""
    plain, stored = checkpoint.trainer.get("config"), checkpoint.tensors(MODEL)
    config = check_description(plain)
    model, experts = config.model, config.moe.num_moe_experts_per_layer or [config.moe.num_moe_experts or 0]
    if model.vocab_size is None or max(model.num_layers, *experts) > len(stored):
        sizes = f"vocab_size={model.vocab_size}, num_layers={model.num_layers}, up to {max(experts)} experts"
        raise ValueError(f"config: {sizes} cannot be those of a model of {len(stored)} tensors")
    check_stored(config, world_size)
    if sum(expert_counts(config).values()) > len(stored):
        raise ValueError(f"config: more experts than the model has tensors, {len(stored)}")
    described = {tensor.name: (tensor.shape, torch.float32) for tensor in logical_tensors(config).values()}
    _check_alike(checkpoint, stored, described)
    if OPTIMIZER in checkpoint.kinds():
        moments = {f"{moment}{name}": value for name, value in described.items() for moment in _MOMENTS}
        _check_alike(checkpoint, checkpoint.tensors(OPTIMIZER), moments)
    padding = padded_vocab_size(model, 1) - model.vocab_size
    if padding > max(model.vocab_size, _MAX_PADDING):
        divisor = f"make_vocab_size_divisible_by={model.make_vocab_size_divisible_by}"
        raise ValueError(f"config: model.{divisor} pads the vocabulary of {model.vocab_size} by {padding} rows")
    return config


def _check_alike(checkpoint: Checkpoint, stored: dict[str, Any], described: dict[str, Any]) -> None:
    if different := sorted(stored.items() ^ described.items(), key=str):
        name = different[0][0]
        shapes = f"{stored.get(name, 'absent')}, its config says {described.get(name, 'absent')}"
        raise ValueError(f"{checkpoint.path}: tensor {name!r:.200} is {shapes}")


def _check_experts(moe: MoeState | None, config: Config) -> None:
    if moe is None:  # of a dense model, and of one that was put together and has seen no token
        return
    expected = list(expert_counts(config).values())
    for name, rows, low, high in (
        ("previous_counts", moe.previous_counts, 0, _MAX_COUNT),
        ("bias", moe.bias, -1e38, 1e38),
    ):
        if (found := [len(row) for row in rows]) != expected:
            raise ValueError(f"moe.{name} of {found} experts by layer, its config says {expected}")
        if wrong := [value for row in rows for value in row if not low <= value <= high]:
            raise ValueError(f"moe.{name}: {wrong[0]} must be from {low:g} to {high:g}")
