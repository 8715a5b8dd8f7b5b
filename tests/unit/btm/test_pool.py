"""The pool on small commands: retries, failures that stay alone, no process left."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from recipes.btm.pool import Job, command, device_shares, run_jobs


@pytest.fixture
def ended() -> list[str]:
    return []


def job(folder: Path, name: str, code: str) -> Job:
    return Job(name, [sys.executable, "-c", code], folder / f"{name}.log", threads=3)


def run(jobs: list[Job], ended: list[str], workers: int = 2, retries: int = 2) -> list[str]:
    said: list[str] = []
    run_jobs(jobs, workers, retries, lambda job: ended.append(job.name), said.append)
    return said


def test_a_job_that_dies_is_started_again_and_the_log_keeps_both_attempts(tmp_path, ended):
    code = (
        f"import os, sys; first = not os.path.exists({str(tmp_path / 'mark')!r}); open({str(tmp_path / 'mark')!r}, 'w')"
    )
    code += "; print('attempt', flush=True); os.kill(os.getpid(), 9) if first else None"
    said = run([job(tmp_path, "a", code)], ended)
    assert ended == ["a"] and said == ["a ended with code -9; attempt 2 of 3"]
    assert (tmp_path / "a.log").read_text() == "attempt\nattempt\n"


def test_a_failure_stops_no_other_job_and_is_told_at_the_end(tmp_path, ended):
    broken = job(tmp_path, "broken", "raise SystemExit('no luck')")
    others = [job(tmp_path, name, "import time; time.sleep(0.3)") for name in "ab"]
    with pytest.raises(
        ValueError, match=r"1 of the branches failed; all others are done\n.*broken failed with code 1.*no luck"
    ):
        run([broken, *others], ended, retries=1)
    assert sorted(ended) == ["a", "b"] and broken.attempts == 2


def test_bad_input_is_not_tried_again(tmp_path, ended):
    bad = job(tmp_path, "bad", "raise SystemExit(2)")
    with pytest.raises(ValueError, match="bad failed with code 2"):
        run([bad], ended)
    assert bad.attempts == 1


def test_as_many_run_at_once_as_there_are_workers(tmp_path, ended):
    most = []
    jobs = [job(tmp_path, str(number), "import time; time.sleep(0.5)") for number in range(5)]
    run_jobs(jobs, 2, 0, lambda job: ended.append(job.name), print, lambda running: most.append(len(running)))
    assert max(most) == 2 and len(ended) == 5


def test_jobs_have_their_threads_and_none_of_a_launchers_variables(tmp_path, ended, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_PORT", "1")
    run([job(tmp_path, "a", "import os; print(os.environ.get('RANK'), os.environ['OMP_NUM_THREADS'])")], ended)
    assert (tmp_path / "a.log").read_text() == "None 3\n"


def test_an_interruption_leaves_no_process(tmp_path, ended):
    nested = "import subprocess, sys, time; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    jobs = [job(tmp_path, name, nested) for name in "ab"]

    def interrupt(running: list[Job]) -> None:
        if all(psutil.Process(j.process.pid).children() for j in running if j.process):
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, 2, 0, lambda job: None, print, interrupt)
    assert time.monotonic() - started < 25
    assert not [
        child for child in psutil.Process().children(recursive=True) if "time.sleep(60)" in " ".join(child.cmdline())
    ]


def test_several_ranks_are_started_by_torchrun():
    assert command(["a=1"], 1) == [sys.executable, "-m", "recipes.pretrain", "a=1"]
    words = command(["a=1"], 4, port=1234)
    assert words[1:3] == ["-m", "torch.distributed.run"] and words[-3:] == ["-m", "recipes.pretrain", "a=1"]
    assert words[3:5] == ["--nproc_per_node", "4"] and "1234" in words


@pytest.mark.parametrize(
    ("visible", "there", "ranks", "expected"),
    [
        (None, 0, 4, []),
        (None, 4, 1, ["0", "1", "2", "3"]),
        (None, 5, 2, ["0,1", "2,3"]),
        ("6,4,2", 3, 1, ["6", "4", "2"]),
        ("GPU-8f3e,GPU-11aa", 2, 2, ["GPU-8f3e,GPU-11aa"]),
        ("0,1,9", 2, 1, ["0", "1"]),  # CUDA stops at the first that is not there
        ("", 0, 1, []),
    ],
)
def test_devices_are_divided(monkeypatch, visible, there, ranks, expected):
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_shares(ranks) == expected


def test_too_few_devices_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"btm\.ranks_per_branch=4, but 2 CUDA devices are visible here .*use 1 to 2"):
        device_shares(4)


def test_jobs_at_once_see_different_devices(tmp_path, ended):
    """Each waits until all of its fellows have started, so that none has another one's share after it."""
    code = "import os, pathlib, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
    code += "limit = time.monotonic() + 20\n"
    code += f"while len(list(pathlib.Path({str(tmp_path)!r}).glob('?.log'))) < 3 and time.monotonic() < limit: time.sleep(0.1)"
    jobs = [job(tmp_path, name, code) for name in "abc"]
    run_jobs(jobs, 3, 0, lambda job: ended.append(job.name), print, shares=["4", "7"])
    seen = [(tmp_path / f"{name}.log").read_text().strip() for name in "abc"]
    assert sorted(seen) == ["4", "4", "7"] and seen[0] != seen[1]


def test_without_devices_jobs_see_what_this_process_sees(tmp_path, ended, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    run([job(tmp_path, "a", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")], ended)
    assert (tmp_path / "a.log").read_text() == "3\n"
