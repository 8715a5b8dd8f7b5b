"""One layer against the oracle: output, auxiliary losses, every gradient, and what is recorded."""

from __future__ import annotations

from dataclasses import replace

import torch

from recipes.config import AuxLossScope, Config, RouterType, ScoreFunction, TokenDropPolicy
from recipes.logical import num_moe_experts
from recipes.moe import controls
from tests.distributed.test_gradients import worst
from tests.unit.moe import oracle
from tests.unit.moe.layers import build, gradients, random_weights

BOUND = 1e-5
STEPS = 3  # made before the one that is compared


def options_of(config: Config, bias_E: list[float], tokens_BS: torch.Tensor, layer: int) -> oracle.Options:
    """The description of a layer with as many experts as biases in the oracle's words."""
    moe, assigned = config.moe, None
    keys_T, topk, seed = tokens_BS.t().reshape(-1), moe.moe_router_topk, config.run.seed
    if moe.moe_router_type is RouterType.hash:
        table_VK = controls.hash_table(config.model.vocab_size, len(bias_E), topk, seed, layer)
        assigned = [table_VK[key].tolist() for key in keys_T]
    if moe.moe_router_type is RouterType.random:
        keys_T = controls.prefix_keys(tokens_BS).t().reshape(-1)
        assigned = controls.random_choice(keys_T, controls.salts(len(bias_E), seed, layer), topk).tolist()
    return oracle.Options(
        sigmoid=moe.moe_router_score_function is ScoreFunction.sigmoid,
        renormalise=moe.moe_router_norm_topk_prob,
        scaling=moe.moe_router_topk_scaling_factor or 1.0,
        num_groups=moe.moe_router_num_groups or 1,
        group_topk=moe.moe_router_group_topk or 1,
        bias=bias_E if moe.moe_router_enable_expert_bias else None,
        experts_choose=moe.moe_router_type is RouterType.expert_choice,
        assigned=assigned,
    )


def expected(
    config: Config, x_SBH: torch.Tensor, weights: oracle.Weights, options: oracle.Options, training: bool
) -> oracle.Routed:
    """The oracle's answer."""
    moe = config.moe
    factor = moe.moe_expert_capacity_factor if training else moe.moe_eval_capacity_factor
    by_probability = moe.moe_token_drop_policy is TokenDropPolicy.probs
    settings = (moe.moe_router_topk, moe.moe_router_pre_softmax, factor, moe.moe_min_capacity, by_probability)
    sinkhorn = training and moe.moe_router_type is RouterType.sinkhorn
    return oracle.moe_layer(x_SBH, weights, *settings, options=replace(options, sinkhorn=sinkhorn))


def auxiliary(config: Config, routed: oracle.Routed, previous_E: list[int]) -> torch.Tensor:
    """The weighted auxiliary losses of a step of one micro-batch."""
    match config.moe.aux_loss_scope:
        case AuxLossScope.sequence:
            balance = oracle.sequence_balance(routed)
        case AuxLossScope.micro_batch:
            balance = oracle.balance(routed.probs_TE, routed.counts_E)
        case AuxLossScope.global_batch:
            balance = oracle.balance(routed.probs_TE, previous_E)
    moe, weights = config.moe, []
    for start, end in (
        (moe.moe_aux_loss_coeff, moe.moe_aux_loss_coeff_end),
        (moe.moe_z_loss_coeff, moe.moe_z_loss_coeff_end),
    ):
        first, last = moe.moe_loss_coeff_ramp or (0, 1)
        weights.append(start if end is None else start + (end - start) * (STEPS + 1 - first) / (last - first))
    return weights[0] * balance + weights[1] * oracle.z_loss(routed.logits_TE)


def compare(
    config: Config, seed: int = 0, previous_E: list[int] | None = None, bound: float = BOUND, number: int = 0
) -> oracle.Routed:
    """Output and gradients of one training step of layer `number`, and its output in evaluation, are the oracle's."""
    weights = random_weights(config, seed, number)
    layer = build(config, weights, number=number)
    device, row = layer.context.report.device, layer.context.layers.index(number)
    experts = num_moe_experts(config, number)
    previous_E = previous_E or [1] * experts
    generator = torch.Generator().manual_seed(seed + 1)
    bias_E = (0.3 * torch.randn(experts, generator=generator)).tolist()
    state = layer.context.state() | {"steps": STEPS}
    state["previous_counts"][row], state["bias"][row] = previous_E, bias_E
    layer.context.load(state)
    shape = (config.model.seq_length, config.train.micro_batch_size, config.model.hidden_size)
    tokens_BS = torch.randint(0, config.model.vocab_size, shape[1::-1], generator=generator)
    layer.context.begin(tokens_BS.to(device))
    options = options_of(config, bias_E, tokens_BS, number)
    x_SBH, pull = (torch.randn(shape, generator=generator) for _ in range(2))

    own_SBH = x_SBH.to(device, copy=True).requires_grad_()
    out, _ = layer(own_SBH)
    (out * pull.to(device)).sum().backward()
    exact = {name: tensor.requires_grad_() for name, tensor in ({"x": x_SBH.double()} | weights).items()}
    routed = expected(config, exact["x"], exact, options, training=True)
    ((routed.out_SBH * pull).sum() + auxiliary(config, routed, previous_E)).backward()
    wanted = {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in exact.items()}
    found = gradients(layer, config) | {"x": own_SBH.grad.cpu()}
    error, name = worst(found | {"out": out.detach().cpu()}, wanted | {"out": routed.out_SBH.detach()})
    assert error <= bound, f"{name} is off by {error:.1e}"
    for expert, count in enumerate(routed.counts_E):
        if count == 0:
            assert not any(grad.any() for name, grad in found.items() if name.startswith(f"experts.{expert}."))

    report, most = layer.context.report.tolist(), layer.context.previous_NE.shape[1]
    counts, gates, (tokens, dropped, *_) = report[row][:most], report[row][most : 2 * most], report[row][2 * most :]
    assert counts == routed.counts_E + [0] * (most - experts) and not any(gates[experts:])
    assert tokens == len(routed.chosen) and dropped == sum(routed.counts_E) - len(routed.kept)
    for expert, total in enumerate(gates[:experts]):
        choices = [zip(*row, strict=True) for row in zip(routed.chosen, routed.gates, strict=True)]
        wanted = sum(gate.item() for pairs in choices for chosen, gate in pairs if chosen == expert)
        assert abs(total - wanted) < 1e-4 * max(1, wanted)
    with torch.no_grad():
        evaluated = layer.eval()(own_SBH)[0].cpu()
        wanted_out = expected(config, exact["x"], exact, options, training=False).out_SBH
    assert worst({"out": evaluated}, {"out": wanted_out})[0] <= bound
    assert layer.context.report.tolist() == report  # evaluation is not counted
    return routed
