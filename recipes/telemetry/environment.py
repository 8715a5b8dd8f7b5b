"""What a run ran on, for `environment.json`. Nothing here imports a heavy package, and no secret is recorded."""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from recipes.text import redact, shown

PACKAGES = ("torch", "deepspeed", "megatron-core", "hydra-core", "transformers", "numpy", "safetensors", "wandb")

# What a launcher or a user sets to change how a job runs. Host names and addresses are left out: they say nothing about
# the result and make a run folder harder to share.
_VARIABLES = re.compile(
    r"(WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_MAX_CONNECTIONS|CUBLAS_WORKSPACE_CONFIG"
    r"|(OMP|MKL|OPENBLAS)_NUM_THREADS|PYTHONHASHSEED|SLURM_(JOB_ID|NNODES|NTASKS|CPUS_PER_TASK|RESTART_COUNT)"
    r"|(NCCL|GLOO|TORCH|PYTORCH|TORCHELASTIC|NVTE|DS)_\w+)"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|SIGNATURE|JWT|PRIVATE", re.IGNORECASE)


def describe_environment(patches_applied: list[str], source: Path = Path(__file__).parents[2]) -> dict[str, Any]:
    """Versions, commit, hardware and launcher variables as plain JSON values; null where something is not known.

    Args:
        patches_applied: names of the upstream patches in force.
        source: root of the source tree whose commit is recorded.
    """
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "git": git_state(source),
        "patches": patches_applied,
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "usable_cores": _usable_cores()},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "variables": {
            name: shown(redact(value))
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name) and not _SECRET.search(name)
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_state(source: Path = Path(__file__).parents[2]) -> dict[str, Any] | None:
    """Commit of the tree and whether it differs from it; None when `source` is not itself the root of a checkout."""
    # An installed copy may lie inside some other repository, whose commit would be a lie.
    if not (source / ".git").exists():
        return None
    try:
        commit, status = (
            subprocess.run(["git", "-C", source, *args], capture_output=True, text=True, check=True, timeout=30).stdout
            for args in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):  # no git, a checkout of another user, or no commit yet
        return None
    return {"commit": commit.strip(), "dirty": bool(status)}


def _cpu_model() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or None
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    return match[1] if match else None


def _usable_cores() -> int | None:
    """Cores this process may use: a container or a job scheduler often gives fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _gpus() -> list[str]:
    """Names of the visible GPUs. Torch is asked only when it is loaded already, as it always is in a training run."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
