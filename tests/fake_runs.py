"""Run folders as a training run leaves them, without the training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import yaml

from recipes.config import Config, to_plain
from recipes.logical import expert_counts
from recipes.telemetry.jsonl import MetricsFile
from recipes.telemetry.summary import write_json

DOMAINS = ("en", "ja")


def fake_run(
    folder: Path, config: Config, evaluations: Mapping[int, float], rate: float = 1000.0, start: float = 4.0
) -> Path:
    """A finished run of `config`: `rate` tokens per second, training loss from `start` down.

    `evaluations`: step -> held-out loss of all text; English is 0.5 nats below it, Japanese above.
    """
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(config), allow_unicode=True), encoding="utf-8")
    write_json(folder / "environment.json", {"cpu": {"cores": 2}})
    metrics, random = MetricsFile(folder / "metrics.jsonl", None), np.random.default_rng(config.run.seed)
    tokens = config.train.global_batch_size * config.model.seq_length
    for step in range(1, config.train.steps + 1):
        values = {
            "lm_loss": start / (1 + math.log(step) / 8) + 0.05 * random.standard_normal(),
            "grad_norm": 1 + random.random(),
            "lr": 1e-3 * step / config.train.steps,
            "tokens_per_second": rate,
        }
        if counts := expert_counts(config).values():
            shares = [np.full(experts, 1 / experts) for experts in counts]
            values["moe/tokens_per_expert"] = [random.multinomial(tokens, share).tolist() for share in shares]
            values["moe/gate_mean_per_expert"] = [[None, *random.random(experts - 1)] for experts in counts]
            values["z_loss"] = 2 + random.random()
        metrics.write(step, values)
        if step in evaluations:
            domains = zip(DOMAINS, (-0.5, 0.5), strict=True)
            by_domain = {f"eval/{domain}/lm_loss": evaluations[step] + shift for domain, shift in domains}
            metrics.write(step, by_domain | {"eval/lm_loss": evaluations[step]})
    metrics.close()
    write_json(folder / "summary.json", {"name": config.run.name, "steps": config.train.steps, "seconds": 99.0})
    return folder
