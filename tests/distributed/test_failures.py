"""One failure ends the whole job soon, with its reason first, and costs nothing that was saved."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from recipes.checkpoint.format import open_checkpoint
from recipes.telemetry.jsonl import read_metrics
from tests.distributed.launching import (
    BIN,
    FAILING,
    ForkedJob,
    LaunchedJob,
    free_port,
    running,
    steps_recorded,
    tiny_overrides,
    wait_until,
)

pytestmark = pytest.mark.distributed

MANY = "train.steps=1000000"  # more than any test waits for


def fork_ranks(
    arguments: list[str], folder: Path, fault: str = "", world_size: int = 2, only: int = 2
) -> list[ForkedJob]:
    """The first `only` ranks of a job, with no launcher that would end one for the other."""
    place = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [ForkedJob(arguments, folder, fault, **place, RANK=str(r), LOCAL_RANK=str(r)) for r in range(only)]


@pytest.mark.parametrize("launcher", [["deepspeed", "--num_accelerators", "2"], ["torchrun", "--nproc_per_node", "2"]])
def test_a_failing_rank_ends_a_launched_job(launcher, tiny_data, tmp_path):
    command = [str(BIN / launcher[0]), *launcher[1:], "--master_port", free_port(), FAILING]
    job = LaunchedJob([*command, *tiny_overrides(tiny_data, tmp_path / "run", MANY)], tmp_path)
    with running(job):
        assert job.wait(55) != 0
        assert time.time() - (tmp_path / "failed").stat().st_mtime < 30
        assert job.left() == []
    printed = job.output()
    first = printed.index("Traceback (most recent call last)")
    assert printed[:first].endswith("rank 1 failed:\n"), printed
    assert "ZeroDivisionError: planted fault" in printed[first:]
    assert "rank 0 failed" not in printed
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("fault", "failing"), [("rank_zero_raises", 0), ("rank_one_raises", 1), ("rank_one_is_killed", 1)]
)
def test_ranks_end_without_a_launcher_that_ends_them(fault, failing, tiny_data, tmp_path):
    jobs = fork_ranks(tiny_overrides(tiny_data, tmp_path / "run", MANY), tmp_path, fault)
    with running(*jobs):
        codes = [job.wait(40) for job in jobs]
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 30
    other = 1 - failing
    assert codes[other] == 1 and codes[failing] == (-signal.SIGKILL if "killed" in fault else 1)
    assert f"rank {other}: lost contact with the other ranks; see the first traceback" in jobs[other].output()
    assert "Traceback" not in jobs[other].output()
    if "killed" not in fault:
        assert f"rank {failing} failed:\nTraceback" in jobs[failing].output()
        assert "ZeroDivisionError: planted fault" in jobs[failing].output()


def test_a_rank_that_hangs_is_waited_for_only_so_long(tiny_data, tmp_path):
    jobs = fork_ranks(tiny_overrides(tiny_data, tmp_path / "run", MANY), tmp_path, "rank_one_hangs")
    with running(*jobs):
        assert jobs[0].wait(40) == 1
        assert time.time() - (tmp_path / "failed").stat().st_mtime < 15
        assert "rank 0: lost contact" in jobs[0].output()
        jobs[1].send(signal.SIGTERM)  # what a launcher does next
        time.sleep(3.5)
        jobs[1].send(signal.SIGTERM)  # the second request does not wait for the step
        assert jobs[1].wait(10) == 143


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_rank_that_waits_for_another_to_start(number, code, tiny_data, tmp_path):
    """The wait is inside the library, where Python runs no signal handlers."""
    (job,) = fork_ranks(tiny_overrides(tiny_data, tmp_path / "run", MANY), tmp_path, only=1)
    with running(job):
        time.sleep(4)
        job.send(number)
        assert job.wait(10) == code
    assert job.output().count("\n") == 1 and job.output().startswith("rank 0: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_job_goes_on(number, code, tiny_data, tmp_path):
    """The signal reaches one rank; all stop after the same step, and the run continues as if nothing had been."""
    arguments = tiny_overrides(tiny_data, tmp_path / "run", "run.resume=auto", "checkpoint.override_schedule=true")
    jobs = fork_ranks([*arguments, MANY], tmp_path)
    with running(*jobs):
        wait_until(lambda: steps_recorded(tmp_path / "run") >= 3, 40, *jobs)
        jobs[1].send(number)
        assert [job.wait(20) for job in jobs] == [0, code]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    last = open_checkpoint(checkpoint).step
    jobs = fork_ranks([*arguments, f"train.steps={last + 2}"], tmp_path)
    with running(*jobs):
        assert [job.wait(40) for job in jobs] == [0, 0], jobs[0].output()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, last + 3))


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for one checkpoint, not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", str(folder)], check=False)
    if made.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_leaves_the_checkpoint_before_it_and_says_so(small_disk, tiny_data, tmp_path):
    arguments = tiny_overrides(tiny_data, small_disk / "run", "checkpoint=periodic", "checkpoint.save_interval=3")
    arguments += ["train.steps=9", "checkpoint.keep=9"]
    jobs = fork_ranks(arguments, tmp_path)
    with running(*jobs):
        assert [job.wait(40) for job in jobs] == [1, 1]
    assert "No space left on device" in jobs[0].output(), jobs[0].output()
    assert ".step_00000006.partial" in jobs[0].output() and "before step 6 are intact" in jobs[0].output()
    assert open_checkpoint(small_disk / "run" / "checkpoints" / "step_00000003").verify() == []
    subprocess.run(["mount", "-o", "remount,size=5m", str(small_disk)], check=True)
    jobs = fork_ranks([*arguments, "run.resume=auto"], tmp_path)
    with running(*jobs):
        assert [job.wait(40) for job in jobs] == [0, 0], jobs[0].output()
    assert "the next step is 4" in jobs[0].output()
    assert [row["step"] for row in read_metrics(small_disk / "run" / "metrics.jsonl")] == list(range(1, 10))
