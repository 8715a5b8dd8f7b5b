"""Launchers that are gone, signals in a library's wait, without ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from recipes import process
from recipes.process import STARTER, Launchers, identity

ROOT = Path(__file__).resolve().parents[2]
RUNNER = ["/usr/bin/python3", "/bin/deepspeed", "--num_gpus", "2"]
INNER = ["/usr/bin/python3", "-u", "-m", "deepspeed.launcher.launch", "--world_info=x"]
AGENT = ["/usr/bin/python3.12", "/bin/torchrun"]
SHELL, INIT, PYTHON = ["bash", "run.sh"], ["/sbin/init"], ["python3", "own_launcher.py"]
DEEPSPEED, ELASTIC = {"CROSS_SIZE": "1"}, {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environ", "parents", "gone"),
    [
        (DEEPSPEED, [INNER, RUNNER, SHELL], ""),
        (DEEPSPEED, [SHELL, INNER, RUNNER, SHELL], ""),  # a script around each rank
        (DEEPSPEED, [INNER, PYTHON], ""),  # a program that calls deepspeed's functions
        (DEEPSPEED, [INNER, INIT], "the launcher of its launcher (deepspeed) has died"),
        (DEEPSPEED, [INIT], "its launcher (deepspeed.launcher.launch) has died"),
        (DEEPSPEED, [[*INNER, "--node_rank=1"], SHELL], ""),  # over ssh
        (ELASTIC, [AGENT, SHELL], ""),
        (ELASTIC, [PYTHON, SHELL], ""),  # another program with an elastic agent
        (ELASTIC, [INIT], "its launcher (torchrun) has died"),
        ({}, [SHELL, INIT], ""),
    ],
)
def test_launchers_that_died_before_the_first_look(environ, parents, gone, monkeypatch):
    fakes = [SimpleNamespace(pid=1 if command is INIT else 70, command=command) for command in parents]
    monkeypatch.setattr(process, "_command", lambda fake: fake.command)
    launchers = [fake for fake in fakes if process._words(fake) & process._LAUNCHERS]
    assert process._already_gone(environ, fakes, launchers) == gone


def test_process_1_of_a_container_may_be_the_launcher(monkeypatch):
    monkeypatch.setattr(process, "_command", lambda fake: fake.command)
    first = [SimpleNamespace(pid=1, command=command) for command in (RUNNER, PYTHON)]
    inner = SimpleNamespace(pid=9, command=INNER)
    assert process._already_gone(DEEPSPEED, [inner, first[0]], [inner, first[0]]) == ""
    assert "died" in process._already_gone(DEEPSPEED, [inner, first[1]], [inner])  # it has adopted the inner one


def test_whoever_started_a_launcher_is_watched():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        found = Launchers({STARTER: identity(child.pid)})
        assert found.gone() == ""
        child.kill()
        while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert found.gone() == f"its launcher (pid {child.pid}) has died"  # although nobody has waited for it
    finally:
        child.kill()
        child.wait()
    assert "has died" in Launchers({STARTER: identity(os.getpid()) + "0"}).gone()  # the number is another process's now


SCRIPT = """
import ctypes, os, signal, threading, time
from recipes import process
process._LEAVE_WITHIN = 0.5
{before}
def job():
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)  # for ever, and no signal interrupts it
process.run_guarded(job, 0)
"""


@pytest.mark.parametrize("number", process.SIGNALS)
def test_signals_end_a_process_that_waits_in_a_library(number):
    child = _script("", number)
    assert child.wait(10) == 128 + number
    assert (
        child.stderr is not None
        and child.stderr.read() == f"rank 0: {number.name} while it waited for the other ranks\n"
    )


def test_nohup_is_obeyed():
    child = _script("signal.signal(signal.SIGHUP, signal.SIG_IGN)", signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(1.5)
    child.kill()
    child.wait()


def test_a_listener_hears_what_came_just_before_it():
    """The signal is there when the run begins to have something to lose: it must neither be lost nor end the process."""
    before = "threading.Timer(0.2, process.on_request, [lambda number: process.end(7, 'asked')]).start()"
    child = _script(before, signal.SIGTERM)
    assert child.wait(10) == 7


def _script(before: str, number: int) -> subprocess.Popen[str]:
    """A process that waits in a library, to which the signal has been sent."""
    script = SCRIPT.format(before=before)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    time.sleep(0.3)  # until it waits
    child.send_signal(number)
    return child
