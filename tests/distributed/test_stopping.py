"""A signal at any moment, in phases that last longer than a launcher waits, leaves a checkpoint of the newest finished step."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from recipes.telemetry.jsonl import read_metrics
from tests.distributed.launching import (
    BIN,
    ROOT,
    ForkedJob,
    LaunchedJob,
    free_port,
    newest_complete,
    running,
    tiny_overrides,
    wait_until,
)

pytestmark = pytest.mark.distributed

SLOW = str(Path(__file__).with_name("slow_pretrain.py"))
LONG = "45"  # seconds: torchrun and deepspeed kill after 30
EVALUATED = "train.eval_samples=8"


def fork(arguments: list[str], folder: Path, world_size: int = 2, **slow: str) -> list[ForkedJob]:
    """All ranks of a job with slow phases."""
    place = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": free_port()} | {f"SLOW_{phase}": seconds for phase, seconds in slow.items()}
    ranks = range(world_size)
    return [ForkedJob(arguments, folder, "slow_phases", **place, RANK=str(r), LOCAL_RANK=str(r)) for r in ranks]


def phases(folder: Path) -> list[tuple[str, int]]:
    """The phases that began so far, on any rank."""
    file = folder / "phases"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(words[1], int(words[2])) for line in lines if len(words := line.split()) == 3]


def recorded(folder: Path, key: str = "lm_loss") -> list[int]:
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl") if key in row]


@pytest.mark.parametrize(
    ("number", "world_size", "options", "slow", "moment", "newest"),
    [
        (signal.SIGTERM, 2, ["train.steps=9"], {"step": LONG}, ("step", 3), 2),
        (signal.SIGHUP, 2, ["parallel.pipeline_model_parallel_size=2", "zero.stage=1"], {"step": LONG}, ("step", 3), 2),
        (signal.SIGUSR1, 1, [EVALUATED, "train.eval_interval=2"], {"evaluate": LONG}, ("evaluate", 2), 2),
        (signal.SIGINT, 2, ["checkpoint.save_interval=2"], {"save": "4"}, ("save", 2), 2),
    ],
)
def test_a_signal_within_a_long_phase(number, world_size, options, slow, moment, newest, tiny_data, tmp_path):
    """It reaches one rank, and again after some seconds; the state is that of the step, bit for bit, as the losses show."""
    arguments = tiny_overrides(tiny_data, tmp_path / "run", "train.steps=50", "run.resume=auto", *options)
    jobs = fork(arguments, tmp_path, world_size, **slow)
    with running(*jobs):
        wait_until(lambda: moment in phases(tmp_path), 40, *jobs)
        sent = time.monotonic()
        jobs[-1].send(number)
        if "save" in slow:
            time.sleep(3.5)
            jobs[-1].send(number)
        assert [job.wait(20) for job in jobs] == [128 + number] * world_size, jobs[0].output()
        assert time.monotonic() - sent < 25
    assert newest_complete(tmp_path / "run") == newest == recorded(tmp_path / "run")[-1]
    assert f"stopped after step {newest} as asked" in jobs[0].output()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["complete"] is False


def test_a_step_that_was_cut_off_is_made_again_exactly(tiny_data, tmp_path):
    """Dropout draws from generators that the cut-off step has moved on."""
    dropout = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1", "train.steps=5"]
    straight = fork(tiny_overrides(tiny_data, tmp_path / "straight", *dropout), tmp_path)
    with running(*straight):
        assert [job.wait(40) for job in straight] == [0, 0], straight[0].output()
    (tmp_path / "phases").unlink()
    arguments = tiny_overrides(tiny_data, tmp_path / "run", *dropout, "run.resume=auto")
    jobs = fork(arguments, tmp_path, backward=LONG)
    with running(*jobs):
        wait_until(lambda: ("backward", 3) in phases(tmp_path), 40, *jobs)
        jobs[0].send(signal.SIGTERM)
        assert [job.wait(20) for job in jobs] == [143, 143], jobs[0].output()
    again = fork(arguments, tmp_path)
    with running(*again):
        assert [job.wait(40) for job in again] == [0, 0], again[0].output()
    both = [
        [(row["step"], row["lm_loss"]) for row in read_metrics(tmp_path / f / "metrics.jsonl")]
        for f in ("straight", "run")
    ]
    assert both[0] == both[1]


def test_an_evaluation_that_was_cut_off_is_made_once_and_a_finished_run_stays_as_it_is(tiny_data, tmp_path):
    folder = tmp_path / "run"
    options = [EVALUATED, "train.eval_interval=2", "train.steps=4", "run.resume=auto"]
    arguments = tiny_overrides(tiny_data, folder, *options)
    for step in (2, 4):  # in an evaluation on the way, and in the last one
        jobs = fork(arguments, tmp_path, **{f"evaluate_{step}": LONG})
        with running(*jobs):
            wait_until(lambda step=step: phases(tmp_path).count(("evaluate", step)) == 2, 40, *jobs)
            jobs[1].send(signal.SIGTERM)
            assert [job.wait(20) for job in jobs] == [143, 143], jobs[0].output()
        assert newest_complete(folder) == step
        assert recorded(folder, "eval/lm_loss") == list(range(2, step, 2))
    summaries = []
    for _ in range(2):
        jobs = fork(arguments, tmp_path)
        with running(*jobs):
            assert [job.wait(40) for job in jobs] == [0, 0], jobs[0].output()
        assert recorded(folder) == [1, 2, 3, 4] and recorded(folder, "eval/lm_loss") == [2, 4]
        summaries.append((folder / "summary.json").read_text())
        kept = json.loads(summaries[-1])
        assert kept["complete"] is True and kept["steps"] == 4 and kept["lm_loss"] > 0 and kept["eval/lm_loss"] > 0
    assert summaries[0] == summaries[1]


def test_checkpoints_by_the_clock(tiny_data, tmp_path):
    """Rank 0's, whatever that of others says: steps of 0.4 s, a checkpoint once a second has passed."""
    arguments = tiny_overrides(tiny_data, tmp_path / "run", "train.steps=9", "checkpoint.keep=9")
    jobs = fork([*arguments, "checkpoint.save_interval_minutes=0.017"], tmp_path, step="0.4")
    with running(*jobs):
        assert [job.wait(40) for job in jobs] == [0, 0], jobs[0].output()
    steps = sorted(int(path.name[-8:]) for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert steps[-1] == 9 and 2 <= len(steps) <= 5, steps


@pytest.mark.parametrize(
    ("launcher", "number", "moment", "newest"),
    [
        (["torchrun", "--nproc_per_node", "2"], signal.SIGTERM, ("step", 3), 2),
        (["deepspeed", "--num_accelerators", "2"], signal.SIGKILL, ("step", 3), 2),
        (["deepspeed", "--num_accelerators", "2"], signal.SIGKILL, ("start", 0), None),
    ],
)
def test_nobody_is_left_behind_by_a_launcher(launcher, number, moment, newest, tiny_data, tmp_path):
    """One that kills, and one that is killed, in a long step and while the ranks start."""
    options = tiny_overrides(tiny_data, tmp_path / "run", "train.steps=50")
    slow = {"SLOW_step": LONG, "SLOW_start": "3"}
    job = LaunchedJob([str(BIN / launcher[0]), *launcher[1:], SLOW, *options], tmp_path, PYTHONPATH=str(ROOT), **slow)
    with running(job):
        wait_until(lambda: moment in phases(tmp_path), 40, job)
        os.kill(job.process.pid, number)
        assert job.wait(40) != 0
        wait_until(lambda: not job.left(), 15, job)
    if newest is not None:
        assert newest_complete(tmp_path / "run") == newest == recorded(tmp_path / "run")[-1]
    else:
        assert not (tmp_path / "run").exists()
    assert ("its launcher" in job.output()) == (number == signal.SIGKILL)
