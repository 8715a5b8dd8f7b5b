"""Values against each other: training, model, ZeRO, schedule, telemetry."""

from __future__ import annotations

import importlib.util

from recipes import schema
from recipes.config import Config, DecayStyle, TransformerImpl
from recipes.logical import head_width, num_kv_heads
from recipes.validation.limits import Problems, divisible, show_experts


def check_train(config: Config, world_size: int) -> Problems:
    """Evaluation, spike guard and learning rates."""
    train = config.train
    if train.eval_interval and not train.eval_samples:
        yield f"train.eval_interval={train.eval_interval} needs train.eval_samples above 0; try eval_samples=64"
    if 0 < train.spike_factor <= 1:
        yield f"train.spike_factor={train.spike_factor} must be 0 (off) or above 1 (times the median norm); try 10"
    if config.optimizer.min_lr > config.optimizer.lr and config.schedule.lr_decay_style is not DecayStyle.constant:
        lr = config.optimizer.lr
        yield f"optimizer.min_lr={config.optimizer.min_lr} must be at most optimizer.lr={lr}; try {lr / 10:g}"


def check_model(config: Config, world_size: int) -> Problems:
    """Heads, their widths, and the layer implementation."""
    model = config.model
    heads, groups = model.num_attention_heads, num_kv_heads(model)
    if heads % groups:
        legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield f"model.num_query_groups={groups} must divide model.num_attention_heads={heads}; use one of {legal}"
    if model.kv_channels is None and model.hidden_size % heads:
        divisor = f"model.num_attention_heads={heads}"
        yield from divisible("model.hidden_size", model.hidden_size, divisor, heads, ", or set model.kv_channels")
        return
    width = head_width(model)
    rotating = int(width * model.rotary_percent)
    if rotating < 2 or rotating % 2:
        source = "model.kv_channels" if model.kv_channels else "model.hidden_size / model.num_attention_heads"
        share = f" x model.rotary_percent={model.rotary_percent}" if model.rotary_percent != 1 else ""
        yield f"{source}={width}{share} = {rotating} channels rotate in pairs; make it even and at least 2"
    te = TransformerImpl.transformer_engine
    if model.transformer_impl is te and importlib.util.find_spec("transformer_engine") is None:
        yield "model.transformer_impl=transformer_engine: not installed; install it, or use one of auto, local"


def check_zero(config: Config, world_size: int) -> Problems:
    """Options that stage 0 would ignore; what stage 3 cannot divide."""
    if config.zero.stage == 3 and config.moe.has_experts:
        reason = "DeepSpeed does not divide the weights of experts, which expert parallelism spreads over ranks already"
        yield f"zero.stage=3 with {show_experts(config.moe)}: {reason}; use zero.stage 0, 1 or 2"
    if config.zero.stage == 0:
        for option in ("offload_optimizer", "overlap_comm"):
            if getattr(config.zero, option):
                yield f"zero.{option}=true has no effect with zero.stage=0; use stage 1 or 2, or zero.{option}=false"


def check_schedule(config: Config, world_size: int) -> Problems:
    """Warm-up and decay within the run."""
    schedule = config.schedule
    warmup, end = schedule.lr_warmup_steps, schedule.lr_decay_steps or config.train.steps
    end_key = "train.steps" if schedule.lr_decay_steps is None else "schedule.lr_decay_steps"
    # A run cut short by train.steps may well end within its warm-up; a decay that ends there is a contradiction.
    if schedule.lr_decay_steps is not None and warmup > end:
        yield f"schedule.lr_warmup_steps={warmup} must be at most {end_key}={end}; try {end // 10}"
    elif schedule.lr_decay_style is DecayStyle.wsd and not 1 <= schedule.wsd_decay_steps <= end - warmup:
        length = f"schedule.wsd_decay_steps={schedule.wsd_decay_steps}"
        span = f"{end_key}={end} - schedule.lr_warmup_steps={warmup}"
        yield f"{length} must be at least 1 and at most {span} = {end - warmup}; try {max(1, end // 10)}"


def check_telemetry(config: Config, world_size: int) -> Problems:
    """The profiled steps within the run."""
    steps, profile = config.train.steps, config.telemetry.profile_steps
    if profile is not None and (len(profile) != 2 or not 1 <= profile[0] <= profile[1] <= steps):
        shown = schema.show(profile)
        yield f"telemetry.profile_steps={shown} must be [first,last] with 1 <= first <= last <= train.steps={steps}"
