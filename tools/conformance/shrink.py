"""A recipe at CPU size with the same structure: few layers and narrow ones, every kind of part still there.

What decides whether a layout is legal (heads, widths, tokens, experts) keeps its common divisor with the number of ranks, so
that the small model has the layouts of the large one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path

from recipes import schema
from recipes.config import (
    Config,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    Precision,
    RunConfig,
    SecondExpert,
    TransformerImpl,
    to_plain,
)
from recipes.logical import expert_counts, expert_width, ffn_width, moe_layers, num_kv_heads
from recipes.validation import problems

# Smallest sizes; all different, so that a mix-up of two axes shows.
HIDDEN, FFN, EXPERT, SHARED, SEQUENCE, VOCABULARY = 24, 40, 16, 12, 16, 61
EXPERTS, GROUPS, SAMPLES = 8, 4, 8
# A vocabulary that needs padding, on the last rank, in place of none and of those above the largest that stays as it is.
PADDED_TO, LARGEST_VOCABULARY = 16, 8192
# Weights so large that gradients are of order one and few tokens have two experts that are nearly equal.
INIT_STD = 0.3
AUX_LOSS, Z_LOSS = 0.1, 0.01  # at least, so that an error in them is seen in the router's gradient
BUCKET = 4000  # elements: several buckets per model


def checked(config: Config) -> Config:
    """The recipe without what does not matter here: run folder, data, layout. Raises ValueError with all its mistakes."""
    config = copy.deepcopy(config)
    config.run, config.parallel, config.data.path = RunConfig(seed=config.run.seed), ParallelConfig(), None
    if config.model.vocab_size is None:
        _shrink_vocabulary(config.model)
    found = problems(config, 1, launch_dir=Path.cwd(), dry_run=True)
    if found:
        raise ValueError(found[0] if len(found) == 1 else "\n  - ".join([f"{len(found)} problems", *found]))
    return config


def shrink(config: Config, world_size: int) -> Config:
    """The scaled recipe for layouts of `world_size` ranks. `config` is valid (see `checked`)."""
    small = copy.deepcopy(config)
    _shrink_model(small.model, config, world_size)
    _shrink_experts(small.moe, config, world_size)
    if small.moe.moe_layer_pattern is not None:
        small.moe.moe_layer_pattern = small.moe.moe_layer_pattern[: small.model.num_layers]
    if small.moe.num_moe_experts_per_layer is not None:  # each number once, the last one in what layers are left
        numbers = list(dict.fromkeys(small.moe.num_moe_experts_per_layer))
        numbers += numbers[-1:] * len(moe_layers(small))
        small.moe.num_moe_experts_per_layer = numbers[: len(moe_layers(small))]
    small.train.precision = Precision.fp32
    samples = 2 * world_size  # two micro steps of one sequence on every rank
    small.train.global_batch_size = samples * math.ceil(SAMPLES / samples)
    small.train.micro_batch_size = 1
    small.train.spike_factor = 0.0
    small.zero.reduce_bucket_size = min(config.zero.reduce_bucket_size, BUCKET)
    small.zero.allgather_bucket_size = min(config.zero.allgather_bucket_size, BUCKET)
    small.zero.overlap_comm = False  # needs CUDA
    return small


def _shrink_model(model: ModelConfig, config: Config, world_size: int) -> None:
    queries = model.num_attention_heads // num_kv_heads(model)
    groups = similar(num_kv_heads(config.model), GROUPS, world_size)
    model.num_layers = max(_layers(config), min(model.num_layers, world_size))  # a layer for each of as many stages
    model.hidden_size = similar(model.hidden_size, HIDDEN, world_size)
    model.ffn_hidden_size = similar(ffn_width(config.model), FFN, world_size)
    model.num_attention_heads, model.num_query_groups = queries * groups, groups
    model.kv_channels = next(n for n in range(4, 1 << 20, 2) if _rotates(int(n * model.rotary_percent)))
    model.seq_length = similar(model.seq_length, SEQUENCE, world_size)
    assert model.vocab_size is not None
    if model.vocab_size > LARGEST_VOCABULARY:
        _shrink_vocabulary(model)
    model.hidden_dropout = model.attention_dropout = 0.0
    model.init_method_std = INIT_STD
    model.transformer_impl = TransformerImpl.local


def _shrink_vocabulary(model: ModelConfig) -> None:
    model.vocab_size, model.make_vocab_size_divisible_by = VOCABULARY, PADDED_TO


def _rotates(channels: int) -> bool:
    return channels >= 2 and channels % 2 == 0


def _layers(config: Config) -> int:
    """Two layers, or enough for one of each kind; with experts in every second layer enough for two that have some; with unlike
    numbers of experts enough for one with each."""
    freq, offset, pattern = config.moe.moe_layer_freq, config.moe.moe_layer_offset, config.moe.moe_layer_pattern
    numbers = set(expert_counts(config).values())
    least = moe_layers(config)[len(numbers) - 1] + 1 if len(numbers) > 1 else 0
    if pattern is not None:
        return max(2, least, *(pattern.index(kind) + 1 for kind in set(pattern)))
    return max(least, min(config.model.num_layers, offset + freq + 1 if freq <= 2 else freq))


def _shrink_experts(moe: MoeConfig, config: Config, world_size: int) -> None:
    if not moe.has_experts:
        return
    numbers: dict[int, int] = {}
    for number in sorted(set(expert_counts(config).values())):  # unlike ones stay so
        numbers[number] = _experts(moe, number, 1 + max(numbers.values(), default=0), world_size)
    if moe.num_moe_experts is not None:
        moe.num_moe_experts = numbers[moe.num_moe_experts]
    if moe.num_moe_experts_per_layer is not None:
        moe.num_moe_experts_per_layer = [numbers[number] for number in moe.num_moe_experts_per_layer]
    moe.moe_ffn_hidden_size = similar(expert_width(config), EXPERT, world_size)
    if moe.moe_shared_expert_intermediate_size is not None:
        shared = similar(moe.moe_shared_expert_intermediate_size, SHARED, world_size)
        moe.moe_shared_expert_intermediate_size = shared
    moe.moe_expert_capacity_factor = moe.moe_eval_capacity_factor = None
    moe.moe_min_capacity, moe.moe_token_drop_policy = MoeConfig().moe_min_capacity, MoeConfig().moe_token_drop_policy
    moe.moe_input_jitter_eps, moe.moe_router_gumbel_scale, moe.moe_expert_dropout = None, 0.0, 0.0  # nothing at random
    moe.moe_second_expert = SecondExpert.best
    if moe.moe_aux_loss_coeff:
        moe.moe_aux_loss_coeff = max(moe.moe_aux_loss_coeff, AUX_LOSS)
    if moe.moe_z_loss_coeff:
        moe.moe_z_loss_coeff = max(moe.moe_z_loss_coeff, Z_LOSS)
    if moe.moe_loss_coeff_ramp is not None:
        moe.moe_loss_coeff_ramp = [0, 4]  # the steps that are compared are on the way


def _experts(moe: MoeConfig, number: int, at_least: int, world_size: int) -> int:
    """Twice as many as a token chooses, also within the groups that it may choose from; groups stay equal parts."""
    groups, open_groups = moe.moe_router_num_groups or 1, moe.moe_router_group_topk or 1
    per_group = number // groups
    least = max(math.ceil(max(EXPERTS, at_least) / groups), math.ceil(2 * moe.moe_router_topk / open_groups))
    return groups * next(
        n
        for n in range(min(per_group, least), per_group + 1)
        if math.gcd(groups * n, world_size) == math.gcd(number, world_size)
    )


def similar(value: int, least: int, world_size: int) -> int:
    """The smallest number from `least` on that has the common divisor of `value` with `world_size`, or `value` if smaller."""
    return next(
        n for n in range(min(value, least), value + 1) if math.gcd(n, world_size) == math.gcd(value, world_size)
    )


def changes(config: Config, small: Config) -> Iterator[str]:
    """What was scaled, one line per key."""
    old, new = to_plain(config), to_plain(small)
    for group in ("model", "moe", "train", "zero"):
        for key, value in new[group].items():
            if old[group][key] != value:
                yield f"{group}.{key}  {schema.show(old[group][key])} -> {schema.show(value)}"
