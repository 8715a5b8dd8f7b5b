"""One failure ends the whole job soon, with its reason first, and costs nothing that was saved."""

from __future__ import annotations

import signal
import socket
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
    newest_complete,
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


def test_a_job_that_died_before_its_first_checkpoint_starts_again(tiny_data, tmp_path):
    arguments = tiny_overrides(tiny_data, tmp_path / "run", "run.resume=auto")
    for fault, steps in (("rank_one_is_killed", MANY), ("", "train.steps=4")):
        jobs = fork_ranks([*arguments, steps], tmp_path, fault)
        with running(*jobs):
            codes = [job.wait(40) for job in jobs]
    assert codes == [0, 0], jobs[0].output()
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_rank_that_hangs_is_waited_for_only_so_long(tiny_data, tmp_path):
    jobs = fork_ranks(
        tiny_overrides(tiny_data, tmp_path / "run", MANY), tmp_path, "rank_one_hangs_and_patience_is_short"
    )
    with running(*jobs):
        assert jobs[0].wait(40) == 1
        assert time.time() - (tmp_path / "failed").stat().st_mtime < 15
    assert "rank 0: lost contact" in jobs[0].output()


@pytest.mark.parametrize("fault", ["stage_one_raises", "stage_one_hangs_and_patience_is_short"])
def test_a_failing_or_hanging_stage_ends_the_job(fault, tiny_data, tmp_path):
    """In the middle of the schedule, when the first stage waits for a gradient."""
    arguments = ["parallel.pipeline_model_parallel_size=2", "train.micro_batch_size=2", MANY]
    jobs = fork_ranks(tiny_overrides(tiny_data, tmp_path / "run", *arguments), tmp_path, fault)
    with running(*jobs):
        assert jobs[0].wait(50) == 1
        assert time.time() - (tmp_path / "failed").stat().st_mtime < 30
        if fault == "stage_one_raises":
            assert jobs[1].wait(10) == 1
            assert "rank 1 failed:\nTraceback" in jobs[1].output()
    assert "rank 0: lost contact with the other ranks" in jobs[0].output(), jobs[0].output()
    assert "Traceback" not in jobs[0].output()


def test_a_port_that_another_job_has_is_one_message(tiny_data, tmp_path):
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        arguments = tiny_overrides(tiny_data, tmp_path / "run")
        job = ForkedJob(arguments, tmp_path, "ports_are_soon_given_up", **place, MASTER_PORT=port)
        with running(job):
            assert job.wait(40) == 2
    where = f"MASTER_PORT={port} on 127.0.0.1 is in use by another job or program"
    assert job.output() == f"error: {where}; give this job another by --master_port N (MASTER_PORT)\n"


def test_a_signal_saves_although_a_rank_hangs(tiny_data, tmp_path):
    """Rank 0 waits inside the library, rank 1 in Python, in step 3; the state after step 2 is there all the same."""
    jobs = fork_ranks(tiny_overrides(tiny_data, tmp_path / "run", MANY), tmp_path, "rank_one_hangs")
    with running(*jobs):
        wait_until((tmp_path / "failed").exists, 40, *jobs)
        jobs[0].send(signal.SIGTERM)
        assert [job.wait(20) for job in jobs] == [143, 143]
    assert newest_complete(tmp_path / "run") == 2
    assert "stopped after step 2 as asked" in jobs[0].output()


def test_a_signal_ends_a_rank_that_waits_for_another_to_start(tiny_data, tmp_path):
    arguments = tiny_overrides(tiny_data, tmp_path / "run", MANY)
    codes = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGUSR1: 138}
    jobs = {number: fork_ranks(arguments, tmp_path, only=1)[0] for number in codes}
    with running(*jobs.values()):
        time.sleep(4)
        for number, job in jobs.items():
            job.send(number)
        assert {number: job.wait(10) for number, job in jobs.items()} == codes
    for number, job in jobs.items():
        assert job.output() == f"rank 0: ended by {number.name}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_stopped_job_goes_on(number, tiny_data, tmp_path):
    """The signal reaches one rank; all stop after the same step, and the run continues as if nothing had been."""
    arguments = tiny_overrides(tiny_data, tmp_path / "run", "run.resume=auto")
    jobs = fork_ranks([*arguments, MANY], tmp_path)
    with running(*jobs):
        wait_until(lambda: steps_recorded(tmp_path / "run") >= 3, 40, *jobs)
        jobs[1].send(number)
        assert [job.wait(20) for job in jobs] == [128 + number] * 2
    last = newest_complete(tmp_path / "run")
    jobs = fork_ranks([*arguments, f"train.steps={last + 2}"], tmp_path)
    with running(*jobs):
        assert [job.wait(40) for job in jobs] == [0, 0], jobs[0].output()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, last + 3))


@pytest.fixture
def small_disk(tmp_path, request):
    """A file system of `request.param` bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("small_disk", ["4k"], indirect=True)
def test_a_run_folder_that_cannot_be_filled_is_one_message(small_disk, tiny_data, tmp_path):
    jobs = fork_ranks(tiny_overrides(tiny_data, small_disk / "run"), tmp_path)
    with running(*jobs):
        assert [job.wait(40) for job in jobs] == [2, 2]
    assert jobs[0].output().startswith(f"error: run.dir={small_disk / 'run'}: cannot be written ([Errno 28] No space")
    assert [job.output().count("\n") for job in jobs] == [1, 1]


@pytest.mark.parametrize("small_disk", ["500k"], indirect=True)  # room for one checkpoint, not for two
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
