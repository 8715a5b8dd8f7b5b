"""A whole layer, in both backends, against the oracle: output, auxiliary losses, every gradient; capacity."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.config import (
    Activation,
    AuxLossScope,
    Config,
    MoeBackend,
    RouterType,
    ScoreFunction,
    SecondExpert,
    TokenDropPolicy,
)
from tests.ranks import forked
from tests.unit.moe.comparing import compare
from tests.unit.moe.layers import build, layer_config, pieces, random_weights


@pytest.mark.parametrize("backend", MoeBackend)
@forked
def test_every_shape_scope_and_order_of_softmax(backend):
    for number, (topk, pre_softmax, scope, activation, shared) in enumerate(
        itertools.product((1, 2, 3), (True, False), AuxLossScope, Activation, (None, 5))
    ):
        if backend is MoeBackend.deepspeed and pre_softmax is (topk > 1):
            continue  # not among what its gates can do
        config = layer_config(moe__backend=backend, model__activation=activation, moe__aux_loss_scope=scope)
        config.moe.moe_router_topk, config.moe.moe_router_pre_softmax = topk, pre_softmax
        config.moe.moe_shared_expert_intermediate_size = shared
        compare(config, seed=number, previous_E=[7, 0, 2, 3])


@forked
def test_scores_groups_and_biases():
    for number, (function, pre_softmax, norm, grouped, biased) in enumerate(
        itertools.product(ScoreFunction, (True, False), (None, True, False), (True, False), (True, False))
    ):
        if not pre_softmax and (function is ScoreFunction.sigmoid or norm is False):
            continue  # refused by the checks of the description
        config = layer_config(moe__num_moe_experts=6, moe__moe_router_topk=2, moe__moe_router_pre_softmax=pre_softmax)
        moe = config.moe
        moe.moe_router_score_function, moe.moe_router_norm_topk_prob = function, norm
        moe.moe_router_enable_expert_bias, moe.moe_router_topk_scaling_factor = biased, 1.5 if number % 2 else None
        if grouped:
            moe.moe_router_num_groups, moe.moe_router_group_topk = 3, 1 + number % 2
        moe.aux_loss_scope = list(AuxLossScope)[number % 3]
        compare(config, seed=number)


@forked
def test_experts_that_choose():
    """Up to every token and down to one; a token may go to all experts or none."""
    for number, (function, topk, factor, activation) in enumerate(
        itertools.product(ScoreFunction, (1, 2, 4), (None, 0.2, 1.5), Activation)
    ):
        config = layer_config(moe__moe_router_type=RouterType.expert_choice, moe__moe_router_topk=topk)
        moe = config.moe
        moe.moe_router_pre_softmax, moe.moe_router_score_function = True, function
        moe.moe_expert_capacity_factor, moe.moe_eval_capacity_factor = factor, 1.0 if number % 2 else None
        moe.moe_router_topk_scaling_factor, config.model.activation = 2.0 if number % 3 == 0 else None, activation
        moe.moe_aux_loss_coeff = 0.0
        routed = compare(config, seed=number)
        assert len(set(routed.counts_E)) == 1  # equally many each


@forked
def test_experts_at_prices():
    for number, (topk, pre_softmax, factor) in enumerate(itertools.product((1, 2), (True, False), (None, 1.0))):
        if topk == 1 and not pre_softmax:
            continue
        config = layer_config(moe__moe_router_type=RouterType.sinkhorn, moe__moe_router_topk=topk)
        config.moe.moe_router_pre_softmax, config.moe.moe_expert_capacity_factor = pre_softmax, factor
        compare(config, seed=number)


NOISE = {
    "moe__moe_input_jitter_eps": 0.5,
    "moe__moe_router_gumbel_scale": 1.0,
    "moe__moe_expert_dropout": 0.5,
    "moe__moe_second_expert": SecondExpert.threshold,
    "moe__moe_router_type": RouterType.sinkhorn,
}


@forked
def test_noise_and_prices_are_for_training_alone():
    weights = random_weights(layer_config())
    x_SBH = torch.randn(4, 3, 8)
    plain = build(layer_config(), weights)
    quiet = plain(x_SBH)[0]
    for key, value in NOISE.items():
        layer = build(layer_config(**{key: value}), weights)
        different = [not torch.equal(layer(x_SBH)[0], quiet) for _ in range(3)]
        assert any(different), f"{key} does nothing"
        assert torch.equal(layer.eval()(x_SBH)[0], plain.eval()(x_SBH)[0]), key


@pytest.mark.parametrize("backend", MoeBackend)
@forked
def test_shared_experts_with_weights_of_their_own(backend):
    for number, (gate, factor, activation) in enumerate(itertools.product((True, False), (None, 1.0), Activation)):
        if backend is MoeBackend.deepspeed and factor is not None:
            continue
        config = layer_config(moe__moe_shared_expert_intermediate_size=5, moe__backend=backend)
        config.moe.moe_shared_expert_gate, config.moe.moe_use_residual = gate, not gate
        config.moe.moe_expert_capacity_factor, config.model.activation = factor, activation
        names = random_weights(config).keys()
        assert ("shared_gate" in names) == gate and ({"coefficient", "coefficient.bias"} <= names) == (not gate)
        compare(config, seed=number)


@forked
def test_routing_without_a_router():
    for number, (kind, topk, factor, shared) in enumerate(
        itertools.product((RouterType.hash, RouterType.random), (1, 2), (None, 1.0), (None, 5))
    ):
        config = layer_config(moe__moe_router_type=kind, moe__moe_router_topk=topk, moe__moe_aux_loss_coeff=0.0)
        config.moe.moe_expert_capacity_factor, config.moe.moe_z_loss_coeff = factor, 0.0
        config.moe.moe_shared_expert_intermediate_size = shared
        assert "router" not in random_weights(config)
        compare(config, seed=number)


@forked
def test_any_number_of_tokens_experts_and_choices():
    @settings(deadline=None, max_examples=60)
    @given(data=st.data(), sequence=st.integers(1, 6), batch=st.integers(1, 3), experts=st.integers(1, 8))
    def check(data, sequence, batch, experts):
        topk = data.draw(st.integers(1, experts))
        factor = data.draw(st.sampled_from([None, 0.3, 1.0, 1.25, 2.0]))
        config = layer_config(
            sequence,
            batch,
            model__hidden_size=4,
            moe__num_moe_experts=experts,
            moe__moe_ffn_hidden_size=data.draw(st.integers(1, 4)),
            moe__moe_router_topk=topk,
            moe__moe_router_pre_softmax=data.draw(st.booleans()),
            moe__moe_expert_capacity_factor=factor,
            moe__moe_eval_capacity_factor=data.draw(st.sampled_from([None, 1.0])),
            moe__moe_min_capacity=data.draw(st.integers(0, 2)),
            moe__moe_token_drop_policy=data.draw(st.sampled_from(TokenDropPolicy)),
        )
        kinds = [kind for kind in RouterType if kind is not RouterType.sinkhorn or sequence * batch > 1]
        moe, kind = config.moe, data.draw(st.sampled_from(kinds))  # prices make all experts alike to a single token
        if kind is RouterType.topk and data.draw(st.booleans()):
            moe.moe_router_score_function, moe.moe_router_pre_softmax = ScoreFunction.sigmoid, True
        moe.moe_router_type, moe.moe_router_enable_expert_bias = (
            kind,
            kind is RouterType.topk and data.draw(st.booleans()),
        )
        if kind is RouterType.expert_choice:
            moe.moe_router_pre_softmax = True
        if data.draw(st.booleans()):
            moe.moe_shared_expert_intermediate_size, moe.moe_use_residual = 3, data.draw(st.booleans())
        compare(config, seed=data.draw(st.integers(0, 99)), bound=1e-3)  # fp32 of one or two products can cancel

    check()


@pytest.mark.parametrize("kind", RouterType)
@forked
def test_gradients_by_finite_differences(kind):
    """Along a random direction of all weights and the input, in fp32; the choice of experts must not change on the way."""
    config = layer_config(3, 1, moe__moe_router_type=kind, moe__moe_aux_loss_coeff=0.0, moe__moe_z_loss_coeff=0.0)
    config.moe.moe_router_pre_softmax, config.moe.moe_shared_expert_intermediate_size = True, 5
    config.moe.moe_use_residual = True
    layer = build(config, random_weights(config))
    layer.context.begin(torch.tensor([[3, 1, 4]]))
    generator = torch.Generator().manual_seed(0)
    x, pull = (torch.randn(3, 1, 8, generator=generator) for _ in range(2))
    tensors = [x.requires_grad_(), *layer.parameters()]
    along = [torch.randn(tensor.shape, generator=generator) for tensor in tensors]

    def moved(step: float) -> tuple[float, list]:
        with torch.no_grad():
            for tensor, direction in zip(tensors, along, strict=True):
                tensor += step * direction
            value = (layer(x)[0].double() * pull).sum().item()
            ids = layer.routed.choose(x.view(3, 8), layer.routed.router, (3, 1), True)[0].chosen_TE.tolist()
            for tensor, direction in zip(tensors, along, strict=True):
                tensor -= step * direction
        return value, ids

    (layer(x)[0] * pull).sum().backward()
    slope = sum(
        (tensor.grad.double() * direction).sum().item() for tensor, direction in zip(tensors, along, strict=True)
    )
    (above, one), (below, other) = moved(1e-3), moved(-1e-3)
    assert one == other and abs(slope) > 0.1
    assert (above - below) / 2e-3 == pytest.approx(slope, rel=2e-3)


@pytest.mark.parametrize("topk", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("backend", MoeBackend)
@forked
def test_short_batches_with_and_without_dropping(backend, topk):
    for tokens, factor in itertools.product((1, 3, 16), (None, 1.0)):
        if backend is MoeBackend.deepspeed and factor is not None:
            continue  # refused by the checks of the description
        config = layer_config(tokens, 1, moe__num_moe_experts=8, moe__moe_router_topk=topk, moe__backend=backend)
        config.moe.moe_router_pre_softmax = topk == 1
        config.moe.moe_expert_capacity_factor = config.moe.moe_eval_capacity_factor = factor
        compare(config)


def crowded(config: Config):
    """A layer whose router sends every token to expert 0, and its tokens."""
    weights = random_weights(config)
    weights["router"].zero_()[0] = 1.0
    tokens = torch.rand(5, 1, config.model.hidden_size, generator=torch.Generator().manual_seed(0)) + 0.1
    return build(config, weights), tokens


@forked
def test_a_full_expert_keeps_the_first_tokens_and_the_others_get_nothing():
    config = layer_config(5, 1, moe__moe_router_topk=1, moe__moe_router_pre_softmax=True)
    config.moe.moe_expert_capacity_factor, config.moe.moe_eval_capacity_factor = 1.0, 2.0
    config.moe.moe_token_drop_policy = TokenDropPolicy.position
    layer, x_SBH = crowded(config)
    out, _ = layer(x_SBH)  # capacity 2 of 5
    assert out[:2].any(-1).all() and not out[2:].any()  # a dropped token is left with its residual
    metrics = layer.context.finish_step()
    assert metrics["moe/tokens_per_expert"][0] == [5, 0, 0, 0] and metrics["moe/drop_rate"] == pytest.approx(3 / 5)
    evaluated, _ = layer.eval()(x_SBH)  # capacity 3
    assert evaluated[:3].any(-1).all() and not evaluated[3:].any()
    assert torch.equal(evaluated[:2], out[:2])


@forked
def test_a_capacity_above_the_number_of_tokens_drops_nothing():
    changes = {"moe__num_moe_experts": 2, "moe__moe_router_topk": 2}
    free = layer_config(4, 1, **changes)
    bound = layer_config(4, 1, moe__moe_expert_capacity_factor=1.5, **changes)
    x_SBH = torch.randn(4, 1, 8)
    outs = [build(config, random_weights(config))(x_SBH)[0] for config in (free, bound)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("backend", MoeBackend)
@forked
def test_a_bf16_layer_routes_in_fp32(backend):
    """bf16 scores would tie (see test_router) and take expert 0."""
    from types import SimpleNamespace

    from recipes.groups import enter
    from recipes.moe.context import MoeContext
    from recipes.moe.layer import MoeLayer
    from recipes.topology import Layout

    config = layer_config(1, 1, moe__backend=backend, moe__moe_router_topk=1, moe__moe_router_pre_softmax=True)
    config.model.hidden_size, config.moe.num_moe_experts = 2, 2
    layer = MoeLayer(SimpleNamespace(params_dtype=torch.bfloat16), config, MoeContext(config, enter(Layout(1))), 0)
    with torch.no_grad():
        for name, parameter, piece in pieces(layer, config):
            value = torch.ones(piece.shape) * (0 if name.startswith("experts.0") else 1)
            piece.write(parameter, torch.tensor([[1.0, 0.0], [1.0, 2.0**-8]]) if name == "router" else value)
    out, _ = layer(torch.ones(1, 1, 2, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16 and out.any()  # expert 0 would give zero
    assert layer.context.report[0, :2].tolist() == [0, 1]
