"""Experts: which of their settings contradict each other, the backend, the layout, or a dense model."""

from __future__ import annotations

import dataclasses

from recipes import schema
from recipes.config import Config, MoeBackend, MoeConfig, ParallelConfig
from recipes.validation.limits import Problems


def check_experts(config: Config, world_size: int) -> Problems:
    """Every contradiction of the group `moe`; how ranks share the experts out is `layouts`' concern."""
    if config.moe.num_moe_experts is None:
        yield from _dense(config)
        return
    for check in (_layers, _routing, _capacity, _backend):
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
    freq, layers = config.moe.moe_layer_freq, config.model.num_layers
    if freq > layers:
        yield f"moe.moe_layer_freq={freq} must be at least 1 and at most model.num_layers={layers}; try 1 or 2"
    offset = config.moe.moe_layer_offset
    if offset >= min(freq, layers):
        yield f"moe.moe_layer_offset={offset} must be less than moe.moe_layer_freq={freq} and model.num_layers={layers}; try 0"
    if config.model.add_bias_linear:
        few = f"moe.num_moe_experts={config.moe.num_moe_experts}: experts have no biases"
        yield f"model.add_bias_linear=true with {few}; use model.add_bias_linear=false, or moe=dense"


def _routing(config: Config) -> Problems:
    moe = config.moe
    assert moe.num_moe_experts is not None
    if moe.moe_router_topk > moe.num_moe_experts:
        limit = f"moe.num_moe_experts={moe.num_moe_experts}"
        yield f"moe.moe_router_topk={moe.moe_router_topk} must be at most {limit}; use fewer choices, or more experts"
    if moe.moe_router_topk == 1 and not moe.moe_router_pre_softmax:
        reason = "the softmax over one chosen expert is always 1, so that the language loss could not train the router"
        way_out = "use moe.moe_router_pre_softmax=true, or moe.moe_router_topk=2"
        yield f"moe.moe_router_pre_softmax=false with moe.moe_router_topk=1: {reason}; {way_out}"


def _capacity(config: Config) -> Problems:
    moe = config.moe
    if moe.moe_expert_capacity_factor is not None or moe.moe_eval_capacity_factor is not None:
        return
    for name in ("moe_min_capacity", "moe_token_drop_policy"):
        value, default = getattr(moe, name), getattr(MoeConfig(), name)
        if value != default:
            way_out = f"set moe.moe_expert_capacity_factor=1.25, or moe.{name}={schema.show(default)}"
            yield f"moe.{name}={schema.show(value)} has no effect without a capacity factor: nothing is dropped; {way_out}"


def _backend(config: Config) -> Problems:
    """What DeepSpeed's own gates (deepspeed/moe/sharded_moe.py of 0.19) do otherwise than the description says."""
    moe, topk = config.moe, config.moe.moe_router_topk
    if moe.backend is not MoeBackend.deepspeed:
        return
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
