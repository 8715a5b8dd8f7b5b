"""Fixture `outcomes`: what a patch's reproducer does without the patch, with it, and after undo."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@functools.cache
def _reproduce(folder: Path) -> dict[str, dict]:
    files = sorted(str(path) for path in folder.glob("test_*.py"))
    with tempfile.TemporaryDirectory() as scratch:  # stores of process groups
        run = subprocess.run(
            [sys.executable, str(HERE / "reproduce.py"), *files],
            capture_output=True,
            text=True,
            timeout=55,
            env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TMPDIR": scratch},
        )
    assert run.returncode == 0, run.stderr
    lines = [line.removeprefix("RESULT ") for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    return {result["patch"]: result for result in map(json.loads, lines)}


@pytest.fixture
def outcomes(request: pytest.FixtureRequest) -> Callable[[], tuple[str | None, str | None, str | None]]:
    """Messages of (unpatched, patched, undone); one process per folder runs all of its reproducers."""
    result = _reproduce(request.path.parent)[request.module.PATCH]
    if not result["applicable"]:
        pytest.skip("the defect cannot show on this machine")
    return tuple(result["errors"])
