import json
import subprocess
import sys

import pytest
import torch

from recipes.telemetry.environment import describe_environment


def git(folder, *args):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(["git", "-C", folder, *identity, *args], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("x = 1\n")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_versions_patches_and_hardware():
    described = describe_environment(["deepspeed/a", "megatron_core/b"])
    assert described["versions"]["torch"] == torch.__version__
    assert described["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert described["patches"] == ["deepspeed/a", "megatron_core/b"]
    assert described["cpu"]["usable_cores"] >= 1
    assert described["memory_bytes"] > 2**28
    json.dumps(described, allow_nan=False)


def test_commit_and_dirty_flag(checkout):
    commit = git(checkout, "rev-parse", "HEAD").strip()
    assert describe_environment([], checkout)["git"] == {"commit": commit, "dirty": False}
    (checkout / "a.py").write_text("x = 2\n")
    assert describe_environment([], checkout)["git"] == {"commit": commit, "dirty": True}


def test_the_commit_of_a_surrounding_repository_is_not_taken(checkout):
    (checkout / "venv").mkdir()
    assert describe_environment([], checkout / "venv")["git"] is None


def test_a_checkout_without_a_commit_has_none(tmp_path):
    git(tmp_path, "init", "-q")
    assert describe_environment([], tmp_path)["git"] is None


def test_launcher_variables_but_no_secrets(monkeypatch):
    for name in ("WORLD_SIZE", "OMP_NUM_THREADS", "NCCL_DEBUG", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "4")
    secrets = ("WANDB_API_KEY", "HF_TOKEN", "NCCL_SECRET", "TORCH_HUB_TOKEN", "DS_PASSWORD", "SLURM_JWT", "HOSTNAME")
    for name in secrets:
        monkeypatch.setenv(name, "hunter2")
    described = describe_environment([])
    assert {"WORLD_SIZE", "OMP_NUM_THREADS", "NCCL_DEBUG", "SLURM_JOB_ID"} <= described["variables"].keys()
    assert "hunter2" not in json.dumps(described)


@pytest.mark.parametrize(
    "value",
    [
        "https://user:hunter2@example.org/simple",
        "https://hunter2@example.org/x.git",
        "socks5h://a:hunter2@[::1]:3128",
        "git+https://oauth2:hunter2@example.org/x.git@main#egg=x",
        "http://a:b/c#hunter2@example.org",
        "https://example.org/x?X-Amz-Signature=hunter2&a=1",
        "https://example.org/x?a=1&access_token=hunter2",
        "Authorization: Bearer hunter2",
        "hf_hunter2hunter2hunter2",
    ],
)
def test_values_of_variables_lose_their_passwords(value, monkeypatch):
    for name in ("NCCL_NET_URL", "TORCH_PROXY", "DS_INDEX"):
        monkeypatch.setenv(name, value)
    described = json.dumps(describe_environment([]))
    assert "hunter2" not in described and described.count("***") >= 3


def test_nothing_heavy_is_imported():
    modules = ("console", "environment", "jsonl", "profiler", "summary", "throughput", "wandb_run")
    code = f"""
import sys
for name in {modules}: __import__("recipes.telemetry." + name)
sys.modules["recipes.telemetry.environment"].describe_environment([])
loaded = {{"torch", "wandb", "deepspeed", "megatron", "transformers"}} & sys.modules.keys()
sys.exit(f"imported: {{loaded}}" if loaded else 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
