"""What a run folder says about its training, as arrays. Reads config.yaml, metrics.jsonl and summary.json, no more.

Time is training time: the sum of what the optimizer steps took, batch tokens / tokens_per_second each. Start-up, evaluation
and checkpoints are not in it, so that runs which are evaluated more often do not look slower.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from recipes.config import Config
from recipes.files import parse_json
from recipes.logical import expert_counts
from recipes.telemetry.jsonl import read_metrics
from recipes.validation import from_stored

_TOTAL = "eval/lm_loss"
_COUNTS = "moe/tokens_per_expert"
_GATES = "moe/gate_mean_per_expert"


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss after `step` steps and `seconds` of training: nats per token over all text, and by domain."""

    step: int
    seconds: float
    nll: float
    by_domain: dict[str, float]


@dataclass(frozen=True)
class Run:
    """One run. Arrays have one entry per recorded step (T); NaN where a value is absent or not finite."""

    name: str
    folder: Path
    config: Config
    summary: dict[str, Any]
    steps_T: np.ndarray
    seconds_T: np.ndarray  # of training up to and with this step
    lm_loss_T: np.ndarray
    lr_T: np.ndarray
    grad_norm_T: np.ndarray
    z_loss_T: np.ndarray
    skipped_T: np.ndarray  # steps up to and with this one that were not applied
    # Of N layers with up to E experts; what is behind a layer's own is 0 and NaN. None: no experts, or no gates recorded.
    counts_TNE: np.ndarray | None  # tokens of the step that each expert was given
    gates_TNE: np.ndarray | None  # mean gate of an expert's tokens, NaN without any
    evaluations: list[Evaluation]

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return int(self.steps_T[-1])

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return float(self.seconds_T[-1])

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the recorded steps over their time."""
        return len(self.steps_T) * tokens_per_step(self.config) / self.seconds


def tokens_per_step(config: Config) -> int:
    """Tokens of one optimizer step over all ranks."""
    return config.train.global_batch_size * config.model.seq_length


def read_run(folder: Path, name: str | None = None) -> Run:
    """The run in `folder`, called `name` (None: its run.name).

    Raises ValueError naming the file when one is missing, damaged, or of a run without a step.
    """
    config = read_config(folder)
    rows = read_metrics(_existing(folder / "metrics.jsonl"))
    trained = [row for row in rows if "lm_loss" in row]
    if not trained:
        raise ValueError(f"{folder}/metrics.jsonl: no step is recorded; let the run make one, or leave it out")
    path = folder / "metrics.jsonl"
    steps_T = np.array([row["step"] for row in trained])
    rate_T = _column(path, trained, "tokens_per_second")
    if not (rate_T > 0).all():
        raise ValueError(f"{path}: tokens_per_second must be above 0 in every step; the file is damaged")
    seconds_T = np.cumsum(tokens_per_step(config) / rate_T)
    return Run(
        name=config.run.name if name is None else name,
        folder=folder,
        config=config,
        summary=_read_summary(folder),
        steps_T=steps_T,
        seconds_T=seconds_T,
        lm_loss_T=_column(path, trained, "lm_loss"),
        lr_T=_column(path, trained, "lr"),
        grad_norm_T=_column(path, trained, "grad_norm"),
        z_loss_T=_column(path, trained, "z_loss"),
        skipped_T=np.nan_to_num(_column(path, trained, "skipped_steps")),
        counts_TNE=_counts(path, trained, config),
        gates_TNE=_gates(path, trained, config),
        evaluations=_evaluations(path, rows, steps_T, seconds_T),
    )


def read_runs(folders: Sequence[Path], names: Sequence[str] | None = None) -> list[Run]:
    """Several runs under names that differ: the given ones, else run.name, else the folders'."""
    if names is not None and len(names) != len(folders):
        raise ValueError(f"--names: {len(names)} names for {len(folders)} run folders; give one for each, or none")
    chosen = names or [read_config(folder).run.name for folder in folders]
    if names is None and max(Counter(chosen).values()) > 1:
        chosen = [folder.resolve().name for folder in folders]
    if repeated := [name for name, count in Counter(chosen).items() if count > 1]:
        raise ValueError(f"{repeated[0]}: the name of more than one run; tell them apart by --names A B ...")
    return [read_run(folder, name) for folder, name in zip(folders, chosen, strict=True)]


def read_config(folder: Path) -> Config:
    """The description of the run in `folder`."""
    path = _existing(folder / "config.yaml")
    try:
        return from_stored(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: {reason}; it was written by another version, or damaged") from error


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name the folder of a run that has started (run.dir)")
    return path


def _read_summary(folder: Path) -> dict[str, Any]:
    """Empty for a run that has not ended."""
    path = folder / "summary.json"
    if not path.is_file():
        return {}
    try:
        summary = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); remove it, or leave the run out") from error
    if not isinstance(summary, dict):
        raise ValueError(f"{path}: must hold a JSON object; remove it, or leave the run out")
    return summary


def _column(path: Path, rows: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([_number(path, row, key) for row in rows])


def _number(path: Path, row: dict[str, Any], key: str) -> float:
    value = row.get(key)
    if value is None:
        return np.nan
    if type(value) is not float and (type(value) is not int or abs(value) > sys.float_info.max):
        raise ValueError(f"{path}, step {row['step']}: {key}={value!r:.80} must be a number; the file is damaged")
    return float(value)


def _counts(path: Path, rows: Sequence[dict[str, Any]], config: Config) -> np.ndarray | None:
    if not config.moe.has_experts:
        return None
    try:
        counts_TNE = _by_layer([row[_COUNTS] for row in rows], config, np.int64, 0)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: {_COUNTS} must be there in every step as {_shape(config)} ({error})") from error
    if counts_TNE.min() < 0:
        raise ValueError(f"{path}: {_COUNTS} must be counts")
    return counts_TNE


def _gates(path: Path, rows: Sequence[dict[str, Any]], config: Config) -> np.ndarray | None:
    if not config.moe.has_experts or not all(_GATES in row for row in rows):
        return None
    try:
        return _by_layer([row[_GATES] for row in rows], config, np.float64, np.nan)  # null becomes NaN
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {_GATES} must be {_shape(config)} in every step ({error})") from error


def _by_layer(steps: list[Any], config: Config, kind: type, fill: float) -> np.ndarray:
    """Numbers of steps, layers and their experts as [T, N, E], filled up behind a layer's own.

    Raises ValueError or TypeError when a layer has not as many as it has experts.
    """
    counts = list(expert_counts(config).values())
    values_TNE: np.ndarray = np.full((len(steps), len(counts), max(counts)), fill, dtype=kind)
    for step_NE, layers in zip(values_TNE, steps, strict=True):
        for row_E, count, values in zip(step_NE, counts, layers, strict=True):
            if len(values) != count:
                raise ValueError(f"a layer has {len(values)}")
            row_E[:count] = np.array(values, dtype=kind)
    return values_TNE


def _shape(config: Config) -> str:
    return f"layers x {' or '.join(str(count) for count in dict.fromkeys(expert_counts(config).values()))} experts"


def _evaluations(
    path: Path, rows: Sequence[dict[str, Any]], steps_T: np.ndarray, seconds_T: np.ndarray
) -> list[Evaluation]:
    found = []
    for row in rows:
        if _TOTAL not in row:
            continue
        done = int(np.searchsorted(steps_T, row["step"], side="right"))
        by_domain = {
            key.split("/")[1]: _number(path, row, key) for key in row if key.startswith("eval/") and key.count("/") == 2
        }
        seconds = float(seconds_T[done - 1]) if done else 0.0
        found.append(Evaluation(row["step"], seconds, _number(path, row, _TOTAL), by_domain))
    return found
