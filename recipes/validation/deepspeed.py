"""`deepspeed.extra`: settings that DeepSpeed 0.19 has, with values of the types it takes, and none that this library makes itself.

A test compares the names with the installed DeepSpeed, which is too slow to be imported here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeAlias

from recipes import schema
from recipes.config import Config
from recipes.description import read_value
from recipes.rules import Factor, Folder, Length, Name, Range
from recipes.validation.limits import OWNED_KEYS, Problems

_Size = Annotated[int, Range(0, 2**62)]
_Names = Annotated[list[Name], Length(1000)]
_Settings: TypeAlias = "dict[str, Any]"  # name -> type, or a mapping of the same form

_FILES: _Settings = {"enabled": bool, "output_path": Folder, "job_name": Name}
SETTINGS: _Settings = {
    "disable_allgather": bool,
    "disable_python_gc": bool,
    "dump_state": bool,
    "gradient_predivide_factor": Factor,
    "log_level": Name,
    "memory_breakdown": bool,
    "prescale_gradients": bool,
    "wall_clock_breakdown": bool,
    "activation_checkpointing": {
        "partition_activations": bool,
        "contiguous_memory_optimization": bool,
        "cpu_checkpointing": bool,
        "number_checkpoints": _Size | None,
        "synchronize_checkpoint_boundary": bool,
        "profile": bool,
    },
    "aio": {
        "block_size": _Size,
        "queue_depth": _Size,
        "intra_op_parallelism": _Size,
        "single_submit": bool,
        "overlap_events": bool,
        "use_gds": bool,
    },
    "comms_logger": {"enabled": bool, "prof_all": bool, "prof_ops": _Names, "verbose": bool, "debug": bool},
    "csv_monitor": _FILES,
    "flops_profiler": {
        "enabled": bool,
        "recompute_fwd_factor": Factor,
        "profile_step": _Size,
        "module_depth": Annotated[int, Range(-1, 10**6)],
        "top_modules": _Size,
        "detailed": bool,
        "output_file": Folder | None,
    },
    "pipeline": {"seed_layers": bool, "activation_checkpoint_interval": _Size},
    "tensorboard": _FILES,
    "timers": {"throughput": {"enabled": bool, "synchronized": bool}},
    "zero_optimization": {
        **dict.fromkeys(
            (
                "use_multi_rank_bucket_allreduce",
                "allgather_partitions",
                "load_from_fp32_weights",
                "elastic_checkpoint",
                "ignore_unused_parameters",
                "legacy_stage1",
                "memory_efficient_linear",
                "pipeline_loading_checkpoint",
                "override_module_apply",
                "log_trace_cache_warnings",
                "enable_sanity_checks",
                "zero_quantized_weights",
                "zero_quantized_nontrainable_weights",
                "zero_quantized_gradients",
                "stage3_gather_16bit_weights_on_model_save",
                "stage3_use_all_reduce_for_fetch_params",
                "stage3_allgather_sequential",
            ),
            bool,
        ),
        **dict.fromkeys(
            (
                "sub_group_size",
                "stage3_prefetch_bucket_size",
                "stage3_param_persistence_threshold",
                "stage3_model_persistence_threshold",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_module_granularity_threshold",
                "zero_hpz_partition_size",
            ),
            _Size,
        ),
    },
}


def check_deepspeed(config: Config, world_size: int) -> Problems:
    """Every setting of `deepspeed.extra` that is not the user's, that does not exist, or whose value has another type."""
    yield from _check(config.deepspeed.extra, SETTINGS, "")


def _check(extra: Mapping[str, Any], known: _Settings, prefix: str) -> Iterator[str]:
    for name, value in extra.items():
        inner = f"{prefix}{name}"
        shown = f"deepspeed.extra.{schema.show(inner)}"
        if inner in OWNED_KEYS:
            place = next((f".{leaf}" for leaf in _leaves(value)), "")
            yield f"{shown}{place} is decided by this library: {OWNED_KEYS[inner]}"
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f", did you mean {' or '.join(near)}?" if near else ""
            yield f"{shown}: no setting of DeepSpeed that has a use here{hint}; there are {', '.join(known)}"
        elif isinstance(known[name], dict):
            if isinstance(value, dict):
                yield from _check(value, known[name], f"{inner}.")
            else:
                example = next(iter(known[name]))
                yield f"{shown}={schema.show(value)}: must be a mapping like {{{example}:...}}"
        else:
            yield from read_value(known[name], value, f"deepspeed.extra.{inner}")


def _leaves(value: Any) -> Iterator[str]:
    """The dotted name of the first value in nested mappings."""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        below = next(_leaves(value), None)
        yield schema.show(name) if below is None else f"{schema.show(name)}.{below}"
        return
