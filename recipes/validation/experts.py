"""Experts: which of their settings contradict each other, the backend, the layout, or a dense model."""

from __future__ import annotations

import dataclasses

from recipes import schema
from recipes.config import Config, MoeBackend, MoeConfig, ParallelConfig, RouterType, ScoreFunction, SecondExpert
from recipes.logical import moe_layers
from recipes.validation.limits import Problems, divisible, expert_counts_by_key, show_experts


def check_experts(config: Config, world_size: int) -> Problems:
    """Every contradiction of the group `moe`; how ranks share the experts out is `layouts`' concern."""
    if not config.moe.has_experts:
        yield from _dense(config)
        return
    for check in (_layers, _counts, _shared, _router, _routing, _noise, _groups, _balance, _capacity, _backend):
        yield from check(config)


def _dense(config: Config) -> Problems:
    """Nothing is ignored silently: without experts no other setting of theirs may have been made."""
    changed = [
        f"moe.{field.name}={schema.show(getattr(config.moe, field.name))}"
        for field in dataclasses.fields(MoeConfig)
        if getattr(config.moe, field.name) != field.default
    ]
    changed += [
        f"parallel.{name}={getattr(config.parallel, name)}"
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size")
        if getattr(config.parallel, name) != getattr(ParallelConfig(), name)
    ]
    if changed:
        few = "has" if len(changed) == 1 else "have"
        way_out = "set moe.num_moe_experts=8 or choose moe=switch, or leave the rest at its default"
        yield f"{', '.join(changed)} {few} no effect in a dense model (moe.num_moe_experts=null); {way_out}"


def _layers(config: Config) -> Problems:
    freq, layers, pattern = config.moe.moe_layer_freq, config.model.num_layers, config.moe.moe_layer_pattern
    if pattern is not None:
        if len(pattern) != layers or not set(pattern) <= {0, 1} or not any(pattern):
            shown = f"moe.moe_layer_pattern={schema.show(pattern)}"
            yield f"{shown} must be model.num_layers={layers} times 0 or 1, and 1 at least once, such as [0,0,1,1] for 4 layers"
        for name in ("moe_layer_freq", "moe_layer_offset"):
            value, default = getattr(config.moe, name), getattr(MoeConfig(), name)
            if value != default:
                way_out = f"use moe.{name}={default}, or moe.moe_layer_pattern=null"
                yield f"moe.{name}={value} has no effect beside moe.moe_layer_pattern; {way_out}"
        return
    if freq > layers:
        yield f"moe.moe_layer_freq={freq} must be at least 1 and at most model.num_layers={layers}; try 1 or 2"
    offset = config.moe.moe_layer_offset
    if offset >= min(freq, layers):
        yield f"moe.moe_layer_offset={offset} must be less than moe.moe_layer_freq={freq} and model.num_layers={layers}; try 0"


def _counts(config: Config) -> Problems:
    """One number of experts for all layers, or one for each."""
    moe, counts = config.moe, config.moe.num_moe_experts_per_layer
    if counts is None:
        return
    shown = show_experts(moe)
    if moe.num_moe_experts is not None:
        same = f"moe.num_moe_experts={moe.num_moe_experts}"
        yield f"{same} has no effect beside {shown}; use moe.num_moe_experts=null, or moe.num_moe_experts_per_layer=null"
    layers = moe_layers(config)
    if any(_layers(config)) or len(counts) == len(layers):
        return
    few = f"it has {len(counts)}, but {len(layers)} layers have experts ({', '.join(map(str, layers))}, from 0)"
    way_out = f"give {len(layers)}, or null and moe.num_moe_experts=8 for the same number in all"
    yield f"{shown} must have one number for each layer with experts: {few}; {way_out}"


def _shared(config: Config) -> Problems:
    moe = config.moe
    if config.model.add_bias_linear:
        few = f"{show_experts(moe)}: experts have no biases"
        yield f"model.add_bias_linear=true with {few}; use model.add_bias_linear=false, or moe=dense"
    asked = [name for name in ("moe_shared_expert_gate", "moe_use_residual") if getattr(moe, name)]
    if moe.moe_shared_expert_intermediate_size is None:
        for name in asked:
            width = "set its width by moe.moe_shared_expert_intermediate_size"
            yield f"moe.{name}=true without a shared expert has no effect; {width}, or use moe.{name}=false"
    if len(asked) == 2:
        reason = "the softmax of the second weighs the shared expert already"
        yield f"moe.moe_shared_expert_gate=true with moe.moe_use_residual=true: {reason}; use one of them"


# Settings that only mean something where tokens choose among scores, and where there are scores at all.
_TOKENS_CHOOSE = (
    "moe_router_norm_topk_prob",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_router_gumbel_scale",
    "moe_second_expert",
)
_SCORES = (
    *_TOKENS_CHOOSE,
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_router_lr_scale",
    "moe_input_jitter_eps",
)
_WITHOUT_EFFECT = {
    RouterType.topk: ((), ""),
    RouterType.sinkhorn: (
        tuple(name for name in _TOKENS_CHOOSE if name != "moe_router_norm_topk_prob"),
        "prices of experts that follow from the micro-batch decide",
    ),
    RouterType.expert_choice: (
        (*_TOKENS_CHOOSE, "moe_router_pre_softmax", "moe_token_drop_policy"),
        "experts choose their best tokens, whose gates are their scores",
    ),
    RouterType.hash: (_SCORES, "a table of token ids chooses, and gates are equal"),
    RouterType.random: (_SCORES, "chance chooses, and gates are equal"),
}


def _router(config: Config) -> Problems:
    """What another router than top-k has no use for."""
    moe, kind = config.moe, config.moe.moe_router_type
    names, why = _WITHOUT_EFFECT[kind]
    shown = f"moe.moe_router_type={kind.name}"
    for name in names:
        value, default = getattr(moe, name), getattr(MoeConfig(), name)
        if value != default:
            way_out = f"use moe.{name}={schema.show(default)}, or moe.moe_router_type=topk"
            yield f"moe.{name}={schema.show(value)} with {shown}: {why}; {way_out}"
    losses: dict[str, str] = {}
    if kind is RouterType.expert_choice:
        losses = {"moe_aux_loss_coeff": "every expert takes as many tokens already"}
    if kind in (RouterType.hash, RouterType.random):
        losses = dict.fromkeys(("moe_aux_loss_coeff", "moe_z_loss_coeff"), "there is no router to train")
    for name, reason in losses.items():
        for key in (name, f"{name}_end"):
            if value := getattr(moe, key):
                zero = "0.0" if key == name else "null"
                yield f"moe.{key}={value} with {shown}: {reason}; use moe.{key}={zero}, or moe.moe_router_type=topk"


def _noise(config: Config) -> Problems:
    """Randomness in choosing."""
    moe, second = config.moe, config.moe.moe_second_expert
    if moe.moe_router_type is not RouterType.topk:
        return
    shown = f"moe.moe_second_expert={second.name}"
    if second is not SecondExpert.best and moe.moe_router_topk != 2:
        topk = f"moe.moe_router_topk={moe.moe_router_topk}"
        yield f"{shown} with {topk}: it is about the second of two; use moe.moe_router_topk=2, or moe.moe_second_expert=best"
    noisy = {} if second is SecondExpert.best else {shown: "moe.moe_second_expert=best"}
    if moe.moe_router_gumbel_scale:
        noisy[f"moe.moe_router_gumbel_scale={moe.moe_router_gumbel_scale}"] = "moe.moe_router_gumbel_scale=0.0"
    if len(noisy) == 2:
        yield f"{' with '.join(noisy)}: two ways to draw the second expert; use one of {', '.join(noisy.values())}"
    for key, way_out in noisy.items():
        for name, neutral in (
            ("moe_router_score_function", ScoreFunction.softmax),
            ("moe_router_num_groups", None),
            ("moe_router_enable_expert_bias", False),
        ):
            if (value := getattr(moe, name)) != neutral:
                reason = "what is drawn in proportion to probability has a softmax, without groups or biases"
                ways = f"use {way_out}, or moe.{name}={schema.show(neutral)}"
                yield f"{key} with moe.{name}={schema.show(value)}: {reason}; {ways}"


def _routing(config: Config) -> Problems:
    moe, counts = config.moe, expert_counts_by_key(config.moe)
    if counts and moe.moe_router_topk > min(counts.values()):
        limit = "{}={}".format(*min(counts.items(), key=lambda item: item[1]))
        yield f"moe.moe_router_topk={moe.moe_router_topk} must be at most {limit}; use fewer choices, or more experts"
    if moe.moe_router_type not in (RouterType.topk, RouterType.sinkhorn):
        return
    if moe.moe_router_score_function is ScoreFunction.sigmoid and not moe.moe_router_pre_softmax:
        reason = "there is no softmax to come before or after the choice"
        way_out = "use moe.moe_router_pre_softmax=true; moe.moe_router_norm_topk_prob says whether gates add up to 1"
        yield f"moe.moe_router_pre_softmax=false with moe.moe_router_score_function=sigmoid: {reason}; {way_out}"
    elif not moe.moe_router_pre_softmax and moe.moe_router_norm_topk_prob is False:
        reason = "a softmax over the chosen experts adds up to 1"
        way_out = "use moe.moe_router_norm_topk_prob=null, or moe.moe_router_pre_softmax=true"
        yield f"moe.moe_router_norm_topk_prob=false with moe.moe_router_pre_softmax=false: {reason}; {way_out}"
    elif moe.moe_router_topk == 1 and moe.moe_router_norm_topk_prob:
        reason = "the gate of one chosen expert would always be 1, so that the language loss could not train the router"
        way_out = "use moe.moe_router_norm_topk_prob=null, or moe.moe_router_topk=2"
        yield f"moe.moe_router_norm_topk_prob=true with moe.moe_router_topk=1: {reason}; {way_out}"
    elif moe.moe_router_topk == 1 and not moe.moe_router_pre_softmax:
        reason = "the softmax over one chosen expert is always 1, so that the language loss could not train the router"
        way_out = "use moe.moe_router_pre_softmax=true, or moe.moe_router_topk=2"
        yield f"moe.moe_router_pre_softmax=false with moe.moe_router_topk=1: {reason}; {way_out}"


def _groups(config: Config) -> Problems:
    moe = config.moe
    groups, chosen = moe.moe_router_num_groups, moe.moe_router_group_topk
    if moe.moe_router_type is not RouterType.topk or (groups is None and chosen is None):
        return
    shown = f"moe.moe_router_num_groups={schema.show(groups)} with moe.moe_router_group_topk={schema.show(chosen)}"
    if groups is None or chosen is None:
        yield f"{shown}: both or none; set both, such as 4 and 2, or both to null"
        return
    topk, counts = moe.moe_router_topk, expert_counts_by_key(moe)
    for key, count in counts.items():
        yield from divisible(key, count, f"moe.moe_router_num_groups={groups}", groups)
    if chosen > groups:
        yield f"{shown}: a token can choose at most all groups; use moe.moe_router_group_topk={groups} or less"
    elif topk % chosen:
        reason = "a group is worth its moe_router_topk / moe_router_group_topk best experts"
        legal = ", ".join(str(number) for number in range(1, min(topk, groups) + 1) if topk % number == 0)
        yield f"moe.moe_router_group_topk={chosen} must divide moe.moe_router_topk={topk}: {reason}; use one of {legal}"
    elif (within := min((chosen * (n // groups) for n in counts.values() if n % groups == 0), default=topk)) < topk:
        reason = f"its {chosen} groups have {within} experts"
        yield f"{shown}: a token cannot choose moe.moe_router_topk={topk} experts when {reason}; use more or larger groups"


def _balance(config: Config) -> Problems:
    moe, default = config.moe, MoeConfig()
    rate = moe.moe_router_bias_update_rate
    if not moe.moe_router_enable_expert_bias and rate != default.moe_router_bias_update_rate:
        reason = "has no effect without biases (moe.moe_router_enable_expert_bias=false)"
        yield f"moe.moe_router_bias_update_rate={rate} {reason}; enable them, or leave it at its default"
    ramp, ends = moe.moe_loss_coeff_ramp, {}
    for name in ("moe_aux_loss_coeff_end", "moe_z_loss_coeff_end"):
        if (value := getattr(moe, name)) is not None:
            ends[f"moe.{name}"] = value
    if ramp is None and ends:
        few = ", ".join(f"{key}={value}" for key, value in ends.items())
        yield f"{few} with moe.moe_loss_coeff_ramp=null: no step to start at; set it to [first,last] steps, or leave both out"
    if ramp is not None:
        shown = f"moe.moe_loss_coeff_ramp={schema.show(ramp)}"
        if len(ramp) != 2 or not 0 <= ramp[0] < ramp[1]:
            yield f"{shown} must be [first,last] with 0 <= first < last, such as [0,1000]"
        if not ends:
            way_out = "set moe.moe_aux_loss_coeff_end or moe.moe_z_loss_coeff_end, or moe.moe_loss_coeff_ramp=null"
            yield f"{shown} has no effect without a weight to move to; {way_out}"


def _capacity(config: Config) -> Problems:
    moe = config.moe
    if moe.moe_expert_capacity_factor is not None or moe.moe_eval_capacity_factor is not None:
        return
    if moe.moe_router_type is RouterType.expert_choice:
        return
    for name in ("moe_min_capacity", "moe_token_drop_policy"):
        value, default = getattr(moe, name), getattr(MoeConfig(), name)
        if value != default:
            way_out = f"set moe.moe_expert_capacity_factor=1.25, or moe.{name}={schema.show(default)}"
            yield f"moe.{name}={schema.show(value)} has no effect without a capacity factor: nothing is dropped; {way_out}"


# What DeepSpeed's gates cannot do.
_OURS_ALONE = (
    "moe_router_type",
    "moe_second_expert",
    "moe_input_jitter_eps",
    "moe_router_gumbel_scale",
    "moe_router_score_function",
    "moe_router_norm_topk_prob",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_expert_dropout",
)


def _backend(config: Config) -> Problems:
    """What DeepSpeed's own gates (deepspeed/moe/sharded_moe.py of 0.19) do otherwise than the description says."""
    moe, topk = config.moe, config.moe.moe_router_topk
    if moe.backend is not MoeBackend.deepspeed:
        return
    for name in _OURS_ALONE:
        value, default = getattr(moe, name), getattr(MoeConfig(), name)
        if value != default:
            way_out = f"use moe.backend=grouped, or moe.{name}={schema.show(default)}"
            yield f"moe.{name}={schema.show(value)} with moe.backend=deepspeed: DeepSpeed's gates have no such option; {way_out}"
    if topk > 1 and moe.moe_router_pre_softmax:
        reason = f"DeepSpeed renormalises the gates of {topk} choices"
        way_out = "use moe.moe_router_pre_softmax=false, or moe.backend=grouped"
        yield f"moe.moe_router_pre_softmax=true with moe.backend=deepspeed: {reason}; {way_out}"
    does = {
        1: "drops arbitrary tokens of a full expert",
        2: "drops by position, and renormalises gates over the choices that are left",
    }.get(topk, "drops by probability, and renormalises gates over the choices that are left")
    for name in ("moe_expert_capacity_factor", "moe_eval_capacity_factor"):
        if (value := getattr(moe, name)) is not None:
            reason = f"with moe.moe_router_topk={topk} DeepSpeed {does}"
            yield f"moe.{name}={value} with moe.backend=deepspeed: {reason}; use moe.backend=grouped, or {name}=null"
