"""Runs -> PNG files and one HTML page that holds them, so that it can be sent as it is.

The page names no other file or server, and its content policy forbids to load any.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from recipes.config import to_plain
from recipes.files import replace_bytes, replace_text
from recipes.logical import expert_counts
from recipes.telemetry.console import format_duration
from tools.report import figures
from tools.report.compare import row
from tools.report.domains import DomainUse
from tools.report.runs import Run, tokens_per_step

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff }
body { max-width: 1150px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem } p { margin: .3rem 0; max-width: 52rem }
.wide { overflow-x: auto } img { max-width: 100%; height: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0 }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top }
th { border-bottom: 2px solid #888 } th:first-child, td:first-child { text-align: left }
td { overflow-wrap: anywhere; min-width: 4rem }
"""


@dataclass(frozen=True)
class Picture:
    """A PNG file with what the page says about it."""

    file: str
    title: str
    caption: str
    png: bytes


def pictures(runs: Sequence[Run], uses: dict[int, DomainUse]) -> Iterator[Picture]:
    """Every picture that the runs have data for. `uses`: number of a run in `runs` -> its experts by domain."""
    if len(runs) > figures.MOST_RUNS:
        raise ValueError(f"{len(runs)} runs: one picture can tell at most {figures.MOST_RUNS} apart; leave some out")
    yield Picture(
        "loss_steps.png",
        "Loss against steps",
        "Training loss of each step's batch, and the mean loss over the held-out samples of all domains.",
        figures.render(lambda: figures.loss_curves(runs, against_seconds=False)),
    )
    yield Picture(
        "loss_seconds.png",
        "Loss against time",
        "The same against seconds of training: what the optimizer steps took, without start-up, evaluation and checkpoints.",
        figures.render(lambda: figures.loss_curves(runs, against_seconds=True)),
    )
    if any(evaluation.by_domain for run in runs for evaluation in run.evaluations[-1:]):
        yield Picture(
            "domain_losses.png",
            "Held-out loss by domain",
            "Losses of different domains do not compare: a token is more text in one than in another.",
            figures.render(lambda: figures.domain_losses(runs)),
        )
    for number, run in enumerate(runs):
        if run.counts_TNE is not None:
            yield from _expert_pictures(number, run, uses.get(number))
    if any(run.counts_TNE is not None or run.skipped_T.any() for run in runs):
        yield Picture(
            "stability.png",
            "Stability",
            "Every step as it was, and a cross where a step was not applied; a run that diverges leaves the first panel at the "
            "top. The router z-loss is the mean square of the logarithm of the routers' summed exponentials: it grows with the "
            "routers' logits.",
            figures.render(lambda: figures.stability(runs)),
        )
    yield Picture(
        "optimizer.png",
        "Learning rate and gradient norm",
        "The norm of the gradient of all parameters, before it is clipped.",
        figures.render(lambda: figures.optimizer_curves(runs)),
    )


def _expert_pictures(number: int, run: Run, use: DomainUse | None) -> Iterator[Picture]:
    suffix = f"{number + 1}_{re.sub(r'[^A-Za-z0-9]+', '_', run.name)[:40]}.png"
    yield Picture(
        f"experts_{suffix}",
        f"{run.name}: load of the experts",
        "Left: how the tokens of the last steps were shared out. Right: how far the busiest expert was above the mean; 0 is "
        "an even load.",
        figures.render(lambda: figures.expert_load(run, expert_counts(run.config))),
    )
    if run.gates_TNE is not None:
        yield Picture(
            f"gates_{suffix}",
            f"{run.name}: gates, and how the load moves",
            "Left: by how much the outputs of an expert are multiplied, on average. Right: the part of each layer's choices that "
            "would have to go to other experts for the load of the step before; a router that has settled is dark.",
            figures.render(lambda: figures.expert_gates(run, expert_counts(run.config))),
        )
    if use is not None:
        yield Picture(
            f"domains_{suffix}",
            f"{run.name}: experts by domain",
            f"Where the held-out tokens of each domain go, after step {use.step}; a row is 100 %.",
            figures.render(lambda: figures.domain_experts(use, expert_counts(run.config))),
        )


def write(runs: Sequence[Run], uses: dict[int, DomainUse], notes: Sequence[str], out: Path,
          done: Callable[[], object] = lambda: None) -> Path:  # fmt: skip
    """PNG files and index.html in the folder `out`; returns the page. `done` is called after each picture."""
    out.mkdir(parents=True, exist_ok=True)
    shown = []
    for picture in pictures(runs, uses):
        replace_bytes(out / picture.file, picture.png)
        shown.append(picture)
        done()
    page = out / "index.html"
    replace_text(page, html(runs, shown, notes))
    return page


def html(runs: Sequence[Run], shown: Sequence[Picture], notes: Sequence[str]) -> str:
    """The whole page; every text from a run is escaped."""
    title = escape(", ".join(run.name for run in runs))
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">",
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        "<h1>Training runs</h1>",
        _table(_summary_rows(runs)),
        "<p>FLOPs are those of forward and backward per token; active parameters are those that one token meets.</p>",
        *(f"<p>{escape(note)}</p>" for note in notes),
    ]
    if different := _different_settings(runs):
        parts += ["<h2>Settings that differ</h2>", _table(different)]
    for picture in shown:
        image = base64.b64encode(picture.png).decode()
        parts.append(
            f"<h2>{escape(picture.title)}</h2><p>{escape(picture.caption)}</p>"
            f'<img alt="{escape(picture.title)}" src="data:image/png;base64,{image}">'
        )
    return "\n".join([*parts, "</body></html>\n"])


def _summary_rows(runs: Sequence[Run]) -> list[list[str]]:
    header = ["run", "seed", "experts", "parameters", "active", "FLOPs per token", "steps", "tokens", "held-out nll",
              "tokens per second", "training time"]  # fmt: skip
    lines = [header]
    for run in runs:
        values = row(run)
        experts = " or ".join(str(count) for count in dict.fromkeys(expert_counts(run.config).values()))
        nll = "not evaluated" if values["nll"] is None else f"{values['nll']:.4f}"
        lines.append(
            [
                run.name,
                str(values["seed"]),
                f"{experts}, top-{run.config.moe.moe_router_topk}" if experts else "none",
                *(f"{values[key]:,}" for key in ("total_params", "active_params", "flops_per_token", "steps")),
                f"{run.steps * tokens_per_step(run.config):,}",
                nll,
                f"{values['tokens_per_second']:,.0f}",
                format_duration(values["seconds"]),
            ]
        )
    return lines


def _different_settings(runs: Sequence[Run]) -> list[list[str]]:
    """A header and a line for each key that has not the same value in all runs; where and what they are called is left out."""
    flat = [_flatten(to_plain(run.config)) for run in runs]
    keys = [key for key in flat[0] if key not in ("run.dir", "run.name") and any(f[key] != flat[0][key] for f in flat)]
    return (
        [["setting", *(run.name for run in runs)], *([key, *(str(f[key]) for f in flat)] for key in keys)]
        if keys
        else []
    )


def _flatten(plain: dict[str, Any]) -> dict[str, Any]:
    return {f"{group}.{key}": value for group, values in plain.items() for key, value in values.items()}


def _table(lines: Sequence[Sequence[str]]) -> str:
    header, *body = ([escape(cell) for cell in line] for line in lines)
    rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>\n" for line in body)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{cell}</th>" for cell in header)}</tr>\n{rows}</table></div>'
