"""The folder of a run: one job each, and no trace of a job that was refused."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from recipes.config import Resume, RunConfig
from recipes.run_folder import RunFolder, fresh_folder
from recipes.telemetry.wandb_run import choose_run_id

JOBS = 64


def _start(barrier, folder: str, results) -> None:
    os.chdir(folder)
    barrier.wait(30)
    claim = RunFolder(RunConfig(name="job"))
    results.put((str(claim.path), choose_run_id(None)))
    barrier.wait(30)  # all hold theirs at once


def test_64_jobs_of_one_second_get_64_folders_and_ids(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(JOBS), context.Queue()
    jobs = [context.Process(target=_start, args=(barrier, str(tmp_path), results)) for _ in range(JOBS)]
    try:
        for job in jobs:
            job.start()
        found = [results.get(timeout=40) for _ in jobs]
        for job in jobs:
            job.join(20)
        assert [job.exitcode for job in jobs] == [0] * JOBS
    finally:
        for job in jobs:
            job.kill()
    folders, ids = ({row[place] for row in found} for place in (0, 1))
    assert len(folders) == len(ids) == JOBS
    assert {str(path) for path in (tmp_path / "outputs").iterdir()} == folders


def test_folders_of_the_same_second_are_numbered(tmp_path, monkeypatch):
    class Clock:
        @staticmethod
        def now():
            return type("Now", (), {"strftime": lambda self, form: "20240102-030405"})()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("recipes.run_folder.datetime.datetime", Clock)
    names = [fresh_folder("a").name for _ in range(3)]
    assert names == ["a-20240102-030405", "a-20240102-030405-2", "a-20240102-030405-3"]


def test_a_folder_is_one_jobs_alone(tmp_path):
    run = RunConfig(dir=str(tmp_path / "run"))
    first = RunFolder(run)
    with pytest.raises(ValueError, match=r"exists; choose another folder, or go on by run\.resume=auto"):
        RunFolder(run)
    run.resume = Resume.auto
    with pytest.raises(ValueError, match="a job is running there"):
        RunFolder(run)
    first.close()
    shared = [RunFolder(run, shared=True) for _ in range(2)]
    with pytest.raises(ValueError, match="a job is running there"):
        RunFolder(run)
    for claim in shared:
        claim.close()
    RunFolder(run).close()


def test_a_refused_job_leaves_no_trace(tmp_path):
    run = RunConfig(dir=str(tmp_path / "new" / "run"))
    RunFolder(run).abandon()
    assert not Path(run.dir).exists()
    run.resume = Resume.auto
    (tmp_path / "new" / "run").mkdir(exist_ok=True)
    (tmp_path / "new" / "run" / "config.yaml").write_text("kept")
    RunFolder(run).abandon()
    assert [path.name for path in Path(run.dir).iterdir()] == ["config.yaml"]
    RunFolder(run).close()
    RunFolder(run).abandon()
    assert sorted(path.name for path in Path(run.dir).iterdir()) == [".lock", "config.yaml"]
