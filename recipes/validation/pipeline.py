"""Pipeline stages and recomputed activations: what DeepSpeed's pipeline engine does not do, and choices without effect."""

from __future__ import annotations

from recipes import schema
from recipes.config import RECOMPUTE_MODULES, Config, ModelConfig, MoeBackend, Recompute
from recipes.logical import moe_layers
from recipes.validation.limits import Problems


def check_pipeline(config: Config, world_size: int) -> Problems:
    """ZeRO's options with several stages."""
    zero, stages = config.zero, config.parallel.pipeline_model_parallel_size
    if stages == 1:
        return
    with_stages = f"with parallel.pipeline_model_parallel_size={stages}"
    if zero.stage > 1:
        reason = "DeepSpeed's pipeline engine reduces gradients after the last micro-batch, up to which each rank has them whole"
        yield f"zero.stage={zero.stage} {with_stages}: {reason}; use zero.stage=1, or one stage"
    elif zero.stage and zero.overlap_comm:
        reason = "DeepSpeed's pipeline engine switches it off, as it reduces gradients after the last micro-batch"
        yield f"zero.overlap_comm=true has no effect {with_stages}: {reason}; use zero.overlap_comm=false"


def check_recompute(config: Config, world_size: int) -> Problems:
    """Modules to compute again: known ones that the model has, and only where they are asked for."""
    model, modules = config.model, config.model.recompute_modules
    shown = f"model.recompute_modules={schema.show(modules)}"
    granularity = f"model.recompute_granularity={schema.show(model.recompute_granularity)}"
    legal, default = ", ".join(RECOMPUTE_MODULES), schema.show(ModelConfig().recompute_modules)
    if unknown := [name for name in modules if name not in RECOMPUTE_MODULES]:
        yield f"{shown}: unknown {', '.join(unknown)}; use some of {legal}"
    elif model.recompute_granularity is not Recompute.selective:
        if modules != ModelConfig().recompute_modules:
            way_out = f"use model.recompute_granularity=selective, or model.recompute_modules={default}"
            yield f"{shown} has no effect with {granularity}; {way_out}"
    elif not modules:
        way_out = f"name some of {legal}, or use model.recompute_granularity=null"
        yield f"{shown}: nothing to compute again with {granularity}; {way_out}"
    else:
        with_experts = len(moe_layers(config))
        if not with_experts and (named := [name for name in modules if name in ("moe", "moe_act")]):
            no_effect = f"{named[0]} has no effect in a dense model (moe.num_moe_experts=null)"
            yield f"{shown}: {no_effect}; leave it out, or add experts"
        elif "moe_act" in modules and (reason := _no_activation_alone(config)):
            yield f"{shown}: moe_act has no effect {reason}; leave it out"
        if "mlp" in modules and with_experts == model.num_layers:
            yield f"{shown}: mlp has no effect where every layer has experts; leave it out, or use moe.moe_layer_freq=2"


def _no_activation_alone(config: Config) -> str:
    """Why the experts' activation cannot be computed again by itself; empty if it can."""
    moe = config.moe
    if "moe" in config.model.recompute_modules:
        return "beside moe, which computes all of the experts again"
    if moe.backend is not MoeBackend.grouped:
        return f"with moe.backend={moe.backend.value}, whose experts are DeepSpeed's own"
    if moe.moe_expert_dropout:
        return f"with moe.moe_expert_dropout={moe.moe_expert_dropout}, between whose matrices autograd keeps all"
    return ""
