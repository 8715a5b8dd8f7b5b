"""Dropout inside experts: gradients, which activations, and only in training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from recipes.config import Activation
from tests.ranks import forked
from tests.unit.moe.layers import build, layer_config, random_weights


@pytest.mark.parametrize("sizes", [[2, 0, 1], [0, 3], [1], [0, 0]])
def test_gradients_by_finite_differences(sizes):
    from recipes.moe.expert_dropout import GroupedLinear

    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(len(sizes), 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *tensors: GroupedLinear.apply(*tensors, sizes), (x, w))


@pytest.mark.parametrize("activation", Activation)
@forked
def test_the_same_activations_are_dropped_as_by_hand(activation):
    """Against one expert at a time with the mask that the tracked generator draws."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    config = layer_config(moe__moe_expert_dropout=0.4, model__activation=activation, moe__moe_router_topk=1)
    config.moe.moe_router_pre_softmax = True
    layer = build(config, random_weights(config))
    x = torch.randn(4, 3, 8, requires_grad=True)
    states = get_cuda_rng_tracker().get_states()
    out, _ = layer(x)
    other, _ = layer(x)
    assert not torch.equal(out, other), "nothing was drawn"
    (grads,) = (torch.autograd.grad(out.sum(), [x, layer.routed.w1_LGH, layer.routed.w2_LHF, layer.routed.router]),)

    get_cuda_rng_tracker().set_states(states)
    with get_cuda_rng_tracker().fork():
        mask_RF = F.dropout(torch.ones(12, 6), 0.4)
    routing, _ = layer.routed.choose(x.view(12, 8), layer.routed.router, (4, 3), True)
    order = torch.argsort(routing.ids_TK[:, 0], stable=True)
    rows = []
    for row, t in enumerate(order.tolist()):
        w1, w2 = (stack[routing.ids_TK[t, 0]] for stack in (layer.routed.w1_LGH, layer.routed.w2_LHF))
        h = w1 @ x.view(12, 8)[t]
        a = F.silu(h[:6]) * h[6:] if activation is Activation.swiglu else F.gelu(h)
        rows.append(routing.gates_TK[t] * (w2 @ (a * mask_RF[row])))
    expected = torch.stack(rows)[torch.argsort(order)].view(out.shape)
    torch.testing.assert_close(out, expected)
    layer.routed.train()
    loss = layer.context.auxiliary(expected, 0, routing, (4, 3)).sum()
    wanted = torch.autograd.grad(loss, [x, layer.routed.w1_LGH, layer.routed.w2_LHF, layer.routed.router])
    for found, right in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)

    plain = build(
        layer_config(model__activation=activation, moe__moe_router_topk=1, moe__moe_router_pre_softmax=True),
        random_weights(config),
    )
    assert torch.equal(layer.eval()(x)[0], plain.eval()(x)[0])
