"""What is good on disk stays: checkpoints beside a run that makes no progress, and files that links in a run folder point to."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from recipes.config import Config, OptimizerName, Resume, WandbMode
from tests.fuzz.mutations import sign
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


def run_that_diverges(rank: int, world_size: int, config: Config) -> tuple[str, object]:
    """Whose evaluation gives no number at last."""
    from recipes.train import loop

    real = loop.evaluate
    loop.evaluate = lambda *arguments: dict.fromkeys(real(*arguments), float("nan"))
    return run_and_listen(rank, world_size, config)


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
    ((out, end),) = run_ranks(f"{HERE}:run_that_diverges", 1, config)
    assert end == 1
    (error,) = [line for line in out.splitlines() if line.startswith("error: ")]
    assert "lm_loss is nan: training has diverged; go back by checkpoint.load_step=N" in error
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval/lm_loss"] is None
    ((_, end),) = run_ranks(f"{HERE}:run_and_listen", 1, config)
    assert end == 1, "going on with a run that has ended so changes nothing"


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


def test_generators_that_are_no_state_of_theirs_are_one_message(run_ranks, tiny_data, tmp_path):
    config = config_of(tiny_data, tmp_path / "run", 1)
    run_ranks("run_job", 1, config)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    path = checkpoint / "rng-00000-of-00001.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:start] + bytes(len(data) - start))
    sign(checkpoint, path.name)
    config.train.steps = 2
    ((_, end),) = run_ranks(f"{HERE}:run_and_listen", 1, config)
    assert str(end).startswith(f"{checkpoint}: the generators of rank 0 are no state of theirs")
