"""Whole runs in pipeline stages: tied copies at every step, resumed runs, what is stored, stages of unlike length."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path

import pytest
import torch

from recipes.checkpoint.format import open_checkpoint
from recipes.config import Config, OptimizerName, Resume
from recipes.telemetry.jsonl import read_metrics
from tests.distributed.test_gradients import check
from tests.distributed.test_moe_resume import different, interrupt, moe_training_config, router_state
from tests.tiny import tiny_config, tiny_moe_config

pytestmark = pytest.mark.distributed
HERE = "tests.distributed.test_pipeline_runs"
PP2 = {"parallel__pipeline_model_parallel_size": 2}


def tied_copies(rank: int, world_size: int, config: Config) -> list[torch.Tensor]:
    """This stage's copy of the embedding before and after each of five AdamW steps."""
    from recipes.engine import make_engine
    from recipes.launcher import rank_environment
    from recipes.model.gpt import GPT, registry
    from recipes.topology import layout_of
    from recipes.train.job import start_process
    from tests.distributed.workers import accumulate

    start_process(config, rank_environment(os.environ))
    layout = layout_of(config, world_size)
    model = GPT(config, layout)
    engine = make_engine(model, registry(model, config), config)
    weight = model.embedding.table.weight if model.first else model.head.inner.weight
    found = [weight.detach().clone()]
    for step in range(5):
        accumulate(engine, config, rank, step)
        engine.gradient_norm()
        engine.step(0.01)
        found.append(weight.detach().clone())
    engine.close()
    return found


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (4, 1)])
def test_tied_copies_have_the_same_bits_after_every_step(run_ranks, world_size, stage):
    config = tiny_config(train__micro_batch_size=2, zero__stage=stage, optimizer__clip_grad=0.5, **PP2)
    config.model.hidden_dropout, config.optimizer.name = 0.1, OptimizerName.adamw
    first, *others = run_ranks(f"{HERE}:tied_copies", world_size, config)
    assert len(first) == 6 and not torch.equal(first[0], first[-1])
    for other in others:  # of the same stage and of the other one
        for step, (embedding, copy_) in enumerate(zip(first, other, strict=True)):
            assert torch.equal(embedding, copy_), f"unlike after step {step}"


@pytest.mark.parametrize("tied", [True, False])
def test_interrupted_run_is_bitwise_the_straight_run_and_opens_in_one_process(run_ranks, tiny_data, tmp_path, tied):
    """With dropout, biases of routers, experts in the first of two stages; tied over two data-parallel ranks, with ZeRO-1."""
    ranks_of = lambda name, _, *more: run_ranks(name, 4 if tied else 2, *more)  # noqa: E731
    config = moe_training_config(tiny_data, tmp_path / "straight", expert_parallel=1)
    config.parallel.pipeline_model_parallel_size, config.schedule.lr_decay_steps = 2, 10
    config.model.share_embeddings_and_output_weights = tied
    config.moe.moe_router_enable_expert_bias = True
    ranks_of("run_job", 2, config)
    resumed = interrupt(ranks_of, config, tmp_path / "resumed")
    assert not different(tmp_path / "straight", resumed)
    assert router_state(resumed, 10) == router_state(tmp_path / "straight", 10)

    stored = open_checkpoint(resumed / "checkpoints" / "step_00000010")
    assert stored.trainer["config"]["model"]["share_embeddings_and_output_weights"] == tied
    embedding = stored.read("model", "embedding.weight")
    assert ("head.weight" in stored.tensors("model")) == (not tied)
    if not tied:
        assert not torch.equal(stored.read("model", "head.weight"), embedding)
    assert evaluated_alone(run_ranks, config, resumed) == pytest.approx(held_out(resumed)[-1], rel=1e-6)


def held_out(folder: Path) -> list[float]:
    return [row["eval/lm_loss"] for row in read_metrics(folder / "metrics.jsonl") if "eval/lm_loss" in row]


def evaluated_alone(run_ranks, config: Config, folder: Path) -> float:
    """The held-out loss of the finished run when one process goes on with a copy of it, of which only the evaluation is left."""
    alone = copy.deepcopy(config)
    alone.parallel.pipeline_model_parallel_size, alone.train.micro_batch_size = 1, 4
    shutil.copytree(folder, folder.with_name("alone"))
    alone.run.dir, alone.run.resume = str(folder.with_name("alone")), Resume.auto
    metrics = folder.with_name("alone") / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if "eval/lm_loss" not in line))  # as if it had not been made yet
    run_ranks("run_job", 1, alone)
    again = held_out(folder.with_name("alone"))
    assert len(again) == 1
    return again[-1]


@pytest.mark.parametrize(
    ("stages", "ends"), [(2, {"first": 1}), (2, {"last": 1}), (3, {"first": 2}), (4, {"first": 1, "last": 1})]
)
def test_stages_of_unlike_length(run_ranks, stages, ends):
    """Experts in every second layer: in some stages only, at other places in each."""
    cases = []
    for make, zero in ((tiny_config, 0), (tiny_moe_config, 1)):
        config = make(train__micro_batch_size=2, model__num_layers=6, zero__stage=zero, optimizer__clip_grad=0.05)
        config.parallel.pipeline_model_parallel_size = stages
        for end, count in ends.items():
            setattr(config.parallel, f"num_layers_in_{end}_pipeline_stage", count)
        cases.append({"config": config})
    check(run_ranks("gradient_cases", stages, cases), bound=2e-5)


@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_a_stage_without_experts_under_zero_1(run_ranks, expert_parallel):
    """Its optimizer has fewer groups than that of the other stage; a sum per group would wait for ever."""
    config = tiny_moe_config(train__micro_batch_size=2, zero__stage=1, optimizer__clip_grad=0.05, **PP2)
    config.parallel.expert_model_parallel_size = expert_parallel
    check(run_ranks("gradient_cases", 4, [{"config": config}]), bound=2e-5)
