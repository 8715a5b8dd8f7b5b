"""Who holds which expert, that experts differ and everything else does not, and that the optimizer has all of them once."""

from __future__ import annotations

import hashlib
import itertools
import os
from typing import Any

import pytest
import torch

from recipes.config import Config, MoeBackend, OptimizerName
from recipes.logical import expert_counts
from recipes.topology import Layout, Role, layout_of
from tests.tiny import tiny_config, tiny_moe_config

pytestmark = pytest.mark.distributed
HERE = "tests.distributed.test_moe_groups"


@pytest.mark.parametrize(
    ("world_size", "size", "together", "replicas"),
    [
        (2, 1, [[0], [1]], [[0, 1]]),
        (2, 2, [[0, 1]], [[0], [1]]),
        (4, 2, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        (4, 4, [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
    ],
)
def test_groups(world_size, size, together, replicas):
    layout = Layout(world_size, expert_parallel_size=size)
    assert layout.groups(Role.ep) == together
    assert layout.groups(Role.edp) == replicas
    assert all(layout.index(Role.ep, rank) == group.index(rank) for group in together for rank in group)


def start(rank: int) -> None:
    from recipes.launcher import rank_environment
    from recipes.train.job import start_process

    start_process(tiny_config(), rank_environment(os.environ))


def initial_digests(rank: int, world_size: int, config: Config, fault: str | None) -> dict[str, Any]:
    """SHA-256 of every initial logical tensor of this rank. `fault`, if planted: "equal" or "first layer"."""
    from recipes import logical
    from recipes.model import gpt

    start(rank)
    if fault == "first layer":  # where a rank's experts begin follows from the number of the first layer
        pieces, number = logical._moe_pieces, expert_counts(config)[0]
        first = rank % config.parallel.expert_model_parallel_size * number // config.parallel.expert_model_parallel_size
        logical._moe_pieces = lambda *arguments: pieces(*arguments[:-1], first)
    if fault == "equal":
        draw = gpt.initial_value
        zeroth = lambda tensor: type(tensor)(_of_expert_zero(tensor.name), tensor.shape, tensor.std, tensor.init)  # noqa: E731
        gpt.initial_value = lambda tensor, seed: draw(zeroth(tensor), seed)
    model = gpt.GPT(config, layout_of(config, world_size))
    entries = gpt.registry(model, config)
    return {
        piece.name: hashlib.sha256(piece.read(entry.parameter.detach()).contiguous().numpy().tobytes()).hexdigest()
        for entry in entries
        for piece in entry.pieces
    }


def _of_expert_zero(name: str) -> str:
    parts = name.split(".")
    return ".".join("0" if before == "experts" else part for before, part in zip(["", *parts], parts, strict=False))


def check_births(config: Config, results: list[dict[str, str]]) -> None:
    """All experts differ from each other, what several ranks hold is the same, each rank holds its share."""
    size = config.parallel.expert_model_parallel_size
    union: dict[str, str] = {}
    for rank, digests in enumerate(results):
        for layer, count in expert_counts(config).items():
            held = {int(name.split(".")[4]) for name in digests if f"layers.{layer}.moe.experts." in name}
            first, local = rank % size * (count // size), count // size
            assert held == set(range(first, first + local)), f"rank {rank} holds experts {held} of layer {layer}"
        for name, digest in digests.items():
            assert union.setdefault(name, digest) == digest, f"rank {rank} has another {name}"
    experts = [digest for name, digest in union.items() if ".experts." in name]
    assert len(experts) == sum(expert_counts(config).values()) * 3
    assert len(set(experts)) == len(experts), "experts are born equal"


@pytest.mark.parametrize("backend", MoeBackend)
@pytest.mark.parametrize(("world_size", "size"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_experts_are_born_different_and_all_else_equal(run_ranks, world_size, size, backend):
    config = tiny_moe_config(moe__num_moe_experts=8, moe__moe_layer_freq=1, moe__backend=backend)
    config.parallel.expert_model_parallel_size = size
    results = run_ranks(f"{HERE}:initial_digests", world_size, config, None)
    check_births(config, results)
    if world_size == 4 and size == 4:
        one_process = run_ranks(f"{HERE}:initial_digests", 1, config_of_one(config), None)[0]
        assert {name: digest for rank in results for name, digest in rank.items()} == one_process


def config_of_one(config: Config) -> Config:
    config.parallel.expert_model_parallel_size = 1
    return config


def test_experts_born_equal_are_caught(run_ranks):
    config = tiny_moe_config(moe__num_moe_experts=8, parallel__expert_model_parallel_size=2)
    results = run_ranks(f"{HERE}:initial_digests", 2, config, "equal")
    with pytest.raises(AssertionError, match="born equal"):
        check_births(config, results)


@pytest.mark.parametrize("backend", MoeBackend)
def test_every_layer_of_a_pyramid_is_shared_out_by_its_own_number(run_ranks, backend):
    config = tiny_moe_config(moe__num_moe_experts=None, moe__num_moe_experts_per_layer=[4, 8], moe__backend=backend)
    config.moe.moe_layer_freq, config.parallel.expert_model_parallel_size = 1, 2
    check_births(config, run_ranks(f"{HERE}:initial_digests", 2, config, None))
    with pytest.raises(
        RuntimeError, match=r"rank 1: the modules .*layers\.1\.moe\.experts\.6\.gate\.weight \(0 of 768 elements\)"
    ):
        run_ranks(f"{HERE}:initial_digests", 2, config, "first layer")  # the model is not even built


def optimizer_groups(rank: int, world_size: int, configs: list[Config]) -> list[dict[str, Any]]:
    """The optimizer's groups before and behind the engine, and which weights one step of rate 0.1 moved."""
    from recipes.engine import Engine
    from recipes.engine.settings import make_optimizer
    from recipes.model.gpt import GPT, registry

    start(rank)
    outcomes = []
    for config in configs:
        model = GPT(config, layout_of(config, world_size))
        entries = registry(model, config)
        names = {id(entry.parameter): entry.name for entry in entries}
        optimizer = make_optimizer(config, entries, model.groups.layout)
        outcome: dict[str, Any] = {
            "groups": [
                (group["name"], group["weight_decay"], group.get("moe", False), [names[id(p)] for p in group["params"]])
                for group in optimizer.param_groups
            ],
            "trainable": [names[id(p)] for p in model.parameters() if p.requires_grad],
        }
        engine = Engine(model, entries, config)
        outcome["behind"] = [(group["name"], group["weight_decay"]) for group in engine.optimizer.param_groups]
        before = {piece.name: tensor for piece, tensor in engine.master_weights()}
        ids = torch.randint(0, 60, (1, 17), generator=torch.Generator().manual_seed(rank))
        engine.backward(engine(ids[:, :-1], ids[:, 1:].contiguous()).sum() / (16 * world_size))
        engine.gradient_norm()
        engine.step(0.1)
        outcome["moved"] = [
            piece.name for piece, now in engine.master_weights() if not torch.equal(now, before[piece.name])
        ]
        outcome["held"] = list(before)
        outcome["counts"] = model.moe.finish_step()["moe/tokens_per_expert"]
        engine.close()
        outcomes.append(outcome)
    return outcomes


@pytest.mark.parametrize("backend", MoeBackend)
@pytest.mark.parametrize("size", [1, 2])
def test_every_weight_is_in_one_group_of_the_optimizer_and_moves(run_ranks, size, backend):
    configs = []
    for stage, name in itertools.product((0, 1, 2), OptimizerName):
        config = tiny_moe_config(zero__stage=stage, optimizer__name=name, train__micro_batch_size=1)
        config.train.global_batch_size, config.moe.moe_layer_freq = 2, 1
        config.optimizer.weight_decay = 0.1 if name is OptimizerName.adamw else 0.0
        config.parallel.expert_model_parallel_size, config.moe.backend = size, backend
        configs.append(config)
    results = run_ranks(f"{HERE}:optimizer_groups", 2, configs)
    for config, *ranks in zip(configs, *results, strict=True):
        for outcome in ranks:
            members = [name for *_, group in outcome["groups"] for name in group]
            assert sorted(members) == sorted(outcome["trainable"]) and len(set(members)) == len(members)
            assert len({name for name, *_ in outcome["groups"]}) == len(outcome["groups"])
            for name, decay, experts, group in outcome["groups"]:
                assert experts == (name == f"ep_size_{size}")
                assert decay == (0.0 if name == "no_decay" else config.optimizer.weight_decay)
                norms = [member for member in group if "norm" in member]
                assert norms == (group if name == "no_decay" else [])
                inside = [member for member in group if "expert" in member or "w1_LGH" in member or "w2_LHF" in member]
                assert inside == (group if experts else [])
            split = [(name, decay) for name, decay, *_ in outcome["groups"]]
            assert sorted(outcome["behind"]) == sorted(split)
        counts = ranks[0]["counts"]
        moved = {name for outcome in ranks for name in outcome["moved"]}
        held = {name for outcome in ranks for name in outcome["held"]}
        idle = {
            name
            for name in held
            if ".experts." in name and counts[int(name.split(".")[1])][int(name.split(".")[4])] == 0
        }
        assert held - idle == moved - idle
        assert any(".router." in name for name in moved)
