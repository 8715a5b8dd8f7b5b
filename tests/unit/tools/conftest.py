"""A tiny model trained on real text, for the tools that open checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from recipes.config import Config, OptimizerName, WandbMode
from recipes.validation import prepare
from tests.ranks import run_ranks
from tests.tiny import tiny_config
from tools.index import main as index
from tools.tokenizer import train

ENGLISH = "It was the best of times, it was the worst of times, it was the age of wisdom, the age of 1859.\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder, its indexed text, its tokenizer and its description."""

    folder: Path
    data: Path
    tokenizer: Path
    config: Config = field(repr=False)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """20 steps on two ranks with two checkpoints; with dropout, and the documents of a sample told apart."""
    root = tmp_path_factory.mktemp("trained")
    (root / "corpus").mkdir()
    for name, text in (("en", ENGLISH), ("ja", JAPANESE)):
        lines = (json.dumps({"text": text * (1 + i % 3) + str(i)}, ensure_ascii=False) for i in range(60))
        (root / "corpus" / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    tokenizer = root / "our.model"
    train([root / "corpus"], 400, tokenizer, max_bytes=10**6, seed=1)
    inputs = ["--input", str(root / "corpus"), "--tokenizer", str(tokenizer)]
    assert index([*inputs, "--split", "6,2,2", "--out", str(root / "data")]) == 0
    config = tiny_config(train__micro_batch_size=4, train__steps=20, train__eval_samples=7)
    config.model.vocab_size, config.optimizer.name, config.optimizer.lr = None, OptimizerName.adamw, 1e-2
    config.model.hidden_dropout = config.model.attention_dropout = 0.1
    config.data.path, config.run.dir = str(root / "data"), str(root / "run")
    config.data.reset_position_ids = config.data.reset_attention_mask = config.data.eod_mask_loss = True
    config.schedule.lr_warmup_steps, config.checkpoint.save_interval = 3, 10
    config.telemetry.wandb_mode = WandbMode.disabled
    config = prepare(config, 2, launch_dir=root)
    run_ranks("run_job", 2, config)
    return Trained(root / "run", root / "data", tokenizer, config)


@pytest.fixture
def call() -> Callable[..., tuple[int, str, str]]:
    """Runs a tool in a forked process: (exit code, standard output, standard error)."""

    def call(module: str, *arguments: object) -> tuple[int, str, str]:
        return run_ranks("call_tool", 1, module, [str(argument) for argument in arguments])[0]

    return call
