"""Each value by itself: its range, and the settings of DeepSpeed that are not the user's to make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from recipes import schema
from recipes.config import Config, MoeConfig

Problems = Iterator[str]

# Closed ranges of single values; None: no bound. Null values are legal where the schema has null.
BOUNDS: dict[str, tuple[float, float | None]] = {
    "run.seed": (0, 2**63 - 1),
    "train.steps": (1, 10**12),
    "train.micro_batch_size": (1, 10**9),
    "train.global_batch_size": (1, 10**9),
    "train.eval_interval": (0, None),
    "train.eval_samples": (0, None),
    "train.spike_factor": (0, None),
    "train.spike_window": (2, None),
    "train.max_skipped_steps": (1, None),
    "model.num_layers": (1, 10**5),
    "model.hidden_size": (1, 10**6),
    "model.ffn_hidden_size": (1, 10**7),
    "model.num_attention_heads": (1, 10**5),
    "model.num_query_groups": (1, 10**5),
    "model.kv_channels": (2, 10**5),
    "model.seq_length": (1, 10**8),
    "model.vocab_size": (2, 10**8),
    "model.make_vocab_size_divisible_by": (1, 10**6),
    "model.hidden_dropout": (0, 1),
    "model.attention_dropout": (0, 1),
    "model.init_method_std": (0, None),
    "moe.num_moe_experts": (1, 10**5),
    "moe.moe_layer_freq": (1, 10**5),
    "moe.moe_layer_offset": (0, 10**5),
    "moe.moe_ffn_hidden_size": (1, 10**7),
    "moe.moe_shared_expert_intermediate_size": (1, 10**7),
    "moe.moe_router_topk": (1, 10**5),
    "moe.moe_router_lr_scale": (0, None),
    "moe.moe_expert_lr_scale": (0, None),
    "moe.moe_router_gumbel_scale": (0, None),
    "moe.moe_router_num_groups": (1, 10**5),
    "moe.moe_router_group_topk": (1, 10**5),
    "moe.moe_aux_loss_coeff": (0, None),
    "moe.moe_aux_loss_coeff_end": (0, None),
    "moe.moe_z_loss_coeff": (0, None),
    "moe.moe_z_loss_coeff_end": (0, None),
    "moe.moe_min_capacity": (0, 10**9),
    "parallel.data_parallel_size": (1, 10**6),
    "parallel.tensor_model_parallel_size": (1, 10**6),
    "parallel.pipeline_model_parallel_size": (1, 10**6),
    "parallel.num_layers_in_first_pipeline_stage": (1, 10**5),
    "parallel.num_layers_in_last_pipeline_stage": (1, 10**5),
    "parallel.expert_model_parallel_size": (1, 10**6),
    "parallel.expert_tensor_parallel_size": (1, 10**6),
    "zero.reduce_bucket_size": (1, None),
    "zero.allgather_bucket_size": (1, None),
    "optimizer.min_lr": (0, None),
    "optimizer.weight_decay": (0, None),
    "optimizer.clip_grad": (0, None),
    "schedule.lr_warmup_steps": (0, None),
    "schedule.lr_decay_steps": (1, None),
    "schedule.wsd_decay_steps": (0, None),
    "checkpoint.save_interval": (0, None),
    "checkpoint.save_interval_minutes": (0, None),
    "checkpoint.keep": (1, None),
    "checkpoint.load_step": (1, None),
    "telemetry.log_interval": (1, None),
    "btm.num_branches": (2, 4096),
    "btm.seed_share": (0, 1),
    "btm.mix_share": (0, 1),
    "btm.workers": (1, 4096),
    "btm.threads": (1, 1024),
    "btm.ranks_per_branch": (1, 10**6),
    "btm.retries": (0, 100),
    "btm.prior_decay": (0, 1),
    "btm.top_k": (1, 4096),
    "btm.development_samples": (0, 10**6),
    "btm.cluster_features": (2, 10**4),
    "btm.cluster_tokens": (16, 10**8),
    "btm.cluster_sample": (4, 10**5),
    "btm.cluster_route_every": (1, 10**8),
    "btm.mix_topk": (1, 4096),
    "btm.mix_aux_loss_coeff": (0, None),
    "btm.mix_router_lr_scale": (0, None),
    "btm.mix_expert_lr_scale": (0, None),
    "btm.mix_layer_freq": (1, 10**5),
}
# Half-open ranges (low, high): value > low and, in the second table, low <= value < high.
ABOVE_ZERO = (
    "model.layernorm_epsilon",
    "model.rotary_base",
    "model.rotary_percent",
    "moe.moe_init_scale",
    "moe.moe_router_topk_scaling_factor",
    "moe.moe_router_bias_update_rate",
    "moe.moe_expert_capacity_factor",
    "moe.moe_eval_capacity_factor",
    "optimizer.lr",
    "optimizer.adam_eps",
    "btm.seed_share",
    "btm.prior_decay",
    "btm.cluster_temperature",
)
BELOW_ONE = ("moe.moe_input_jitter_eps", "moe.moe_expert_dropout", "optimizer.adam_beta1", "optimizer.adam_beta2")

# What this library decides of DeepSpeed's configuration, and the key (or the reason) that decides it.
OWNED_KEYS = {
    "train_batch_size": "use train.global_batch_size",
    "train_micro_batch_size_per_gpu": "use train.micro_batch_size",
    "gradient_accumulation_steps": "it follows from train.global_batch_size and train.micro_batch_size",
    "gradient_clipping": "use optimizer.clip_grad",
    "optimizer": "use the group optimizer",
    "scheduler": "use the group schedule",
    "bf16": "use train.precision",
    "bfloat16": "use train.precision",
    "fp16": "use train.precision",
    "amp": "use train.precision",
    "data_types": "gradients accumulate in fp32",
    "communication_data_type": "gradients are reduced in fp32",
    "zero_optimization.stage": "use zero.stage",
    "zero_optimization.reduce_bucket_size": "use zero.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size": "use zero.allgather_bucket_size",
    "zero_optimization.overlap_comm": "use zero.overlap_comm",
    "zero_optimization.offload_optimizer": "use zero.offload_optimizer",
    "zero_optimization.cpu_offload": "use zero.offload_optimizer",
    "zero_optimization.offload_param": "it needs ZeRO-3, which is not offered",
    "zero_optimization.contiguous_gradients": "it stays true: without it ZeRO-1 gradients can be wrong",
    "zero_optimization.reduce_scatter": "it stays true: DeepSpeed reduces gradients of experts in no other way",
    "zero_optimization.round_robin_gradients": "it stays false: full gradients cannot be read otherwise",
    "zero_allow_untested_optimizer": "it stays true: the optimizer is torch's",
    "zero_force_ds_cpu_optimizer": "it stays false: the optimizer is torch's",
    "moe": "use the group moe",
    "expert_parallel": "use the group moe and parallel.expert_model_parallel_size",
    "tensor_parallel": "use parallel.tensor_model_parallel_size",
    "pipeline.pipe_partitioned": "it stays false: ranks pass on hidden states as they are, divided or not",
    "pipeline.grad_partitioned": "it stays false: ranks pass on gradients as they are, divided or not",
    "sequence_parallel_size": "it means another parallelism; there is parallel.sequence_parallel",
    "use_data_before_expert_parallelism": "it stays false: neighbouring ranks share the experts out",
    "steps_per_print": "progress is printed by telemetry",
}


def _value(config: Config, key: str) -> Any:
    group, _, name = key.partition(".")
    return getattr(getattr(config, group), name)


def check_ranges(config: Config) -> Problems:
    """Single values: finite, and within their own range."""
    for key, entry in schema.entries().items():
        value = _value(config, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        low, high = BOUNDS.get(key, (None, None))
        legal = None
        if not math.isfinite(value):
            legal = "must be finite"
        elif key in ABOVE_ZERO and value <= 0:
            legal = "must be above 0"
        elif key in BELOW_ONE and not 0 <= value < 1:
            legal = "must be at least 0 and below 1"
        elif low is not None and (value < low or (high is not None and value > high)):
            legal = f"must be at least {low}" + (f" and at most {high}" if high is not None else "")
        if legal:
            default = "" if entry.default is None else f"; the default is {entry.example}"
            yield f"{key}={schema.show(value)} {legal} ({entry.note}){default}"
    if config.zero.stage not in (0, 1, 2, 3):
        yield f"zero.stage={config.zero.stage}: unknown; use 0, 1, 2 or 3"
    for place, count in enumerate(config.moe.num_moe_experts_per_layer or []):
        if not 1 <= count <= 10**5:
            shown = f"moe.num_moe_experts_per_layer[{place}]={count}"
            yield f"{shown} must be at least 1 and at most {10**5}; a layer without experts is moe.moe_layer_pattern's to say"
    if config.model.rotary_percent > 1:
        yield f"model.rotary_percent={config.model.rotary_percent} must be above 0 and at most 1, a share of each head"


def check_owned_keys(config: Config) -> Problems:
    """DeepSpeed's settings that this library makes itself."""
    for key in _leaves(config.deepspeed.extra):
        for owned, instead in OWNED_KEYS.items():
            if key == owned or key.startswith(f"{owned}."):
                yield f"deepspeed.extra.{key} is decided by this library: {instead}"
    zero = config.deepspeed.extra.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield f"deepspeed.extra.zero_optimization={zero} must be a mapping like {{ignore_unused_parameters:true}}"


def _leaves(extra: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in extra.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def expert_counts_by_key(moe: MoeConfig) -> dict[str, int]:
    """The different numbers of experts that the description gives, each by its own key, or that of the first such layer."""
    counts = moe.num_moe_experts_per_layer
    if counts is None:
        return {} if moe.num_moe_experts is None else {"moe.num_moe_experts": moe.num_moe_experts}
    return {f"moe.num_moe_experts_per_layer[{counts.index(count)}]": count for count in dict.fromkeys(counts)}


def show_experts(moe: MoeConfig) -> str:
    """The setting that gives the model experts."""
    name = "num_moe_experts" if moe.num_moe_experts_per_layer is None else "num_moe_experts_per_layer"
    return f"moe.{name}={schema.show(getattr(moe, name))}"


def divisible(key: str, value: int, divisor_text: str, divisor: int, otherwise: str = "") -> Problems:
    """A value that must be a multiple of `divisor`, which is shown as `divisor_text`; proposes the nearest two."""
    if value % divisor:
        below = value // divisor * divisor
        tries = " or ".join(str(number) for number in (below, below + divisor) if number)
        product = f" = {divisor}" if " x " in divisor_text else ""
        yield f"{key}={value} must be divisible by {divisor_text}{product}; try {tries}{otherwise}"
