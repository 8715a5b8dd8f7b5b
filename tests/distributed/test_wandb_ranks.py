"""One W&B run per job, from rank 0, with everything in it, marked failed when any rank failed."""

from __future__ import annotations

import json

import pytest

from tests.distributed.launching import ForkedJob, free_port, running, tiny_overrides

pytestmark = pytest.mark.distributed


def run_two_ranks(data, folder, fault: str, steps: int, *more: str) -> tuple[list[ForkedJob], list[dict]]:
    arguments = tiny_overrides(data, folder / "run", "telemetry=offline", f"train.steps={steps}", *more)
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    jobs = [ForkedJob(arguments, folder, fault, **place, **rank) for rank in ranks]
    with running(*jobs):
        for job in jobs:
            job.wait(40)
    return jobs, [json.loads(line) for line in (folder / "wandb_calls").read_text().splitlines()]


def test_one_run_with_one_axis(tiny_data, tmp_path):
    more = ["train.eval_samples=4", "train.eval_interval=2", "optimizer.lr=0.005", "schedule.lr_warmup_steps=0"]
    jobs, calls = run_two_ranks(tiny_data, tmp_path, "fake_wandb", 4, *more)
    assert [job.process.exitcode for job in jobs] == [0, 0], jobs[0].output() + jobs[1].output()
    assert [call["call"] for call in calls] == ["init", *["define_metric"] * 2, *["log"] * 6, "finish"]
    assert {call["pid"] for call in calls} == {jobs[0].process.pid}
    assert calls[0]["config"]["optimizer"]["lr"] == 0.005
    assert calls[2]["name"] == "*" and calls[2]["step_metric"] == "train/step"
    points = [call["data"] for call in calls if call["call"] == "log"]
    assert [point["train/step"] for point in points] == [1, 2, 2, 3, 4, 4]
    assert all(call["step"] is None for call in calls if call["call"] == "log")
    assert [sorted(point)[0] for point in points if "lm_loss" not in point] == ["eval/a/lm_loss"] * 2
    assert {point["lr"] for point in points if "lr" in point} == {0.005}
    assert calls[-1]["exit_code"] == 0


def test_ranks_with_different_settings_do_not_start(tiny_data, tmp_path):
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    jobs = []
    for rank in range(2):
        arguments = tiny_overrides(tiny_data, tmp_path / "run", f"optimizer.lr=0.00{rank + 1}")
        jobs.append(ForkedJob(arguments, tmp_path, **place, RANK=str(rank), LOCAL_RANK=str(rank)))
    with running(*jobs):
        assert [job.wait(40) for job in jobs] == [2, 2]
    assert "error: the ranks were given different settings" in jobs[0].output()
    assert not (tmp_path / "run").exists()


def test_a_failure_of_another_rank_marks_the_run_failed(tiny_data, tmp_path):
    jobs, calls = run_two_ranks(tiny_data, tmp_path, "fake_wandb_and_rank_one_raises", 50)
    assert [job.process.exitcode for job in jobs] == [1, 1]
    assert [call["call"] for call in calls].count("init") == 1
    assert [call["exit_code"] for call in calls if call["call"] == "finish"] == [1]
    assert "ZeroDivisionError: planted fault" in jobs[1].output()
    assert "lost contact" in jobs[0].output() and "Traceback" not in jobs[0].output()
