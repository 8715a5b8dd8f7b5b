"""Runs with experts: 10 steps are 5 + resume + 5 bit for bit; expert parallelism and backend do not show in the files."""

from __future__ import annotations

import copy
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.checkpoint.format import open_checkpoint
from recipes.config import AuxLossScope, Config, MoeBackend, Precision, Resume
from recipes.logical import logical_tensors
from recipes.telemetry.jsonl import read_metrics
from tests.distributed.test_resume import same_bits, stored, training_config

pytestmark = pytest.mark.distributed


def moe_training_config(data: Path, folder: Path, **changes: Any) -> Config:
    """10 steps of a model with 4 experts in layer 0, whose balance loss needs the counts of the step before."""
    config = training_config(data, folder, changes.pop("stage", 1))
    moe = config.moe
    moe.num_moe_experts, moe.moe_layer_freq, moe.moe_ffn_hidden_size = 4, 2, 24
    moe.moe_router_topk, moe.moe_router_pre_softmax = 2, False
    moe.moe_aux_loss_coeff, moe.moe_z_loss_coeff = 0.1, 0.01
    moe.aux_loss_scope = AuxLossScope.global_batch
    moe.backend = changes.pop("backend", MoeBackend.grouped)
    config.parallel.expert_model_parallel_size = changes.pop("expert_parallel", 2)
    config.parallel.tensor_model_parallel_size = changes.pop("tensor_parallel", 1)
    config.parallel.sequence_parallel = config.parallel.tensor_model_parallel_size > 1
    config.parallel.expert_tensor_parallel_size = 1
    config.train.precision = changes.pop("precision", Precision.fp32)
    if counts := changes.pop("counts", None):
        moe.num_moe_experts, moe.num_moe_experts_per_layer, moe.moe_layer_freq = None, counts, 1
        moe.moe_router_enable_expert_bias = moe.backend is MoeBackend.grouped
    assert not changes
    return config


def router_state(folder: Path, step: int) -> Any:
    return open_checkpoint(folder / "checkpoints" / f"step_{step:08d}").trainer["moe"]


def run_and_forget(rank: int, world_size: int, config: Config) -> None:
    """The same run, which leaves the state of the routers out when it resumes."""
    from recipes.moe.context import MoeContext
    from tests.distributed.workers import run_job

    MoeContext.load = lambda self, state: None
    run_job(rank, world_size, config)


def interrupt(run_ranks, config: Config, folder: Path, worker: str = "run_job") -> Path:
    """The run of `config` in two halves."""
    first = copy.deepcopy(config)
    first.run.dir, first.checkpoint.save_final, first.train.steps = str(folder), False, 7
    first.schedule.lr_decay_steps = 10
    run_ranks("run_job", 2, first)
    first.run.resume, first.checkpoint.save_final, first.train.steps = Resume.auto, True, 10
    run_ranks(worker, 2, first)
    return folder


def different(one: Path, other: Path) -> list[str]:
    expected, found = stored(one, 10), stored(other, 10)
    assert expected.keys() == found.keys()
    return [name for name in expected if not same_bits(expected[name], found[name])]


CASES = [
    {"expert_parallel": 2},
    {"expert_parallel": 1},
    {"expert_parallel": 2, "backend": MoeBackend.deepspeed},
    {"expert_parallel": 2, "stage": 0},
    {"expert_parallel": 2, "stage": 2, "precision": Precision.bf16},
    {"expert_parallel": 2, "tensor_parallel": 2},
    {"counts": [4, 6], "expert_parallel": 2, "stage": 2},
    {"counts": [6, 4], "expert_parallel": 2, "precision": Precision.bf16},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(getattr(v, "name", v)) for v in case.values()))
def test_interrupted_run_is_bitwise_the_straight_run(run_ranks, tiny_data, tmp_path, case):
    config = moe_training_config(tiny_data, tmp_path / "straight", **case)
    config.schedule.lr_decay_steps = 10
    run_ranks("run_job", 2, config)
    resumed = interrupt(run_ranks, config, tmp_path / "resumed")
    assert not different(tmp_path / "straight", resumed)
    assert router_state(resumed, 10) == router_state(tmp_path / "straight", 10)
    lines = [read_metrics(folder / "metrics.jsonl") for folder in (tmp_path / "straight", resumed)]
    for key in ("lm_loss", "load_balancing_loss", "z_loss", "grad_norm", "lr", "moe/tokens_per_expert", "moe/max_vio"):
        values = [[(row["step"], row[key]) for row in rows if key in row] for rows in lines]
        assert len(values[0]) == 10 and values[0] == values[1], key
    uniform = [len(set(row["moe/tokens_per_expert"][0])) == 1 for row in lines[0] if "moe/tokens_per_expert" in row]
    assert not any(uniform)


def test_a_run_that_forgets_the_state_of_its_routers_is_another_run(run_ranks, tiny_data, tmp_path):
    config = moe_training_config(tiny_data, tmp_path / "straight")
    config.schedule.lr_decay_steps = 10
    run_ranks("run_job", 2, config)
    forgetful = "tests.distributed.test_moe_resume:run_and_forget"
    resumed = interrupt(run_ranks, config, tmp_path / "resumed", forgetful)
    assert "model:layers.0.moe.router.weight" in different(tmp_path / "straight", resumed)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every tensor but the generators'."""
    tensors = {name: tensor for name, tensor in stored(folder, 10).items() if not name.startswith("rng:")}
    return {name: hashlib.sha256(t.contiguous().view(torch.uint8).numpy()).hexdigest() for name, t in tensors.items()}


def test_layouts_and_backends_write_the_same_tensors(run_ranks, tiny_data, tmp_path):
    """The same state under other expert parallelism, ZeRO stage and backend is the same files: one tensor per expert."""
    config = moe_training_config(tiny_data, tmp_path / "first", expert_parallel=1)
    run_ranks("run_job", 2, config)
    expected = digests(tmp_path / "first")
    names = {name.removeprefix("model:") for name in expected if name.startswith("model:")}
    assert names == logical_tensors(config).keys()
    experts = [name for name in names if ".experts." in name]
    assert len(experts) == 4 * 3 and len({expected[f"model:{name}"] for name in experts}) == 12
    for world_size, layout, stage, backend in (
        (2, {"expert": 2}, 0, MoeBackend.deepspeed),
        (2, {"expert": 1}, 2, MoeBackend.deepspeed),
        (1, {"expert": 1}, 1, MoeBackend.deepspeed),
        (4, {"expert": 2}, 2, MoeBackend.grouped),
        (4, {"expert": 4}, 1, MoeBackend.deepspeed),
        (2, {"tensor": 2, "expert": 1, "expert_tensor": 2}, 0, MoeBackend.grouped),
        (4, {"tensor": 2, "expert": 4, "expert_tensor": 1}, 1, MoeBackend.grouped),
        (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}, 2, MoeBackend.deepspeed),
    ):
        other = copy.deepcopy(config)
        other.moe.backend = backend
        for key, size in layout.items():
            setattr(other.parallel, f"{key}_{'model_parallel' if key != 'expert_tensor' else 'parallel'}_size", size)
        target = tmp_path / f"{world_size}-{layout}-{stage}-{backend.name}"
        run_ranks("resave", world_size, other, stage, str(target))
        assert digests(target) == expected, target.name


def test_layouts_write_the_same_tensors_of_unlike_numbers_of_experts(run_ranks, tiny_data, tmp_path):
    config = moe_training_config(tiny_data, tmp_path / "first", expert_parallel=2, counts=[4, 8])
    run_ranks("run_job", 2, config)
    expected = digests(tmp_path / "first")
    names = {name.removeprefix("model:") for name in expected if name.startswith("model:")}
    assert names == logical_tensors(config).keys()
    for layer, count in enumerate((4, 8)):
        assert len([name for name in names if f"layers.{layer}.moe.experts." in name]) == 3 * count
        assert len(router_state(tmp_path / "first", 10)["bias"][layer]) == count
    for world_size, size, stage in ((1, 1, 1), (2, 1, 2), (4, 4, 0)):
        other = copy.deepcopy(config)
        other.parallel.expert_model_parallel_size = size
        target = tmp_path / f"{world_size}-{size}-{stage}"
        run_ranks("resave", world_size, other, stage, str(target))
        assert digests(target) == expected, target.name
        assert router_state(target, 10) == router_state(tmp_path / "first", 10)
    logits = run_ranks("tests.distributed.test_moe_resume:opened_logits", 1, config.run.dir)[0]
    assert torch.isfinite(logits).all()


def opened_logits(rank: int, world_size: int, folder: str) -> torch.Tensor:
    """Logits of a stored model, opened in one process without an engine or a launcher."""
    from recipes.checkpoint.model import open_model
    from recipes.launcher import Ranks

    for name in Ranks().environment():
        os.environ.pop(name, None)
    model, *_ = open_model(Path(folder))
    with torch.no_grad():
        return model.logits(torch.arange(10)[None]).clone()


def test_a_run_with_experts_on_two_ranks_opens_in_one_process(run_ranks, tiny_data, tmp_path):
    found = {}
    for backend in MoeBackend:
        config = moe_training_config(tiny_data, tmp_path / backend.name, backend=backend)
        config.model.hidden_dropout = config.model.attention_dropout = 0.0
        config.train.steps = 2
        run_ranks("run_job", 2, config)
        found[backend] = run_ranks("tests.distributed.test_moe_resume:opened_logits", 1, config.run.dir)[0]
    torch.testing.assert_close(found[MoeBackend.grouped], found[MoeBackend.deepspeed], rtol=1e-4, atol=1e-4)


def test_logged_losses_leave_the_auxiliary_ones_out(run_ranks, tiny_data, tmp_path):
    rows = []
    for coefficient in (0.0, 1.0):
        config = moe_training_config(tiny_data, tmp_path / f"{coefficient}")
        config.moe.aux_loss_scope = AuxLossScope.micro_batch
        config.moe.moe_aux_loss_coeff = config.moe.moe_z_loss_coeff = coefficient
        config.train.steps, config.optimizer.lr = 1, 0.0
        config.optimizer.min_lr = 0.0
        run_ranks("run_job", 2, config)
        rows.append(
            dict(pair for row in read_metrics(tmp_path / f"{coefficient}" / "metrics.jsonl") for pair in row.items())
        )
    without, with_them = rows
    for key in ("lm_loss", "eval/lm_loss", "load_balancing_loss", "z_loss", "moe/tokens_per_expert"):
        assert without[key] == with_them[key], key
    assert without["load_balancing_loss"] >= 1 and without["z_loss"] > 1
    assert without["grad_norm"] != with_them["grad_norm"]
