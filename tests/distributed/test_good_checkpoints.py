"""What is good on disk stays: checkpoints beside a run that makes no progress, and files that links in a run folder point to."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from recipes.config import Config, OptimizerName, Resume, WandbMode
from tests.tiny import tiny_config

pytestmark = pytest.mark.distributed
HERE = "tests.distributed.test_good_checkpoints"


def config_of(data: Path, folder: Path, steps: int) -> Config:
    """One process, a checkpoint after every step, the newest two kept."""
    config = tiny_config(train__steps=steps, train__eval_samples=2)
    config.optimizer.name, config.optimizer.lr, config.schedule.lr_warmup_steps = OptimizerName.adamw, 1e-2, 0
    config.schedule.lr_decay_steps, config.checkpoint.save_interval = 20, 1
    config.telemetry.wandb_mode = WandbMode.disabled
    config.data.path, config.run.dir, config.run.resume = str(data), str(folder), Resume.auto
    config.checkpoint.override_schedule = True
    return config


def run_and_listen(rank: int, world_size: int, config: Config) -> tuple[str, object]:
    """What a run prints, and how it ends: None, an exit code, or the message of a ValueError."""
    from tests.distributed.workers import run_job

    end: object = None
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            run_job(rank, world_size, config)
        except SystemExit as error:
            end = error.code
        except ValueError as error:
            end = str(error)
    return out.getvalue(), end


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))


def test_a_run_that_skips_every_step_pushes_no_checkpoint_out(run_ranks, tiny_data, tmp_path):
    config = config_of(tiny_data, tmp_path / "run", 4)
    run_ranks("run_job", 1, config)
    assert steps(tmp_path / "run") == [3, 4]
    config.train.steps, config.train.spike_factor, config.train.spike_window = 8, 1e-9, 2  # no norm is small enough
    ((out, end),) = run_ranks(f"{HERE}:run_and_listen", 1, config)
    assert end is None and out.count("skipped: gradient norm") == 4
    assert steps(tmp_path / "run") == [3, 4, 5, 6, 7, 8]
    config.train.steps, config.train.spike_factor = 10, 0.0
    run_ranks("run_job", 1, config)
    assert steps(tmp_path / "run") == [8, 9, 10], "those kept, and the one resumed from"


def test_a_run_that_ends_without_a_number_says_so(run_ranks, tiny_data, tmp_path):
    config = config_of(tiny_data, tmp_path / "run", 3)
    config.optimizer.name, config.optimizer.lr = OptimizerName.sgd, 1e25
    ((out, end),) = run_ranks(f"{HERE}:run_and_listen", 1, config)
    assert end == 1
    (error,) = [line for line in out.splitlines() if line.startswith("error: ")]
    assert "lm_loss is nan: training has diverged; go back by checkpoint.load_step=N" in error
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval/lm_loss"] is None
    code, out, err = run_ranks("call_tool", 1, "tools.evaluate", [str(tmp_path / "run")])[0]
    assert (code, out) == (2, "") and err.splitlines()[-1].startswith(f"error: {tmp_path / 'run' / 'checkpoints'}")
    assert "the loss of a is nan" in err and err.count("error: ") == 1


def test_links_in_a_run_folder_are_never_written_through(run_ranks, tiny_data, tmp_path):
    run, target = tmp_path / "run", tmp_path / "target"
    config = config_of(tiny_data, run, 1)
    run_ranks("run_job", 1, config)
    names = ("config.yaml", "environment.json", "summary.json", "metrics.jsonl", "checkpoints/latest")
    for name in (*names, "checkpoints/.latest.new"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in (".step_00000002.partial", "step_00000002", ".step_00000009.deleting"):
        (run / "checkpoints" / name).symlink_to(outside)
    target.write_text("precious")
    config.train.steps = 2
    ((out, end),) = run_ranks(f"{HERE}:run_and_listen", 1, config)
    assert end is None, out
    assert target.read_text() == "precious" and list(outside.iterdir()) == [] and steps(run) == [1, 2]
    assert [path for path in run.rglob("*") if path.is_symlink()] == []

    config.train.steps = 3
    for name in (".lock", "checkpoints", "wandb", "profile"):
        kept = run / name
        aside = run / f"{name}.aside"
        if kept.exists():
            kept.rename(aside)
        kept.symlink_to(outside if name in ("checkpoints", "wandb", "profile") else target)
        ((out, end),) = run_ranks(f"{HERE}:run_and_listen", 1, config)
        assert f"{kept}: is a link" in str(end), (name, out)
        kept.unlink()
        if aside.exists():
            aside.rename(kept)
    assert target.read_text() == "precious" and list(outside.iterdir()) == []
