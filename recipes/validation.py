"""Checks of a composed description: every problem at once, before any rank joins and before torch is imported.

Config, number of ranks, launch directory -> problems() -> [message, ...]   each: key, value, legal range, a way out
                                          -> prepare()  -> Config with everything derived filled in
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes import schema
from recipes.config import Config, DecayStyle, Resume, TransformerImpl
from recipes.data.blend import require_samples, resolve_weights
from recipes.data.dataset import load_dataset
from recipes.logical import ffn_width, head_width, num_kv_heads

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
    "parallel.data_parallel_size": (1, 10**6),
    "zero.reduce_bucket_size": (1, None),
    "zero.allgather_bucket_size": (1, None),
    "optimizer.min_lr": (0, None),
    "optimizer.weight_decay": (0, None),
    "optimizer.clip_grad": (0, None),
    "schedule.lr_warmup_steps": (0, None),
    "schedule.lr_decay_steps": (1, None),
    "schedule.wsd_decay_steps": (0, None),
    "checkpoint.save_interval": (0, None),
    "checkpoint.keep": (1, None),
    "checkpoint.load_step": (1, None),
    "telemetry.log_interval": (1, None),
}
# Half-open ranges (low, high): value > low and, in the second table, low <= value < high.
ABOVE_ZERO = (
    "model.layernorm_epsilon",
    "model.rotary_base",
    "model.rotary_percent",
    "optimizer.lr",
    "optimizer.adam_eps",
)
BELOW_ONE = ("optimizer.adam_beta1", "optimizer.adam_beta2")

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
    "zero_optimization.round_robin_gradients": "it stays false: full gradients cannot be read otherwise",
    "zero_allow_untested_optimizer": "it stays true: the optimizer is torch's",
    "zero_force_ds_cpu_optimizer": "it stays false: the optimizer is torch's",
    "steps_per_print": "progress is printed by telemetry",
}


def problems(config: Config, world_size: int, *, launch_dir: Path, dry_run: bool = False) -> list[str]:
    """Every problem of the description for `world_size` ranks; an empty list when it can run.

    Relative paths start at `launch_dir`. A dry run needs no data when `model.vocab_size` is given. Nothing is written.
    """
    found = [*_ranges(config)]
    if found:  # arithmetic on values out of range says nothing
        return found
    for check in (_batch, _train, _model, _zero, _schedule, _telemetry, _deepspeed):
        found += check(config, world_size)
    found += _run_folder(config, launch_dir)
    found += _data(config, launch_dir, dry_run)
    return found


def prepare(config: Config, world_size: int, *, launch_dir: Path) -> Config:
    """A valid description with every derived value filled in: what the run records and works with."""
    model, vocab_size = config.model, config.model.vocab_size
    if vocab_size is None:
        assert config.data.path is not None
        vocab_size = load_dataset(launch_dir / config.data.path).vocab_size
    return replace(
        config,
        model=replace(
            model,
            vocab_size=vocab_size,
            ffn_hidden_size=ffn_width(model),
            num_query_groups=num_kv_heads(model),
            kv_channels=head_width(model),
        ),
        parallel=replace(config.parallel, data_parallel_size=world_size),
        schedule=replace(config.schedule, lr_decay_steps=config.schedule.lr_decay_steps or config.train.steps),
    )


def _value(config: Config, key: str) -> Any:
    group, _, name = key.partition(".")
    return getattr(getattr(config, group), name)


def _ranges(config: Config) -> Problems:
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
    if config.zero.stage not in (0, 1, 2):
        reason = "ZeRO-3 divides the weights themselves, which is not offered" if config.zero.stage == 3 else "legal"
        yield f"zero.stage={config.zero.stage}: {reason}; use 0, 1 or 2"
    if config.model.rotary_percent > 1:
        yield f"model.rotary_percent={config.model.rotary_percent} must be above 0 and at most 1, a share of each head"


def _batch(config: Config, world_size: int) -> Problems:
    wanted = config.parallel.data_parallel_size
    if wanted is not None and wanted != world_size:
        ranks = f"but {world_size} process{' was' if world_size == 1 else 'es were'} started"
        yield f"parallel.data_parallel_size={wanted} {ranks}; start {wanted}, or set parallel.data_parallel_size=null"
        return
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    yield from _divisible(
        "train.global_batch_size",
        batch,
        f"train.micro_batch_size={micro} x data-parallel {world_size}",
        micro * world_size,
    )


def _divisible(key: str, value: int, divisor_text: str, divisor: int, otherwise: str = "") -> Problems:
    if value % divisor:
        below = value // divisor * divisor
        tries = " or ".join(str(number) for number in (below, below + divisor) if number)
        product = f" = {divisor}" if " x " in divisor_text else ""
        yield f"{key}={value} must be divisible by {divisor_text}{product}; try {tries}{otherwise}"


def _train(config: Config, world_size: int) -> Problems:
    train = config.train
    if train.eval_interval and not train.eval_samples:
        yield f"train.eval_interval={train.eval_interval} needs train.eval_samples above 0; try eval_samples=64"
    if 0 < train.spike_factor <= 1:
        yield f"train.spike_factor={train.spike_factor} must be 0 (off) or above 1 (times the median norm); try 10"
    if config.optimizer.min_lr > config.optimizer.lr and config.schedule.lr_decay_style is not DecayStyle.constant:
        lr = config.optimizer.lr
        yield f"optimizer.min_lr={config.optimizer.min_lr} must be at most optimizer.lr={lr}; try {lr / 10:g}"


def _model(config: Config, world_size: int) -> Problems:
    model = config.model
    heads, groups = model.num_attention_heads, num_kv_heads(model)
    if heads % groups:
        legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield f"model.num_query_groups={groups} must divide model.num_attention_heads={heads}; use one of {legal}"
    if model.kv_channels is None and model.hidden_size % heads:
        divisor = f"model.num_attention_heads={heads}"
        yield from _divisible("model.hidden_size", model.hidden_size, divisor, heads, ", or set model.kv_channels")
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


def _zero(config: Config, world_size: int) -> Problems:
    if config.zero.stage == 0:
        for option in ("offload_optimizer", "overlap_comm"):
            if getattr(config.zero, option):
                yield f"zero.{option}=true has no effect with zero.stage=0; use stage 1 or 2, or zero.{option}=false"


def _schedule(config: Config, world_size: int) -> Problems:
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


def _telemetry(config: Config, world_size: int) -> Problems:
    steps, profile = config.train.steps, config.telemetry.profile_steps
    if profile is not None and (len(profile) != 2 or not 1 <= profile[0] <= profile[1] <= steps):
        shown = schema.show(profile)
        yield f"telemetry.profile_steps={shown} must be [first,last] with 1 <= first <= last <= train.steps={steps}"


def _deepspeed(config: Config, world_size: int) -> Problems:
    for key in _leaves(config.deepspeed.extra):
        for owned, instead in OWNED_KEYS.items():
            if key == owned or key.startswith(f"{owned}."):
                yield f"deepspeed.extra.{key} is decided by this library: {instead}"
    zero = config.deepspeed.extra.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield f"deepspeed.extra.zero_optimization={zero} must be a mapping like {{reduce_scatter:true}}"


def _leaves(extra: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in extra.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _run_folder(config: Config, launch_dir: Path) -> Problems:
    run, load_step = config.run, config.checkpoint.load_step
    if not run.name.strip() or "/" in run.name or "\0" in run.name:
        yield f"run.name={run.name!r} becomes part of a folder name: it must not be empty or contain '/'"
    if run.dir is not None and (not run.dir.strip() or "\0" in run.dir):
        yield f"run.dir={run.dir!r} must name a folder, or be null"
        return
    if run.resume is Resume.auto and run.dir is None:
        yield "run.resume=auto needs the folder of the run to go on with; add run.dir=FOLDER"
    if load_step is not None and run.resume is not Resume.auto:
        yield f"checkpoint.load_step={load_step} needs run.resume=auto and run.dir=FOLDER; add them, or leave it null"
    elif load_step is not None and run.dir is not None:
        yield from _load_step(launch_dir / run.dir / "checkpoints", load_step)
    folder = launch_dir / (run.dir if run.dir is not None else "outputs")
    if folder.exists() and not folder.is_dir():
        yield f"run.dir={folder} is a file; choose another folder"
    elif run.dir is not None and folder.exists() and run.resume is Resume.never:
        yield f"run.dir={run.dir} exists; choose another folder, or go on from its newest checkpoint by run.resume=auto"
    else:
        yield from _writable(folder)


def _load_step(checkpoints: Path, step: int) -> Problems:
    if not (checkpoints / f"step_{step:08d}").is_dir() and not (checkpoints / f".step_{step:08d}.replaced").is_dir():
        steps = sorted(int(path.name[5:]) for path in checkpoints.glob("step_*") if path.name[5:].isdecimal())
        there = ", ".join(map(str, steps)) or "none"
        yield f"checkpoint.load_step={step}: not in {checkpoints}; the steps there are: {there}"


def _writable(folder: Path) -> Problems:
    """Whether the folder can be made and written; permission bits alone do not tell (root, read-only mounts)."""
    try:
        ancestor = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=ancestor):
            pass
    except OSError as error:
        yield f"run.dir={folder}: cannot write in {ancestor} ({error.strerror}); choose a folder that you may write to"


def _data(config: Config, launch_dir: Path, dry_run: bool) -> Problems:
    data, model = config.data, config.model
    if data.path is None:
        if not dry_run:
            yield "data.path=null: no data; give data.path=FOLDER written by `python -m tools.index`"
        elif model.vocab_size is None:
            yield "model.vocab_size=null and data.path=null: give one of them, the sizes depend on the vocabulary"
        return
    try:
        info = load_dataset(launch_dir / data.path)
    except ValueError as error:
        yield f"data.path={data.path}: {error}"
        return
    if model.vocab_size not in (None, info.vocab_size):
        theirs = f"the tokenizer of data.path={data.path} has {info.vocab_size}"
        yield f"model.vocab_size={model.vocab_size} but {theirs}; set model.vocab_size=null, or use other data"
    try:
        if data.wrap:
            resolve_weights(info.tokens(), data.domain_weights)
        else:
            num_samples = config.train.steps * config.train.global_batch_size
            require_samples(info, data.domain_weights, model.seq_length, num_samples)
    except ValueError as error:
        yield str(error)
