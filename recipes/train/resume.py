"""What a run may not change when it goes on from a checkpoint."""

from __future__ import annotations

from typing import Any

from recipes.checkpoint.format import Checkpoint
from recipes.config import Config, to_plain

# Other values would mean another model, other samples, or another meaning of "step".
_FIXED = ("run.seed", "train.global_batch_size", "train.precision", "data.domain_weights", "optimizer.name")
# How a model is computed is no part of it.
_FREE = ("transformer_impl", "recompute_granularity", "recompute_modules")
# Other values would make the learning rate jump.
_SCHEDULE = ("train.steps", "optimizer.lr", "optimizer.min_lr", "schedule")


def check_resumable(config: Config, checkpoint: Checkpoint) -> None:
    """Raise one ValueError naming every setting that differs from the checkpoint's and must not."""
    old, new = checkpoint.trainer["config"], to_plain(config)
    model = [f"model.{key}" for key in new["model"] if key not in _FREE]
    model += [f"moe.{key}" for key in new["moe"] if key != "backend"]  # both backends are the same model
    problems = _differences(old, new, [*model, *_FIXED], "keep the value of the checkpoint, or start a new run")
    changed = [] if config.schedule.lr_decay_steps is not None else ["train.steps"]
    keys = [*changed, *_SCHEDULE[1:]]
    if not config.checkpoint.override_schedule:
        problems += _differences(
            old, new, keys, "keep it, or set checkpoint.override_schedule=true to follow the new one"
        )
    if problems:
        raise ValueError(f"{checkpoint.path} cannot be resumed with these settings:\n  " + "\n  ".join(problems))


def _differences(old: dict[str, Any], new: dict[str, Any], keys: list[str], way_out: str) -> list[str]:
    def value(config: Any, key: str) -> Any:
        for part in key.split("."):
            config = config.get(part) if isinstance(config, dict) else None
        return config

    return [
        f"{key}={value(new, key)} but the checkpoint has {value(old, key)}; {way_out}"
        for key in keys
        if value(old, key) != value(new, key)
    ]
