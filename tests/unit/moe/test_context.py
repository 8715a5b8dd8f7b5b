"""Auxiliary losses on a whole model, and what is recorded about the load of experts."""

from __future__ import annotations

import json
import math

import pytest
import torch

from recipes.config import AuxLossScope, Config, MoeBackend
from tests.ranks import forked
from tests.tiny import tiny_moe_config
from tests.unit.moe import oracle


def test_load_metrics_by_hand():
    """Two layers, four experts: loads 6 2 0 0 of mean 2, and 2 2 2 2."""
    from recipes.moe.context import load_metrics

    counts_NE = torch.tensor([[6.0, 2.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    sums = {
        "tokens": torch.tensor([4.0, 4.0]),
        "dropped": torch.tensor([3.0, 1.0]),
        "entropy": torch.tensor([4 * math.log(2), 4 * math.log(4)]),
    }
    gates_NE = torch.tensor([[3.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
    diverged = load_metrics(counts_NE, gates_NE * math.nan, sums, torch.ones(2, 4), [4, 4])
    assert diverged["moe/gate_mean_per_expert"] == [[None] * 4] * 2  # JSON has no other word for it
    metrics = load_metrics(counts_NE, gates_NE, sums, torch.tensor([[3, 1, 2, 2], [1, 1, 1, 1]]), [4, 4])
    assert metrics["moe/gate_mean"] == pytest.approx((4 / 8 + 2 / 8) / 2)
    assert metrics["moe/gate_mean_per_expert"] == [[0.5, 0.5, None, None], [0.25] * 4]
    assert metrics["moe/routing_change"] == pytest.approx((0.5 * (0.375 + 0.125 + 0.25 + 0.25) + 0) / 2)
    assert metrics["moe/max_vio"] == pytest.approx((6 - 2) / 2)
    assert metrics["moe/drop_rate"] == pytest.approx(4 / 16)
    assert metrics["moe/router_entropy"] == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert metrics["moe/dead_experts"] == 2
    assert metrics["moe/tokens_per_expert"] == [[6, 2, 0, 0], [2, 2, 2, 2]]
    assert all(type(count) is int for row in metrics["moe/tokens_per_expert"] for count in row)


def routed_model(config: Config):
    """A model and its ids."""
    from recipes.model.gpt import GPT

    ids = torch.randint(0, 60, (config.train.micro_batch_size, 17), generator=torch.Generator().manual_seed(0))
    return GPT(config), (ids[:, :-1], ids[:, 1:].contiguous())


def router_gradients(config: Config) -> dict[int, float]:
    """The norm of the gradient of each layer's router when the language loss counts nothing."""
    model, inputs = routed_model(config)
    model.moe.load({"previous_counts": [[9, 4, 2, 1]] * 2})  # of the step before; equal ones would pull nowhere
    (model(*inputs).sum() * 0).backward()
    routed = {block.layer: block.inner.mlp.routed for block in model.blocks if block.layer in model.moe.layers}
    stock = config.moe.backend is MoeBackend.deepspeed
    weights = {layer: m.deepspeed_moe.gate.wg.weight if stock else m.router for layer, m in routed.items()}
    return {layer: weight.grad.norm().item() for layer, weight in weights.items()}


@pytest.mark.parametrize("scope", AuxLossScope)
@pytest.mark.parametrize("backend", MoeBackend)
@forked
def test_auxiliary_losses_reach_every_router_in_proportion(backend, scope):
    def norms(balance: float, z: float) -> dict[int, float]:
        config = tiny_moe_config(moe__moe_layer_freq=1, moe__backend=backend, moe__aux_loss_scope=scope)
        config.moe.moe_aux_loss_coeff, config.moe.moe_z_loss_coeff = balance, z
        return router_gradients(config)

    assert norms(0, 0) == {0: 0.0, 1: 0.0}
    for single, double in (((0.1, 0), (0.2, 0)), ((0, 0.1), (0, 0.2))):
        one, two = norms(*single), norms(*double)
        assert one.keys() == {0, 1}
        for layer, norm in one.items():
            assert norm > 1e-6
            assert two[layer] == pytest.approx(2 * norm, rel=1e-5)


@forked
def test_the_reported_losses_leave_the_auxiliary_ones_out():
    losses, evaluated = [], []
    for coefficient in (0.0, 1.0):
        config = tiny_moe_config(moe__moe_aux_loss_coeff=coefficient, moe__moe_z_loss_coeff=coefficient)
        model, inputs = routed_model(config)
        losses.append(model(*inputs).detach())
        with torch.no_grad():
            evaluated.append(model.eval()(*inputs))
    assert torch.equal(*losses) and torch.equal(*evaluated)
    assert torch.allclose(losses[0], evaluated[0])


@forked
def test_recorded_losses_are_means_over_layers_of_the_oracles():
    """Three layers of experts among six, two micro-batches."""
    config = tiny_moe_config(model__num_layers=6, train__micro_batch_size=4)
    model, inputs = routed_model(config)
    seen: list[tuple[int, torch.Tensor]] = []
    for block in model.blocks:
        if block.layer in model.moe.layers:
            hook = lambda module, args, layer=block.layer: seen.append((layer, args[0].detach()))  # noqa: E731
            block.inner.mlp.register_forward_pre_hook(hook)
    model(*inputs)
    model(*(part.flip(0).roll(1, 1) for part in inputs))
    with torch.no_grad():
        model.eval()(*inputs)  # evaluation is not recorded
    metrics = model.moe.finish_step()
    balances, z_losses, entropies = [], [], []
    counts = {layer: [0] * 4 for layer in (0, 2, 4)}
    for layer, x_SBH in seen[:6]:
        weights = {"router": model.blocks[layer].inner.mlp.routed.router.detach().double()}
        logits_TE = x_SBH.reshape(-1, 32).double() @ weights["router"].t()
        probs_TE = torch.softmax(logits_TE, 1)
        ids = logits_TE.topk(2, dim=1).indices.reshape(-1).tolist()
        step = [ids.count(expert) for expert in range(4)]
        counts[layer] = [a + b for a, b in zip(counts[layer], step, strict=True)]
        balances.append(oracle.balance(probs_TE, step).item())
        z_losses.append(oracle.z_loss(logits_TE).item())
        entropies.append(-(probs_TE * probs_TE.log()).sum(1).mean().item())
    assert metrics["load_balancing_loss"] == pytest.approx(sum(balances) / 6, rel=1e-5)
    assert metrics["z_loss"] == pytest.approx(sum(z_losses) / 6, rel=1e-5)
    assert metrics["moe/router_entropy"] == pytest.approx(sum(entropies) / 6, rel=1e-5)
    assert metrics["moe/tokens_per_expert"] == list(counts.values())
    assert sum(map(sum, counts.values())) == 3 * 2 * 2 * 4 * 16
    assert metrics["moe/drop_rate"] == 0
    assert metrics["moe/gate_mean"] == pytest.approx(0.5)  # two that add up to 1
    moved = [sum(abs(count / 256 - 0.25) for count in row) / 2 for row in counts.values()]
    assert metrics["moe/routing_change"] == pytest.approx(sum(moved) / 3)  # from even loads
    assert model.moe.previous_NE.tolist() == list(counts.values())
    assert not model.moe.report.any()


def bias_config() -> Config:
    """Biases only: no auxiliary loss."""
    config = tiny_moe_config(moe__moe_layer_freq=1, moe__moe_aux_loss_coeff=0.0, moe__moe_z_loss_coeff=0.0)
    config.moe.moe_router_enable_expert_bias, config.moe.moe_router_bias_update_rate = True, 0.25
    return config


@forked
def test_biases_move_once_per_applied_step_by_the_counts_of_all_its_micro_batches():
    model, inputs = routed_model(bias_config())
    assert model.moe.bias(0).tolist() == [0.0] * 4
    for _ in range(2):
        model(*inputs)
    assert not model.moe.bias_NE.any(), "moved before the step was over"
    counts_NE = torch.tensor(model.moe.finish_step()["moe/tokens_per_expert"])
    expected_NE = 0.25 * torch.sign(counts_NE.double().mean(1, keepdim=True) - counts_NE)
    expected_NE -= expected_NE.mean(1, keepdim=True)
    assert counts_NE.sum(1).tolist() == [2 * 2 * 8 * 16] * 2 and expected_NE.any()
    assert model.moe.bias_NE.tolist() == expected_NE.tolist()

    model(*inputs)
    skipped_NE = torch.tensor(model.moe.finish_step(applied=False)["moe/tokens_per_expert"])
    assert (skipped_NE != counts_NE / 2).any(), "the biases do not reach the choice"
    assert model.moe.bias_NE.tolist() == expected_NE.tolist() and torch.equal(model.moe.previous_NE, counts_NE)
    with torch.no_grad():
        model.eval()(*inputs)
    model.moe.finish_step()
    assert model.moe.bias_NE.tolist() == expected_NE.tolist(), "evaluation moved them"


@forked
def test_biases_stay_fp64_when_the_model_is_cast():
    model, inputs = routed_model(bias_config())
    model.moe.bias_NE += 1.0 + 2.0**-40  # no fp32 number
    before = model.moe.bias_NE.clone()
    model.bfloat16()(*inputs)
    assert model.moe.bias_NE.dtype == torch.float64 and torch.equal(model.moe.bias_NE, before)
    assert not {"bias_NE"} & dict(model.named_buffers()).keys()  # nor would an optimizer or a cast find them
    other, _ = routed_model(bias_config())
    other.bfloat16().moe.load(json.loads(json.dumps(model.moe.state())))
    assert other.moe.bias_NE.dtype == torch.float64 and torch.equal(other.moe.bias_NE, before)


@forked
def test_the_weight_of_a_loss_follows_its_ramp():
    norms = []
    for steps in (0, 4, 9):
        config = tiny_moe_config(moe__moe_aux_loss_coeff=0.1, moe__moe_z_loss_coeff=0.0)
        config.moe.moe_loss_coeff_ramp, config.moe.moe_aux_loss_coeff_end = [1, 9], 0.3
        model, inputs = routed_model(config)
        model.moe.load({"previous_counts": [[9, 4, 2, 1]], "steps": steps})
        (model(*inputs).sum() * 0).backward()
        norms.append(model.blocks[0].inner.mlp.routed.router.grad.norm().item())
    assert norms[1] / norms[0] == pytest.approx(2.0, rel=1e-4)  # step 5 of 1 .. 9
    assert norms[2] / norms[0] == pytest.approx(3.0, rel=1e-4)


@forked
def test_state_is_json_and_comes_back():
    from recipes.groups import enter
    from recipes.moe.context import MoeContext
    from recipes.topology import Layout

    config = tiny_moe_config()
    first, second = MoeContext(config, enter(Layout(1))), MoeContext(config, enter(Layout(1)))
    first.previous_NE.copy_(torch.tensor([[5, 0, 2**40, 1]]))
    first.bias_NE.copy_(torch.tensor([[0.1, -1e-3 / 3, 2.0**-126, 0.0]]))
    first.steps = 7
    second.load(json.loads(json.dumps(first.state())))
    assert torch.equal(first.previous_NE, second.previous_NE) and second.previous_NE.dtype == torch.int64
    assert torch.equal(first.bias_NE, second.bias_NE) and second.bias_NE.dtype == torch.float64 and second.steps == 7
    with pytest.raises(ValueError, match=r"bias of \[3\] experts by layer, the model has \[4\]"):
        second.load({"bias": [[0.0] * 3]})
