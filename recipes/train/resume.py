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


def check_startable(config: Config, checkpoint: Checkpoint, tokenizer: str) -> None:
    """Raise one ValueError naming every reason why a new run cannot start from another run's checkpoint.

    `tokenizer`: fingerprint of the new run's data.
    """
    old, new = checkpoint.trainer["config"], to_plain(config)
    keys = [*_model_keys(new), "train.precision", "optimizer.name"]
    problems = _differences(old, new, keys, "use the value of the checkpoint")
    if (theirs := str(checkpoint.trainer.get("tokenizer"))) != tokenizer:
        problems.append(
            f"the data has tokenizer {tokenizer[:12]} but the checkpoint {theirs[:12]}; use data in its ids"
        )
    if checkpoint.step >= config.train.steps:
        problems.append(f"train.steps={config.train.steps} must be above the checkpoint's step, {checkpoint.step}")
    if problems:
        raise ValueError(f"checkpoint.load_from={checkpoint.path} cannot be used:\n  " + "\n  ".join(problems))


def check_resumable(config: Config, checkpoint: Checkpoint) -> None:
    """Raise one ValueError naming every setting that differs from the checkpoint's and must not."""
    old, new = checkpoint.trainer["config"], to_plain(config)
    problems = _differences(
        old, new, [*_model_keys(new), *_FIXED], "keep the value of the checkpoint, or start a new run"
    )
    changed = [] if config.schedule.lr_decay_steps is not None else ["train.steps"]
    keys = [*changed, *_SCHEDULE[1:]]
    if not config.checkpoint.override_schedule:
        problems += _differences(
            old, new, keys, "keep it, or set checkpoint.override_schedule=true to follow the new one"
        )
    if problems:
        raise ValueError(f"{checkpoint.path} cannot be resumed with these settings:\n  " + "\n  ".join(problems))


def _model_keys(new: dict[str, Any]) -> list[str]:
    model = [f"model.{key}" for key in new["model"] if key not in _FREE]
    return model + [f"moe.{key}" for key in new["moe"] if key != "backend"]  # both backends are the same model


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
