"""What the mix of branches will be: its description and its cost. Pure arithmetic, no torch."""

from __future__ import annotations

import dataclasses

from recipes.config import BtmConfig, Config, MoeConfig
from recipes.data.dataset import DatasetInfo
from recipes.plan.size import flops_per_token


def mix_moe(btm: BtmConfig, experts: int) -> MoeConfig:
    """The group `moe` of the mix: an expert per branch, gates from a softmax over the chosen (sec. 2.2).

    The gate of a single choice is its probability among all, as in Switch, lest routers learn nothing: a mix of equal branches
    is then not that branch at first.
    """
    top_k = min(btm.mix_topk, experts)
    return MoeConfig(
        num_moe_experts=experts,
        moe_router_topk=top_k,
        moe_router_pre_softmax=top_k == 1,  # over one chosen expert the softmax would be 1
        moe_aux_loss_coeff=btm.mix_aux_loss_coeff,
        moe_router_lr_scale=btm.mix_router_lr_scale,
        moe_expert_lr_scale=btm.mix_expert_lr_scale,
        moe_layer_freq=btm.mix_layer_freq,
        moe_layer_offset=btm.mix_layer_freq - 1,
    )


def as_mix(config: Config, experts: int) -> Config:
    """The complete description with the experts of a mix in place of the dense feed-forward parts."""
    moe = dataclasses.replace(mix_moe(config.btm, experts), moe_ffn_hidden_size=config.model.ffn_hidden_size)
    parallel = dataclasses.replace(config.parallel, expert_tensor_parallel_size=1)
    return dataclasses.replace(config, moe=moe, parallel=parallel)


def mix_cost(base: Config, info: DatasetInfo | None) -> float:
    """FLOPs per token of the mix that a complete description asks for, as a multiple of the dense model's; 1 without one."""
    if not base.btm.mix_share:
        return 1.0
    domains = base.data.domain_weights or (() if info is None else info.domains)
    shared = [domain for domain in domains if domain not in base.btm.add_domains]
    count = (base.btm.num_branches or len(shared)) + len(base.btm.add_domains) - len(base.btm.remove_domains)
    count += base.btm.mix_seed_expert
    return flops_per_token(as_mix(base, count)) / flops_per_token(base)
