"""However a run is started and stopped, it is the same run."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from recipes.checkpoint.format import open_checkpoint
from recipes.telemetry.jsonl import read_metrics
from tests.distributed.launching import (
    BIN,
    ROOT,
    ForkedJob,
    LaunchedJob,
    free_port,
    running,
    steps_recorded,
    tiny_overrides,
    wait_until,
)

pytestmark = pytest.mark.distributed

SCRIPT = str(ROOT / "recipes" / "pretrain.py")
STEPS = 20
MANY = "train.steps=1000000"  # more than any test waits for
TWENTY = f"train.steps={STEPS}"


def run_of(model: str, data, folder, *more: str) -> list[str]:
    """A tiny run of the dense model, or of the quickstart's with experts, named by its backend."""
    if model == "dense":
        return tiny_overrides(data, folder, *more)
    quick = ["schedule.lr_warmup_steps=5", "telemetry=disabled"]
    return tiny_overrides(data, folder, f"moe.backend={model}", *quick, *more, experiment="switch_8e")


def over_ranks(model: str) -> list[str]:
    """Half of the experts on each of two ranks."""
    return [] if model == "dense" else ["parallel.expert_model_parallel_size=2"]


def losses(folder) -> list[float]:
    return [row["lm_loss"] for row in read_metrics(folder / "metrics.jsonl") if "lm_loss" in row]


def check_stopped(folder, launched) -> int:
    """The last step on record has the newest checkpoint, and the summary counts it. Returns the step."""
    steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)), launched.output()
    (checkpoint,) = (folder / "checkpoints").glob("step_*")
    assert open_checkpoint(checkpoint).step == steps[-1] and open_checkpoint(checkpoint).verify() == []
    assert f"stopped after step {steps[-1]} as asked" in launched.output()
    return steps[-1]


def slurm(task: int, job_id: str) -> dict[str, str]:
    """What srun sets for one of two tasks on this node."""
    return {
        "SLURM_JOB_ID": job_id,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task),
        "SLURM_NTASKS": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }


@pytest.fixture(scope="module")
def plain(tiny_data, tmp_path_factory) -> Callable[[str], list[float]]:
    """The losses of one plain process with twice the micro batch, by model."""

    @functools.cache
    def plain(model: str) -> list[float]:
        folder = tmp_path_factory.mktemp("plain")
        job = ForkedJob(run_of(model, tiny_data, folder / "run", TWENTY, "train.micro_batch_size=8"), folder)
        with running(job):
            assert job.wait(40) == 0, job.output()
        found = losses(folder / "run")
        assert len(found) == STEPS and found[-1] < found[0] - 0.1  # it learns
        return found

    return plain


@pytest.fixture(scope="module")
def expected(plain) -> list[float]:
    """The losses of the dense model."""
    return plain("dense")


LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_accelerators", "2", "--master_port", "PORT", SCRIPT],
    "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port", "PORT", "-m", "recipes.pretrain"],
}


def launch(name: str, arguments: list[str], folder) -> LaunchedJob:
    command = [free_port() if word == "PORT" else word for word in LAUNCHERS[name]]
    return LaunchedJob([str(BIN / command[0]), *command[1:], *arguments], folder, PYTHONPATH=str(ROOT))


@pytest.mark.parametrize(
    ("launcher", "number", "to_group", "model"),
    [
        ("deepspeed", signal.SIGTERM, False, "dense"),  # its outer process dies of this without telling anybody
        ("deepspeed", signal.SIGINT, True, "grouped"),  # Ctrl-C in a terminal reaches the launcher and every rank
        ("torchrun", signal.SIGINT, True, "dense"),  # its ranks have sessions of their own
    ],
)
def test_a_launched_job_is_the_plain_run_and_stops_when_told(
    launcher, number, to_group, model, plain, tiny_data, tmp_path
):
    folder = tmp_path / "実行 1" / "run a=b"
    job = launch(launcher, run_of(model, tiny_data, folder, MANY, *over_ranks(model)), tmp_path)
    with running(job):
        wait_until(lambda: steps_recorded(folder) >= STEPS or job.process.poll() is not None, 50, job)
        if to_group:
            os.killpg(job.process.pid, number)
        else:
            job.send(number)
        stopped = time.monotonic()
        assert job.wait(20) != 0
        wait_until(lambda: not job.left(), 20 - (time.monotonic() - stopped), job)
        assert check_stopped(folder, job) >= STEPS
        assert losses(folder)[:STEPS] == pytest.approx(plain(model), rel=1e-5)


@pytest.mark.parametrize(
    ("launcher", "model"),
    [("deepspeed", "deepspeed"), ("torchrun", "deepspeed"), ("torchrun", "grouped")],  # the fourth is above
)
def test_a_launched_job_with_experts_is_the_plain_run_and_ends(launcher, model, plain, tiny_data, tmp_path):
    job = launch(launcher, run_of(model, tiny_data, tmp_path / "run", TWENTY, *over_ranks(model)), tmp_path)
    with running(job):
        assert job.wait(50) == 0, job.output()
        assert job.left() == []
    assert losses(tmp_path / "run") == pytest.approx(plain(model), rel=1e-5)


def test_srun_tasks(expected, tiny_data, tmp_path):
    arguments = tiny_overrides(tiny_data, tmp_path / "run", TWENTY)
    jobs = [ForkedJob([*arguments, "--local_rank", str(task)], tmp_path, **slurm(task, "4711")) for task in range(2)]
    with running(*jobs):
        assert [job.wait(40) for job in jobs] == [0, 0], jobs[0].output() + jobs[1].output()
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    assert "step 20/20" in jobs[0].output() and "step" not in jobs[1].output()


def test_a_plain_process_starts_soon_stops_on_ctrl_c_and_goes_on(expected, tiny_data, tmp_path):
    """From another folder, with a relative run folder, and the argument that launchers add."""
    arguments = ["--local_rank=-1", *tiny_overrides(tiny_data, "run", "train.micro_batch_size=8")]
    command = [sys.executable, "-m", "recipes.pretrain", *arguments, MANY, "--local-rank", "0"]
    job = LaunchedJob(command, tmp_path, PYTHONPATH=str(ROOT))
    with running(job):
        wait_until(lambda: steps_recorded(tmp_path / "run") >= 1 or job.process.poll() is not None, 50, job)
        times = psutil.Process(job.process.pid).cpu_times()
        assert times.user + times.system < 15, "seconds of work before the first step"
        wait_until(lambda: steps_recorded(tmp_path / "run") >= STEPS, 20, job)
        job.send(signal.SIGINT)
        assert job.wait(20) == 130, job.output()
        assert job.left() == []
    last = check_stopped(tmp_path / "run", job)
    assert losses(tmp_path / "run")[:STEPS] == pytest.approx(expected, rel=1e-5)
    more = [*arguments, f"train.steps={last + 2}", "run.resume=auto"]
    again = ForkedJob(more, tmp_path)
    with running(again):
        assert again.wait(40) == 0, again.output()
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, last + 3))


def test_two_jobs_at_once(expected, tiny_data, tmp_path):
    """Both run, each under its own name for the meeting point; a third is kept out of the folder of the first."""
    jobs = []
    for number in range(2):
        arguments = tiny_overrides(tiny_data, tmp_path / f"run{number}", MANY)
        jobs += [ForkedJob(arguments, tmp_path, **slurm(task, f"47{number}")) for task in range(2)]
    with running(*jobs):
        for number in range(2):
            folder = tmp_path / f"run{number}"
            wait_until(lambda folder=folder: steps_recorded(folder) >= STEPS, 40, *jobs)
            assert losses(folder)[:STEPS] == pytest.approx(expected, rel=1e-5)
        for resume, reason in (("never", "exists; choose another folder"), ("auto", "a job is running there")):
            again = ForkedJob([*tiny_overrides(tiny_data, tmp_path / "run0", MANY), f"run.resume={resume}"], tmp_path)
            with running(again):
                assert again.wait(20) == 2, again.output()
            assert reason in again.output() and "Traceback" not in again.output()
            assert again.output().count("error: ") == 1
        for job in jobs[:2]:
            job.send(signal.SIGTERM)
        jobs[2].send(signal.SIGTERM)  # one rank alone is enough
        assert [job.wait(20) for job in jobs] == [143, 143, 143, 143]
    for number in range(2):
        check_stopped(tmp_path / f"run{number}", jobs[2 * number])
