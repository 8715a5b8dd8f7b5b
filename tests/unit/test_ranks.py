"""The processes of tests see no device, so that they meet on gloo on any machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def visible(rank: int, world_size: int) -> tuple[str | None, bool]:
    import torch

    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_available()


def test_ranks_see_no_device_even_where_tests_for_devices_run():
    """As with `pytest -m gpu`, in a process of its own, whose server is still to be started."""
    code = "import os; from tests.ranks import run_ranks; print(run_ranks('tests.unit.test_ranks:visible', 2)); "
    code += "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=55
    )
    assert done.stdout.splitlines()[-2:] == ["[('', False), ('', False)]", "0,1"], done.stderr


def test_the_suite_sees_no_device():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
