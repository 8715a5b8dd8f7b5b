"""Checks of a composed description: every problem at once, before any rank joins and before torch is imported.

Config, number of ranks, launch directory -> problems() -> [message, ...]   each: key, value, legal range, a way out
                                          -> prepare()  -> Config with everything derived filled in

`limits`: single values; `settings`, `experts`, `pipeline`: values against each other; `layouts`: against the number of ranks,
and which layouts a model has; `files`: what is on disk; `notes`: what is legal and deserves a word.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes import schema
from recipes.config import Config, TransformerImpl
from recipes.data.dataset import load_dataset
from recipes.description import check_description
from recipes.logical import expert_width, ffn_width, head_width, num_kv_heads
from recipes.topology import expert_tensor_size, model_parallel_size
from recipes.validation.btm import check_btm
from recipes.validation.deepspeed import check_deepspeed
from recipes.validation.experts import check_experts
from recipes.validation.files import check_data, check_run_folder
from recipes.validation.layouts import check_batch, layout_problems
from recipes.validation.limits import check_ranges
from recipes.validation.pipeline import check_pipeline, check_recompute
from recipes.validation.settings import check_model, check_schedule, check_telemetry, check_train, check_zero

__all__ = ["check_stored", "from_stored", "prepare", "problems"]

MAX_RANKS = 2**22
# What a model and its batches need, and what only a run does: `prepare` fills in values of the latter that nobody could give.
_OF_MODEL = (layout_problems, check_batch, check_model, check_experts, check_zero, check_pipeline, check_recompute)
_OF_RUN = (check_train, check_schedule, check_telemetry, check_btm, check_deepspeed)


def problems(config: Config, world_size: int, *, launch_dir: Path, dry_run: bool = False) -> list[str]:
    """Every problem of the description for `world_size` ranks; an empty list when it can run.

    Relative paths start at `launch_dir`. A dry run needs no data when `model.vocab_size` is given. Nothing is written.
    """
    found = [*check_ranges(config)]
    if found:  # arithmetic on values out of range says nothing
        return found
    if world_size > MAX_RANKS:
        way_out = "use smaller sizes in the group parallel"
        return [f"{world_size} ranks (data x tensor x pipeline parallel) must be at most {MAX_RANKS}; {way_out}"]
    for check in (*_OF_MODEL, *_OF_RUN):
        found += check(config, world_size)
    try:
        found += check_run_folder(config, launch_dir)
        found += check_data(config, launch_dir, dry_run)
    except OSError as error:  # a folder that may not be looked into, a loop of links, a path too long here
        found.append(
            f"{schema.show(error.filename or '')}: {error.strerror}; name another path, or ask for access to it"
        )
    return found


def from_stored(plain: Any, world_size: int | None = None) -> Config:
    """The description that a run has left, out of plain JSON or YAML: its values and its model checked like a command line.

    `world_size`: ranks of that run, where the description leaves its data-parallel size open. Which layer implementation this
    machine has is no property of it. Raises ValueError naming the key.
    """
    config = check_description(plain)
    check_stored(config, world_size)
    return config


def check_stored(config: Config, world_size: int | None) -> None:
    """The second half of `from_stored`: whether the values fit each other. Raises ValueError naming the key."""
    portable = replace(config, model=replace(config.model, transformer_impl=TransformerImpl.auto))
    if world_size is None or config.parallel.data_parallel_size is not None:
        world_size = (config.parallel.data_parallel_size or 1) * model_parallel_size(config)
    if world_size > MAX_RANKS:
        raise ValueError(f"{world_size} ranks (data x tensor x pipeline parallel) must be at most {MAX_RANKS}")
    if found := [problem for check in _OF_MODEL for problem in check(portable, world_size)]:
        raise ValueError("; ".join(found[:3]))


def prepare(config: Config, world_size: int, *, launch_dir: Path) -> Config:
    """A valid description with every derived value filled in: what the run records and works with."""
    vocab_size, moe, parallel = config.model.vocab_size, config.moe, config.parallel
    experts = moe.has_experts
    if vocab_size is None:
        assert config.data.path is not None
        vocab_size = load_dataset(launch_dir / config.data.path).vocab_size
    return replace(
        config,
        model=replace(
            config.model,
            vocab_size=vocab_size,
            ffn_hidden_size=ffn_width(config.model),
            num_query_groups=num_kv_heads(config.model),
            kv_channels=head_width(config.model),
        ),
        moe=replace(moe, moe_ffn_hidden_size=expert_width(config) if experts else None),
        parallel=replace(
            parallel,
            data_parallel_size=world_size // model_parallel_size(config),
            expert_tensor_parallel_size=expert_tensor_size(config) if experts else None,
        ),
        schedule=replace(config.schedule, lr_decay_steps=config.schedule.lr_decay_steps or config.train.steps),
    )
