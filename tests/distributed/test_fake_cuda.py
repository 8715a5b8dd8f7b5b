"""Training, checkpoints, routers of a mix and held-out text on tensors that say they are on CUDA: see `tests.fake_cuda`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_cuda import CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def problems() -> dict[str, str | None]:
    """By case; all in one process, which takes 20 s."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("needs a C++ compiler")
    command = [sys.executable, "-W", "ignore", "-m", "tests.fake_cuda", *CASES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=58)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert len(rows) == len(CASES), done.stderr[-3000:]
    return {row["case"]: row["problem"] for row in rows}


@pytest.mark.parametrize("name", CASES)
def test_nothing_that_a_device_refuses(problems, name):
    assert problems[name] is None, problems[name]
