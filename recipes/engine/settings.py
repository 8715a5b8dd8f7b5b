"""From the run description to DeepSpeed's configuration and the optimizer's parameter groups."""

from __future__ import annotations

import math
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param

from recipes.config import Config, OptimizerName, Precision
from recipes.logical import LocalParameter, num_moe_experts
from recipes.topology import Layout, used_zero_stage


def deepspeed_settings(config: Config, layout: Layout) -> dict[str, Any]:
    """DeepSpeed's configuration; `deepspeed.extra` is merged in last (validation has refused the keys that we own)."""
    bf16, stage = config.train.precision is Precision.bf16, used_zero_stage(config, layout)
    own_optimizer = bf16 and stage == 1 and not config.zero.offload_optimizer  # BF16_Optimizer
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": config.zero.reduce_bucket_size,
        "allgather_bucket_size": config.zero.allgather_bucket_size,
        "overlap_comm": config.zero.overlap_comm,
        "contiguous_gradients": True,  # without it ZeRO-1 gradients can be wrong
        "round_robin_gradients": False,
    }
    if config.zero.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    accumulation = config.train.global_batch_size // (config.train.micro_batch_size * layout.data_parallel_size)
    settings: dict[str, Any] = {
        "train_batch_size": config.train.global_batch_size,
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        # ZeRO-0, and its bf16 optimizer in place of ZeRO-1, are clipped by Engine, by a norm in which every expert counts once.
        "gradient_clipping": config.optimizer.clip_grad if stage and not own_optimizer else 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
        # Between stages every tensor-parallel rank has its own hidden states, or all have the same.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
    }
    if bf16 and stage:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"  # else ranks add up gradients rounded to bf16
    return merge(settings, config.deepspeed.extra)


def merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `extra` added, section by section."""
    merged = dict(base)
    for key, value in extra.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def expert_lr_scale(config: Config, name: str) -> float:
    """Of the logical tensor `name` of an expert, as a multiple of the dense weights' learning rate.

    Left to us it is the square root of an expert's share of the batch (Malladi et al. 2022, arXiv 2205.10287).
    """
    moe, layer = config.moe, int(name.split(".")[1])
    given = moe.moe_expert_lr_scale
    return math.sqrt(moe.moe_router_topk / num_moe_experts(config, layer)) if given is None else given


def make_optimizer(config: Config, parameters: list[LocalParameter], layout: Layout) -> torch.optim.Optimizer:
    """AdamW or SGD.

    Groups: decay and no decay, each again of what is divided over tensor-parallel ranks or tied over pipeline stages, routers, and
    experts, whose name must be DeepSpeed's key of their process groups, again by learning rate. A group's learning rate is
    `lr_scale` times that of the step; see Engine.gradient_norm for `copies`.
    """
    settings = config.optimizer
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    for entry in parameters:
        decay, experts = entry.weight_decay, is_moe_param(entry.parameter)
        name, lr_scale = ("decay" if decay else "no_decay") + "_sharded" * entry.sharded + "_tied" * entry.tied, 1.0
        router = bool(entry.pieces) and entry.pieces[0].name.endswith(".moe.router.weight")
        if router:
            name, lr_scale = "router", config.moe.moe_router_lr_scale
        if experts:
            name = entry.parameter.group_name  # type: ignore[attr-defined]
            lr_scale = expert_lr_scale(config, entry.pieces[0].name)
            assert decay
        weight_decay = settings.weight_decay if decay else 0.0
        group = groups.setdefault((name, lr_scale), {"params": [], "name": name, "weight_decay": weight_decay})
        group["lr_scale"] = lr_scale
        whole = not experts and not entry.sharded
        group["tied"] = entry.tied
        group["copies"] = (layout.tensor_parallel_size if whole else 1) * (2 if entry.tied else 1)
        group["params"].append(entry.parameter)
        if experts:
            group["moe"] = True
    members = list(groups.values())
    # Each step sets the learning rate; at 0 a step that DeepSpeed takes while it starts changes nothing.
    if settings.name is OptimizerName.sgd:
        return torch.optim.SGD(members, lr=0.0)
    betas = (settings.adam_beta1, settings.adam_beta2)
    return torch.optim.AdamW(members, lr=0.0, betas=betas, eps=settings.adam_eps, fused=True)
