"""Overrides reach every rank unchanged, whichever launcher starts it and from wherever."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.config import to_plain
from recipes.pretrain import compose

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ECHO = str(Path(__file__).with_name("echo_config.py"))

# What people write: "=", lists, braces, quotes, spaces, Japanese, exponents, null and booleans.
OVERRIDES = [
    "experiment=dense",
    "run.name=two words",
    "run.dir=出力/a=b (1)",
    "telemetry.wandb_project='single, quoted'",
    "telemetry.wandb_group=\"say 'hi'\"",
    "telemetry.profile_steps=[3,5]",
    "data.domain_weights={en:0.5,ja:2}",
    "deepspeed.extra={comms_logger:{enabled:true},x:[1,'a b']}",
    "optimizer.lr=1e-05",
    "model.kv_channels=null",
    "model.qk_layernorm=true",
]


def _environ(**changes: str) -> dict[str, str]:
    """The environment without what another launcher left in it."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "MASTER_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        inherited.pop(name, None)
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.defpath}"}
    return inherited | settings | changes


def _run(command: list[str], folder: Path, **environ: str) -> None:
    environ = _environ(ECHO_DIR=str(folder), **environ)
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr


def _port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _check(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Both the raw overrides and what they compose to, on every rank."""
    seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    expected = to_plain(compose(OVERRIDES))
    assert expected["run"]["dir"] == "出力/a=b (1)" and expected["telemetry"]["wandb_group"] == "say 'hi'"
    for rank, child in enumerate(seen):
        assert child["overrides"] == OVERRIDES
        assert child["config"] == expected
        assert child["cwd"] == str(folder)
        ranks = child["ranks"]
        assert (ranks["rank"], ranks["world_size"], ranks["local_world_size"]) == (rank, world_size, world_size)
    return seen


@pytest.mark.distributed
def test_deepspeed(tmp_path):
    launcher = [str(BIN / "deepspeed"), "--num_accelerators", "2", "--master_port", _port()]
    _run([*launcher, ECHO, *OVERRIDES], tmp_path)
    seen = _check(tmp_path, 2)
    assert [child["argv"][0] for child in seen] == ["--local_rank=0", "--local_rank=1"]  # what has to be dropped


@pytest.mark.distributed
def test_torchrun(tmp_path):
    launcher = [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", _port()]
    _run([*launcher, ECHO, *OVERRIDES], tmp_path)
    _check(tmp_path, 2)


@pytest.mark.distributed
def test_srun_tasks(tmp_path):
    for task in range(2):
        _run(
            [sys.executable, ECHO, *OVERRIDES],
            tmp_path,
            SLURM_JOB_ID="4711",
            SLURM_STEP_ID="0",
            SLURM_PROCID=str(task),
            SLURM_LOCALID=str(task),
            SLURM_NTASKS="2",
            SLURM_NODEID="0",
            SLURM_STEP_NODELIST="node[03-04]",
            SLURM_STEP_TASKS_PER_NODE="2",
        )
    first, second = _check(tmp_path, 2)
    for name in ("master_addr", "master_port"):
        assert first["ranks"][name] == second["ranks"][name]
    assert first["ranks"]["master_addr"] == "node03"


@pytest.mark.distributed
def test_plain_python_as_file_and_as_module(tmp_path):
    _run([sys.executable, ECHO, *OVERRIDES], tmp_path)
    _check(tmp_path, 1)
    sizes = []
    plan = ["experiment=gpt_125m_8gpu_h100_bf16", "--dry-run", "--json"]
    for form in ([str(ROOT / "recipes" / "pretrain.py")], ["-m", "recipes.pretrain"]):
        file = tmp_path / f"plan{len(sizes)}.json"
        _run([sys.executable, *form, *plan, str(file)], tmp_path, PYTHONPATH=str(ROOT))
        sizes.append(json.loads(file.read_text()))
    assert sizes[0] == sizes[1] and sizes[0]["total_params"] == 123_653_376
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}  # nothing else was written there
