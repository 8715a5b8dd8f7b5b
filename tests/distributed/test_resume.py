"""Checkpoints of live runs: 10 steps are 5 + resume + 5 bit for bit, and ZeRO does not show in the files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from recipes.checkpoint.format import open_checkpoint
from recipes.config import Config, DecayStyle, OptimizerName, Precision, Resume, WandbMode
from recipes.telemetry.jsonl import read_metrics
from tests.tiny import tiny_config

pytestmark = pytest.mark.distributed


def training_config(data: Path, folder: Path, stage: int = 1) -> Config:
    """10 AdamW steps with dropout, accumulation 2 on two ranks, a checkpoint after step 5."""
    config = tiny_config(zero__stage=stage, train__micro_batch_size=2, train__steps=10, train__eval_samples=3)
    config.model.hidden_dropout = config.model.attention_dropout = 0.1
    config.optimizer.name, config.optimizer.lr, config.optimizer.min_lr = OptimizerName.adamw, 1e-2, 1e-3
    config.optimizer.clip_grad, config.optimizer.weight_decay = 1.0, 0.1
    config.schedule.lr_warmup_steps = 3
    config.checkpoint.save_interval = 5
    config.telemetry.wandb_mode = WandbMode.disabled
    config.data.path, config.run.dir = str(data), str(folder)
    return config


def stored(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by kind and name."""
    checkpoint = open_checkpoint(folder / "checkpoints" / f"step_{step:08d}")
    return {
        f"{kind}:{name}": checkpoint.read(kind, name)
        for kind in checkpoint.kinds()
        for name in checkpoint.tensors(kind)
    }


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (1, "bf16"), (2, "bf16")]
)
def test_interrupted_run_is_bitwise_the_straight_run(run_ranks, tiny_data, tmp_path, stage, precision):
    straight = training_config(tiny_data, tmp_path / "straight", stage)
    straight.train.precision = Precision[precision]
    run_ranks("run_job", 2, straight)

    first = copy.deepcopy(straight)
    first.run.dir = str(tmp_path / "resumed")
    first.schedule.lr_decay_steps = 10
    straight.schedule.lr_decay_steps = 10
    first.train.steps = 7  # ends between checkpoints
    first.checkpoint.save_final = False
    run_ranks("run_job", 2, first)
    second = copy.deepcopy(first)
    second.train.steps, second.run.resume, second.checkpoint.save_final = 10, Resume.auto, True
    run_ranks("run_job", 2, second)

    expected, found = stored(tmp_path / "straight", 10), stored(tmp_path / "resumed", 10)
    assert expected.keys() == found.keys()
    different = [name for name in expected if not same_bits(expected[name], found[name])]
    assert not different
    lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("straight", "resumed")]
    for key in ("lm_loss", "grad_norm", "lr", "consumed_samples", "eval/lm_loss"):
        values = [[(row["step"], row[key]) for row in rows if key in row] for rows in lines]
        assert values[0] == [pair for pair in values[1] if key != "eval/lm_loss" or pair[0] == 10], key


def test_zero_stages_write_the_same_files(run_ranks, tiny_data, tmp_path):
    """The same state, loaded under another stage and saved again, gives the same tensors."""
    first = training_config(tiny_data, tmp_path / "zero0", stage=0)
    run_ranks("run_job", 2, first)
    expected = stored(tmp_path / "zero0", 10)
    assert any(name.startswith("optimizer:exp_avg_sq/") for name in expected)
    for stage, world_size in ((2, 2), (1, 2), (1, 1), (2, 4), (3, 2), (3, 4)):
        found = run_ranks("resave", world_size, first, stage, str(tmp_path / f"zero{stage}_{world_size}"))[0]
        again = stored(Path(found).parents[1], 10)
        different = [
            name for name in expected if not name.startswith("rng:") and not same_bits(expected[name], again[name])
        ]
        assert not different, f"ZeRO-{stage} on {world_size} ranks"


def test_learning_rate_after_resume(run_ranks, tiny_data, tmp_path):
    """The list of learning rates is that of the straight run, in warm-up and after it; other settings are refused."""
    for style in (DecayStyle.cosine, DecayStyle.wsd):
        config = training_config(tiny_data, tmp_path / style.name)
        config.schedule.lr_decay_style, config.schedule.wsd_decay_steps = style, 3
        config.schedule.lr_warmup_steps, config.checkpoint.save_interval, config.checkpoint.keep = 4, 2, 9
        run_ranks("run_job", 1, config)
        rates = [row["lr"] for row in read_metrics(tmp_path / style.name / "metrics.jsonl") if "lr" in row]
        for step in (2, 8):
            config.run.resume, config.checkpoint.load_step = Resume.auto, step
            run_ranks("run_job", 1, config)
            again = [row["lr"] for row in read_metrics(tmp_path / style.name / "metrics.jsonl") if "lr" in row]
            assert again == rates
        config.train.steps = 20
        with pytest.raises(
            RuntimeError, match=r"(?s)train\.steps=20 but the checkpoint has 10.*run\.resume_with=\[train\.steps\]"
        ):
            run_ranks("run_job", 1, config)
