"""Which checkpoint a run of two ranks goes on from, and what it says about it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from recipes.checkpoint.format import open_checkpoint
from recipes.config import Config, Resume
from recipes.telemetry.jsonl import read_metrics
from tests.distributed.test_moe_resume import different
from tests.distributed.test_resume import training_config

pytestmark = pytest.mark.distributed
HERE = "tests.distributed.test_resume_choices"


def config_of(data: Path, folder: Path) -> Config:
    """10 steps, checkpoints after 4, 8 and the last one."""
    config = training_config(data, folder)
    config.checkpoint.save_interval, config.checkpoint.keep, config.train.eval_samples = 4, 9, 0
    config.run.resume = Resume.auto
    return config


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


def run_and_listen(rank: int, world_size: int, config: Config) -> str:
    """What this rank of a run prints."""
    from tests.distributed.workers import run_job

    with contextlib.redirect_stdout(io.StringIO()) as out:
        run_job(rank, world_size, config)
    return out.getvalue()


def test_a_damaged_newest_checkpoint_is_passed_over_on_all_ranks(run_ranks, tiny_data, tmp_path):
    straight = config_of(tiny_data, tmp_path / "straight")
    out, silence = run_ranks(f"{HERE}:run_and_listen", 2, straight)
    assert f"no checkpoint in {tmp_path / 'straight'}: starting at step 1" in out and silence == ""
    config = config_of(tiny_data, tmp_path / "damaged")
    run_ranks("run_job", 2, config)
    root = tmp_path / "damaged" / "checkpoints"
    damaged = root / "step_00000010" / "optimizer-00001-of-00002.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-6] ^= 1  # one bit of one moment: sizes are right
    damaged.write_bytes(data)
    (root / "step_00000008" / "rng-00001-of-00002.safetensors").unlink()
    out = run_ranks(f"{HERE}:run_and_listen", 2, config)[0]
    passed_over = [line for line in out.splitlines() if line.startswith("passed over: ")]
    assert len(passed_over) == 2
    assert f"{damaged}: its bytes changed after it was written" in "".join(passed_over)
    assert "rng-00001-of-00002.safetensors: is missing" in "".join(passed_over)
    assert f"resumed from {root / 'step_00000004'}; the next step is 5" in out
    assert steps(tmp_path / "damaged") == list(range(1, 11))
    assert not different(tmp_path / "straight", tmp_path / "damaged")


def test_a_step_that_is_not_there_is_refused_before_any_other(run_ranks, tiny_data, tmp_path):
    config = config_of(tiny_data, tmp_path / "run")
    run_ranks("run_job", 2, config)
    config.checkpoint.load_step, config.train.steps, config.run.resume_with = 40, 50, ["train.steps"]
    with pytest.raises(RuntimeError, match=r"step 40: not in .*the steps there are: 4, 8, 10"):
        run_ranks("run_job", 2, config)
    assert steps(tmp_path / "run") == list(range(1, 11))
    (tmp_path / "run" / "checkpoints" / "latest").write_bytes(b"\xff garbage")
    config.checkpoint.load_step, config.train.steps = None, 11
    run_ranks("run_job", 2, config)
    assert steps(tmp_path / "run") == list(range(1, 12))
    assert open_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000011").trainer["applied_steps"] == 11
