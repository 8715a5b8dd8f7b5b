from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tools import arms

ROOT = Path(__file__).parents[3]

# A launcher that starts a rank, tells the rank's process id, and waits for it.
LAUNCHER = """
import pathlib, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", {rank!r}])
path = pathlib.Path({file!r})
path.with_suffix(".new").write_text(str(rank.pid))
path.with_suffix(".new").rename(path)
sys.exit(rank.wait())
"""
# What a comparison does around it.
TOOL = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tools import arms
arms.command = lambda arm: [sys.executable, "-c", {launcher!r}]
arms._STOP_SECONDS = 3
with arms.stoppable():
    arms.train(arms.Arm("arm", 1, Path("nowhere"), ()))
"""
WAITS = "import time; time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


@pytest.mark.parametrize(("rank", "number"), [(WAITS, signal.SIGINT), (WAITS, signal.SIGTERM), (DEAF, signal.SIGINT)])
def test_a_stopped_comparison_leaves_no_process(tmp_path, rank, number):
    file = tmp_path / "rank"
    tool = TOOL.format(root=str(ROOT), launcher=LAUNCHER.format(rank=rank, file=str(file)))
    process = subprocess.Popen([sys.executable, "-c", tool], stderr=subprocess.DEVNULL, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 30
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        rank_process = psutil.Process(int(file.read_text()))
        time.sleep(0.5)  # for it to become deaf
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        assert not rank_process.is_running() or rank_process.status() == psutil.STATUS_ZOMBIE
    finally:
        process.kill()
        process.wait()
        if file.exists() and psutil.pid_exists(int(file.read_text())):
            os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "summary", "expected"),
    [(3, "", 3), (3, "{}", 3), (0, "", 1), (0, "{}", None), (0, '{"complete": false}', 1)],
)
def test_a_failing_run_fails_the_comparison(tmp_path, monkeypatch, capsys, code, summary, expected):
    monkeypatch.setattr(arms, "command", lambda arm: [sys.executable, "-c", f"raise SystemExit({code})"])
    if summary:
        (tmp_path / "summary.json").write_text(summary)
    arm = arms.Arm("sparse", 2, tmp_path, ())
    if expected is None:
        arms.train(arm)
        return
    with pytest.raises(SystemExit) as exit_:
        arms.train(arm)
    assert exit_.value.code == expected and f"error: sparse, seed 2: exit code {expected}" in capsys.readouterr().err


def test_signals_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with arms.stoppable():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
