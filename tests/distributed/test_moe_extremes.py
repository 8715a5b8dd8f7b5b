"""Experts without tokens, with all tokens, ranks with different numbers of them: nothing hangs, everything is the oracle's."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.config import AuxLossScope, Config, MoeBackend, Normalization, OptimizerName, TokenDropPolicy
from tests.distributed.test_gradients import check, merged, worst
from tests.tiny import tiny_config, tiny_moe_config
from tests.unit.moe import oracle
from tests.unit.moe.layers import build, gradients, layer_config, random_weights

pytestmark = pytest.mark.distributed
BOUND = 1e-5
LAYOUTS = [(2, 1), (2, 2), (4, 2), (4, 4)]  # ranks, expert parallel


@dataclass
class LayerCase:
    """One layer; `tokens` of each rank; `routing`: spread, crowded (all to the same experts), idle (expert 3 gets none)."""

    config: Config
    tokens: list[int]
    routing: str

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and output gradients of all ranks, [T, 1, H]."""
        generator = torch.Generator().manual_seed(5)
        shape = (sum(self.tokens), 1, self.config.model.hidden_size)
        return torch.rand(shape, generator=generator) + 0.1, torch.randn(shape, generator=generator)

    @property
    def weights(self) -> oracle.Weights:
        """Of all experts, in float64."""
        weights = random_weights(self.config)
        router = weights["router"]
        if self.routing == "crowded":
            router.copy_(0.1 * torch.arange(len(router), 0, -1)[:, None].expand_as(router))
        if self.routing == "idle":
            router[3] = -3.0
        return weights


def layer_case(backend: MoeBackend, tokens: list[int], routing: str, topk: int, **changes: Any) -> LayerCase:
    world_size = len(tokens)
    assert sum(tokens) % world_size == 0  # so that they are global batch x sequence
    config = layer_config(
        sum(tokens) // world_size, world_size, train__micro_batch_size=1, moe__backend=backend, **changes
    )
    config.moe.moe_router_topk, config.moe.moe_router_pre_softmax = topk, topk == 1
    return LayerCase(config, tokens, routing)


def layer_on_ranks(rank: int, world_size: int, cases: list[LayerCase]) -> list[dict[str, Any]]:
    """This rank's outputs, gradients and the metrics of one training step, and its output in evaluation."""
    from recipes.launcher import rank_environment
    from recipes.topology import layout_of
    from recipes.train.job import start_process

    start_process(tiny_config(), rank_environment(os.environ))
    results = []
    for case in cases:
        layout = layout_of(case.config, world_size)
        layer = build(case.config, case.weights, layout)
        x, pull = (whole.split(case.tokens)[rank] for whole in case.inputs())
        x = x.clone().requires_grad_()
        out, _ = layer(x)
        (world_size * (out * pull).sum()).backward()
        found = {"out": out.detach(), "x": x.grad / world_size}
        grads = {name: grad / world_size for name, grad in gradients(layer, case.config).items()}
        metrics = layer.context.finish_step()
        with torch.no_grad():
            evaluated = layer.eval()(x)[0]
        results.append({"rows": found, "grads": grads, "metrics": metrics, "evaluated": evaluated})
    return results


def oracle_of(case: LayerCase) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[oracle.Routed]]:
    """Output and input gradient of all tokens, gradients of the weights, from one process in float64; routing by rank."""
    moe, (x, pull) = case.config.moe, case.inputs()
    exact = {name: tensor.clone().requires_grad_() for name, tensor in ({"x": x.double()} | case.weights).items()}
    by_probability = moe.moe_token_drop_policy is TokenDropPolicy.probs
    options = (moe.moe_router_topk, moe.moe_router_pre_softmax, moe.moe_expert_capacity_factor, 0, by_probability)
    parts = [oracle.moe_layer(rows, exact, *options) for rows in exact["x"].split(case.tokens)]
    probs_TE = torch.cat([part.probs_TE for part in parts])
    match moe.aux_loss_scope:
        case AuxLossScope.micro_batch:
            balance = oracle.balance(probs_TE, counts(parts))
        case AuxLossScope.global_batch:
            balance = oracle.balance(probs_TE, [1] * moe.num_moe_experts)
        case AuxLossScope.sequence:  # one sequence per rank
            balance = sum(oracle.balance(part.probs_TE, part.counts_E) for part in parts) / len(parts)
    z_loss = oracle.z_loss(torch.cat([part.logits_TE for part in parts]))
    out = torch.cat([part.out_SBH for part in parts])
    ((out * pull).sum() + moe.moe_aux_loss_coeff * balance + moe.moe_z_loss_coeff * z_loss).backward()
    grads = {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in exact.items()}
    return {"out": out.detach(), "x": grads.pop("x")}, grads, parts


def counts(parts: list[oracle.Routed]) -> list[int]:
    """Choices of each expert over all ranks."""
    return [sum(column) for column in zip(*(part.counts_E for part in parts), strict=True)]


def check_layer(case: LayerCase, results: list[dict[str, Any]]) -> None:
    rows, grads, parts = oracle_of(case)
    found = {key: torch.cat([result["rows"][key] for result in results]) for key in rows}
    error, name = worst(found, rows)
    assert error <= BOUND, f"{name} is off by {error:.1e}"
    total: dict[str, torch.Tensor] = {}
    for result in results:
        for name, grad in result["grads"].items():
            total[name] = total.get(name, 0) + grad
    error, name = worst(total, grads)
    assert error <= BOUND, f"gradient of {name} is off by {error:.1e}"
    for expert in (e for e, count in enumerate(counts(parts)) if count == 0):
        assert not any(total[name].any() for name in total if name.startswith(f"experts.{expert}."))
    dropped = 1 - sum(len(part.kept) for part in parts) / sum(counts(parts))
    for metrics in (result["metrics"] for result in results):
        assert metrics["moe/tokens_per_expert"][0] == counts(parts)
        assert metrics["moe/drop_rate"] == pytest.approx(dropped)
    evaluated = torch.cat([result["evaluated"] for result in results])
    assert worst({"out": evaluated}, {"out": rows["out"]})[0] <= BOUND


@pytest.mark.parametrize("backend", MoeBackend)
@pytest.mark.parametrize(("world_size", "expert_parallel"), LAYOUTS)
def test_any_spread_of_tokens_is_the_oracles(run_ranks, world_size, expert_parallel, backend):
    spreads = [[3, 3], [7, 1], [1, 5], [1, 1]] if world_size == 2 else [[2, 2, 2, 2], [9, 1, 1, 5], [1, 1, 1, 1]]
    cases = [
        layer_case(backend, tokens, routing, topk, parallel__expert_model_parallel_size=expert_parallel)
        for tokens in spreads
        for topk in (1, 2, 3)
        for routing in ("spread", "crowded", "idle")
    ]
    for case, scope in zip(cases, itertools.cycle(AuxLossScope)):
        case.config.moe.aux_loss_scope = scope
    results = run_ranks("tests.distributed.test_moe_extremes:layer_on_ranks", world_size, cases)
    for case, *outcome in zip(cases, *results, strict=True):
        check_layer(case, outcome)
    if world_size == 2:  # the comparison can fail
        results[1][0]["grads"]["router"] *= 1.001
        with pytest.raises(AssertionError, match="gradient of router"):
            check_layer(cases[0], [rank[0] for rank in results])


@pytest.mark.parametrize(("world_size", "expert_parallel"), LAYOUTS)
def test_dropped_tokens_do_not_travel(run_ranks, world_size, expert_parallel):
    """Each rank turns away its own tokens; the others pass any expert as if the dropped ones were not there."""
    cases = []
    for policy, factor, routing, topk in itertools.product(
        TokenDropPolicy, (0.1, 1.0), ("spread", "crowded", "idle"), (1, 2)
    ):
        changes = {"moe__moe_expert_capacity_factor": factor, "moe__moe_eval_capacity_factor": factor}
        changes |= {"moe__moe_token_drop_policy": policy, "parallel__expert_model_parallel_size": expert_parallel}
        tokens = [5, 1, 7, 3][:world_size]
        cases.append(layer_case(MoeBackend.grouped, tokens, routing, topk, **changes))
    results = run_ranks("tests.distributed.test_moe_extremes:layer_on_ranks", world_size, cases)
    for case, *outcome in zip(cases, *results, strict=True):
        check_layer(case, outcome)
    assert results[0][2]["metrics"]["moe/drop_rate"] > 0


@dataclass
class EngineCase:
    """A training run of three AdamW steps in which rank r has `shapes[r]` = (sequences, tokens per sequence)."""

    config: Config
    shapes: list[tuple[int, int]]

    def batches(self, step: int) -> list[torch.Tensor]:
        """Token ids of each rank, [B, S + 1]."""
        generator = torch.Generator().manual_seed(step)
        return [torch.randint(0, 60, (batch, length + 1), generator=generator) for batch, length in self.shapes]


def crowd(model: Any) -> None:
    """Let every token score alike: the layers' input gets a constant part, which the router looks at alone."""
    with torch.no_grad():
        for number in model.moe.layers:
            block = model.blocks[number].inner
            block.pre_mlp_layernorm.bias.fill_(1.0)
            routed = block.mlp.routed
            router = routed.router if hasattr(routed, "router") else routed.deepspeed_moe.gate.wg.weight
            router.copy_(0.05 * torch.arange(len(router), 0, -1)[:, None].expand_as(router))


def part_of_loss(model: Any, batches: list[torch.Tensor], rank: int) -> torch.Tensor:
    labels = sum(batch[:, 1:].numel() for batch in batches)
    mine = batches[rank]
    return model(mine[:, :-1].contiguous(), mine[:, 1:].contiguous()).sum() / labels


def engine_on_ranks(rank: int, world_size: int, cases: list[EngineCase]) -> list[dict[str, Any]]:
    """Gradients of the first step, weights after three; on rank 0 also the gradients of one process without an engine."""
    from recipes.engine import Engine
    from recipes.launcher import rank_environment
    from recipes.model.gpt import GPT, registry
    from recipes.topology import layout_of
    from recipes.train.job import start_process

    start_process(tiny_config(), rank_environment(os.environ))
    results = []
    for case in cases:
        model = GPT(case.config, layout_of(case.config, world_size))
        crowd(model)
        engine = Engine(model, registry(model, case.config), case.config)
        result: dict[str, Any] = {}
        for step in range(3):
            engine.backward(part_of_loss(engine, case.batches(step), rank))
            norm = engine.gradient_norm()
            if step == 0:
                result |= {"grads": engine.gradients(), "norm": norm}
            engine.step(0.01)
            result |= {"moe": model.moe.finish_step()} if step == 0 else {}
        result["weights"] = engine.master_weights()
        engine.close()
        if rank == 0:
            case.config.moe.backend = MoeBackend.grouped
            alone = GPT(case.config)
            crowd(alone)
            sum(part_of_loss(alone, case.batches(0), r) for r in range(world_size)).backward()
            entries = registry(alone, case.config)
            result["reference"] = {p.name: p.read(e.parameter.grad).clone() for e in entries for p in e.pieces}
        results.append(result)
    return results


@pytest.mark.parametrize("backend", MoeBackend)
@pytest.mark.parametrize(("world_size", "expert_parallel"), LAYOUTS)
def test_crowded_experts_train(run_ranks, world_size, expert_parallel, backend):
    """Experts 2 and 3 get nothing: zero gradients, not missing ones; replicas stay the same bits; nothing becomes NaN."""
    even, single = [(1, 16)] * world_size, [(1, 1)] * world_size
    uneven = [(2, 9), (1, 1), (3, 2), (1, 16)][:world_size]
    cases = []
    for stage, shapes in ((0, even), (0, uneven), (1, single), (1, uneven), (2, even)):
        config = tiny_moe_config(zero__stage=stage, train__global_batch_size=world_size, train__micro_batch_size=1)
        config.model.normalization, config.moe.moe_layer_freq = Normalization.LayerNorm, 1
        config.moe.moe_router_topk = 1 + stage % 2
        config.moe.moe_router_pre_softmax = config.moe.moe_router_topk == 1
        config.moe.backend, config.parallel.expert_model_parallel_size = backend, expert_parallel
        config.moe.aux_loss_scope = AuxLossScope.global_batch  # adds up over forward passes of different sizes
        config.optimizer.name, config.optimizer.weight_decay = OptimizerName.adamw, 0.1
        config.optimizer.clip_grad = 1.0
        cases.append(EngineCase(config, shapes))
    results = run_ranks("tests.distributed.test_moe_extremes:engine_on_ranks", world_size, cases)
    for number, case in enumerate(cases):
        grads, reference = merged(results, number, "grads"), results[0][number]["reference"]
        if all(length == 1 for _, length in case.shapes):  # one key to attend to: the rest is rounding around zero
            for name in [name for name in grads if ".attention.q." in name or ".attention.k." in name]:
                assert max(grads.pop(name).abs().max(), reference.pop(name).abs().max()) < 1e-7
        error, name = worst(grads, reference)
        assert error <= BOUND, f"case {number}: gradient of {name} is off by {error:.1e}"
        idle = [name for name in grads if ".experts.2." in name or ".experts.3." in name]
        assert len(idle) == 2 * 2 * 3 and not any(grads[name].any() for name in idle)
        tokens = sum(batch * length for batch, length in case.shapes)
        topk = case.config.moe.moe_router_topk
        assert results[0][number]["moe"]["moe/tokens_per_expert"] == [[tokens, tokens * (topk - 1), 0, 0]] * 2
        assert results[0][number]["moe"]["moe/dead_experts"] == 2 * (4 - topk)
        assert len({rank[number]["norm"] for rank in results}) == 1
        weights = merged(results, number, "weights")
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def evaluate_on_ranks(rank: int, world_size: int, config: Config, data: str, samples: int) -> tuple[Any, Any, int]:
    """Losses over all ranks, the mean of the first samples worked out here, and this rank's number of batches."""
    from recipes.data.dataset import load_dataset
    from recipes.data.loader import EvalSet
    from recipes.launcher import rank_environment
    from recipes.model.gpt import GPT
    from recipes.topology import layout_of
    from recipes.train.evaluate import evaluate
    from recipes.train.job import start_process

    start_process(config, rank_environment(os.environ))
    dataset = load_dataset(data)
    sets = {
        domain: EvalSet(dataset.open(domain, "valid"), 16, samples, 1, rank, world_size) for domain in dataset.domains
    }
    model = GPT(config, layout_of(config, world_size))
    losses = evaluate(model, sets, dataset.eod, config.data)
    config.moe.backend = MoeBackend.grouped
    alone = GPT(config).eval()
    by_hand = {}
    for domain in dataset.domains:
        source = dataset.open(domain, "valid")
        ids = np.stack([source.ids[16 * n : 16 * n + 17] for n in range(samples)])
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            by_hand[domain] = alone(tokens[:, :-1], tokens[:, 1:].contiguous()).sum().item() / (16 * samples)
    return losses, by_hand, len(next(iter(sets.values())))


@pytest.mark.parametrize("backend", MoeBackend)
@pytest.mark.parametrize("world_size", [2, 4])
def test_evaluation_of_three_samples_over_ranks(run_ranks, tiny_data: Path, world_size, backend):
    config = tiny_moe_config(parallel__expert_model_parallel_size=world_size, moe__backend=backend)
    results = run_ranks("tests.distributed.test_moe_extremes:evaluate_on_ranks", world_size, config, str(tiny_data), 3)
    for losses, by_hand, batches in results:
        assert batches == -(-3 // world_size)
        assert losses == results[0][0]
        for domain, loss in by_hand.items():
            assert losses[domain] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("backend", MoeBackend)
def test_a_batch_of_one_token_under_tensor_parallelism(run_ranks, backend):
    """Each rank has half of every expert. (Sharing the positions out is refused: there is one.)"""
    changes = {"parallel__tensor_model_parallel_size": 2, "parallel__expert_tensor_parallel_size": 2}
    changes |= {"model__seq_length": 1, "train__global_batch_size": 1, "train__micro_batch_size": 1}
    cases = [{"config": tiny_moe_config(moe__backend=backend, **changes)}]
    results = run_ranks("gradient_cases", 2, cases)
    check(results, bound=2e-5)
    assert sum(results[1][0]["moe"]["moe/tokens_per_expert"][0]) == 2  # two choices of one token
