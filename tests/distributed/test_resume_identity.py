"""Refusals and said changes through the command line, and new runs from the weights of another."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from recipes.checkpoint.format import open_checkpoint
from recipes.config import CheckpointLoad
from recipes.telemetry.jsonl import read_metrics
from tests.distributed.launching import ForkedJob, running, tiny_overrides
from tests.distributed.test_moe_resume import moe_training_config
from tests.distributed.test_resume import stored, training_config

pytestmark = pytest.mark.distributed


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Time of change and bytes of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def pretrain(folder: Path, *arguments: str, **environ: str) -> tuple[int, str]:
    job = ForkedJob(list(arguments), folder, **environ)
    with running(job):
        return job.wait(40), job.output()


def test_another_run_is_refused_with_the_folder_untouched_and_accepted_by_name(tiny_data, tmp_path):
    run = tmp_path / "run"
    arguments = tiny_overrides(tiny_data, run, "train.steps=2", "run.resume=auto")
    code, output = pretrain(tmp_path, *arguments, WANDB_MODE="disabled")
    assert code == 0, output
    (run / ".lock").unlink()  # as in a copy
    before = state(run)
    changed = [*arguments, "train.steps=3", "optimizer.weight_decay=0.3", "data.eod_mask_loss=true"]
    code, output = pretrain(tmp_path, *changed)
    assert code == 2 and output.count("error: ") == 1 and "Traceback" not in output
    assert "optimizer.weight_decay=0.3 but the checkpoint has 0.1" in output
    assert "'run.resume_with=[data.eod_mask_loss,optimizer.weight_decay]'" in output
    assert state(run) == before
    code, output = pretrain(tmp_path, *changed, "run.resume_with=[data.eod_mask_loss,optimizer.weight_decay]")
    assert code == 0, output
    said = [line for line in output.splitlines() if line.startswith("resumed with changed ")]
    assert said == [
        "resumed with changed train.steps: 2 -> 3",
        "resumed with changed data.eod_mask_loss: false -> true (accepted by run.resume_with)",
        "resumed with changed optimizer.weight_decay: 0.1 -> 0.3 (accepted by run.resume_with)",
    ]
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if "lm_loss" in row] == [1, 2, 3]


def test_a_refused_start_leaves_no_folder(tiny_data, tmp_path):
    arguments = tiny_overrides(tiny_data, tmp_path / "run", f"checkpoint.load_from={tmp_path / 'nothing'}")
    code, output = pretrain(tmp_path, *arguments)
    assert code == 2 and "no checkpoint here" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (1, 2), (3, 2)])
def test_weights_alone_start_a_new_run(run_ranks, tiny_data, tmp_path, stage, world_size):
    first = training_config(tiny_data, tmp_path / "first", stage=0)
    first.train.steps = 3
    run_ranks("run_job", 1, first)
    folder = tmp_path / "first" / "checkpoints" / "step_00000003"
    for file in [*folder.glob("optimizer-*"), *folder.glob("rng-*")]:
        file.unlink()
    second = training_config(tiny_data, tmp_path / "second", stage=stage)
    second.train.steps, second.optimizer.lr, second.optimizer.min_lr = 1, 0.0, 0.0
    second.checkpoint.load_from, second.checkpoint.load = str(tmp_path / "first"), CheckpointLoad.weights
    run_ranks("run_job", world_size, second)
    checkpoint = open_checkpoint(tmp_path / "second" / "checkpoints" / "step_00000001")
    assert checkpoint.trainer["applied_steps"] == 1
    source = open_checkpoint(folder)
    for name in source.tensors("model"):
        assert torch.equal(source.read("model", name), checkpoint.read("model", name)), name
    assert [row["step"] for row in read_metrics(tmp_path / "second" / "metrics.jsonl") if "lm_loss" in row] == [1]


def test_weights_of_routers_come_with_the_biases_of_their_choice(run_ranks, tiny_data, tmp_path):
    first = moe_training_config(tiny_data, tmp_path / "first", stage=0)
    first.moe.moe_router_enable_expert_bias, first.train.steps, first.parallel.expert_model_parallel_size = True, 3, 1
    run_ranks("run_job", 1, first)
    second = copy.deepcopy(first)
    second.run.dir, second.train.steps, second.moe.moe_router_bias_update_rate = str(tmp_path / "second"), 1, 1e-30
    second.checkpoint.load_from, second.checkpoint.load = str(tmp_path / "first"), CheckpointLoad.weights
    run_ranks("run_job", 1, second)
    biases = [
        open_checkpoint(tmp_path / name / "checkpoints" / step).trainer["moe"]["bias"]
        for name, step in (("first", "step_00000003"), ("second", "step_00000001"))
    ]
    assert any(any(row) for row in biases[0])
    for old, new in zip(*biases, strict=True):
        assert old == pytest.approx(new, abs=1e-12)
    assert stored(tmp_path / "second", 1)
