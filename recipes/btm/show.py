"""Results of an evaluation -> a table on the terminal, and two pictures: branches by domains, and who is believed along a text.
Before that, bars of the training.

Colours are those of Okabe and Ito (2008), "Color Universal Design"; beyond eight branches a colour map goes on.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.progress import TaskID
    from rich.table import Table

    from recipes.btm.pool import Job

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#F0E442", "#000000")
_DOTS_PER_INCH = 130
_STYLE: dict[Any, Any] = {"axes.titlesize": 11, "axes.titlelocation": "left", "font.size": 10, "text.parse_math": False}
_MOST_CELLS = 16  # branches or domains with their numbers written into the matrix
_FILE_WIDTH = 160  # characters per line
_FINE_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.4, 1.6, 2)  # of ratios that differ by less than 2
_COARSE_TICKS = (0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100)
_COLUMNS = 4  # of small pictures


@contextlib.contextmanager
def job_bars(steps: Mapping[str, tuple[Path, int, int]]) -> Iterator[Callable[[Sequence[Job]], None]]:
    """Bars of running jobs on a terminal. `steps`: run folder, first and last step of each. Yields what looks at them."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def look(running: Sequence[Job]) -> None:
            for job in running if console.is_terminal else ():
                folder, first, last = steps[job.name]
                if job.name not in tasks:
                    tasks[job.name] = progress.add_task(job.name, total=last - first)
                progress.update(tasks[job.name], completed=max(0, _last_step(folder / "metrics.jsonl") - first))

        yield look


def _last_step(metrics: Path) -> int:
    """The step of the last complete line of a run's metrics, 0 before the first."""
    with contextlib.suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 4096))
        found = re.findall(rb'^\{"step": (\d+)', file.read(), re.MULTILINE)
        return int(found[-1]) if found else 0
    return 0


def rows(results: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every model with its perplexities, in the order of the table."""
    found = [("dense", results["models"]["dense"]), ("seed", results["models"]["seed"])]
    found += [(f"branch {name}", results["models"][name]) for name in results["branches"]]
    for family, value in results["ensemble"].items():
        found.append((f"ensemble, {family}", value))
        found += [
            (f"  {variant.replace('_', ' ')}", other) for variant, other in results["ensembles"].get(family, {}).items()
        ]
    found += [(f"average, {kind}", value) for kind, value in results["averages"].items()]
    labels = {"mix_ridge": "mix, routers by regression", "mix": "mix, trained"}
    return found + [(labels[name], value) for name, value in results["mixes"].items()]


def table(results: Mapping[str, Any]) -> Table:
    """Perplexity of each model, against the dense run's, and by domain."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(
        "model", title="held-out perplexity", title_justify="left", caption=caption(results), caption_justify="left"
    )
    for header in ("all", "to dense", *results["domains"]):
        shown.add_column(Text(header), justify="right")
    dense = results["models"]["dense"]["ppl"]
    for label, value in rows(results):
        by_domain = [f"{value['by_domain'][domain]:.2f}" for domain in results["domains"]]
        shown.add_row(Text(label), f"{value['ppl']:.2f}", f"x {value['ppl'] / dense:.3f}", *by_domain)
    return shown


def caption(results: Mapping[str, Any]) -> str:
    """The compute that was spent, in words."""
    compute, ends = results["compute"], results["amounts"]
    count = len(results["branches"])
    text = (
        f"training FLOPs: dense {compute['flops_dense']:.3g}; seed {compute['flops_seed']:.3g} + branches "
        f"{compute['flops_branches']:.3g} = {compute['flops_btm']:.3g}; control {compute['flops_control']:.3g}. Steps: seed "
        f"{ends['seed']}, branches to {ends['branches']} at batch {ends['branch_batch']}, dense to {ends['dense']} at batch "
        f"{ends['batch']}. An ensemble runs {count} models per token, an average one."
    )
    if "flops_mix" not in compute:
        return text
    bits = results["mixes"]["mix"]["experts"]["specificity_bits"]
    return f"{text} Mix: {compute['flops_mix']:.3g} more; its experts tell {bits:.2f} bits of the domain, of {np.log2(count):.2f}."


def print_table(results: Mapping[str, Any]) -> None:
    """On standard output; a file has room for wide lines."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=_FILE_WIDTH)).print(table(results))


def pictures(results: Mapping[str, Any], posteriors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """PNG files by name."""
    drawn: dict[str, Callable[[], Figure]] = {
        "matrix.png": lambda: matrix(results),
        "posterior.png": lambda: posterior(posteriors, results["branches"]),
    }
    if "mix" in results["mixes"]:
        drawn["experts.png"] = lambda: experts(results["mixes"]["mix"]["experts"])
    return {name: _render(draw) for name, draw in drawn.items()}


def _render(draw: Callable[[], Figure]) -> bytes:
    import matplotlib

    image = io.BytesIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
        draw().savefig(image, format="png", dpi=_DOTS_PER_INCH)
    return image.getvalue()


def matrix(results: Mapping[str, Any]) -> Figure:
    """Perplexity of each branch on each domain as a multiple of the dense run's there, in a logarithmic colour scale."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    branches, domains, dense = results["branches"], results["domains"], results["models"]["dense"]["by_domain"]
    ratio_BD = np.array([[results["matrix"][b][d] / dense[d] for d in domains] for b in branches])
    figure = Figure(figsize=(3.2 + 0.95 * len(domains), 1.9 + 0.5 * len(branches)), layout="constrained")
    axes = figure.subplots()
    furthest = max(1.02, float(np.abs(np.log(ratio_BD)).max() and np.exp(np.abs(np.log(ratio_BD)).max())))
    image = axes.imshow(ratio_BD, cmap="RdBu_r", norm=LogNorm(1 / furthest, furthest), aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(domains)), domains, rotation=30, ha="right")
    axes.set_yticks(range(len(branches)), branches)
    axes.set(title="perplexity of each branch / of the dense run", xlabel="held-out text of", ylabel="branch")
    if max(ratio_BD.shape) <= _MOST_CELLS:
        for (b, d), value in np.ndenumerate(ratio_BD):
            strong = abs(np.log(value)) > 0.55 * np.log(furthest)
            axes.text(d, b, f"{value:.2f}", ha="center", va="center", color="white" if strong else "black")
    ticks = [tick for tick in (_FINE_TICKS if furthest <= 2 else _COARSE_TICKS) if 1 / furthest <= tick <= furthest]
    bar = figure.colorbar(image, ax=axes, ticks=ticks, format="{x:g}")
    bar.ax.minorticks_off()
    return figure


def posterior(posteriors: Mapping[str, torch.Tensor], branches: Sequence[str]) -> Figure:
    """How far each branch is believed along the first held-out sequence of each domain, one small picture each."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(posteriors))
    lines = -(-len(posteriors) // columns)
    figure = Figure(figsize=(1.5 + 2.7 * columns, 1.1 + 2.1 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    few = len(branches) <= len(_COLOURS)
    colours = _COLOURS if few else [colormaps["turbo"](k / (len(branches) - 1)) for k in range(len(branches))]
    for axes, (domain, weights_ES) in zip(grid.flat, posteriors.items(), strict=False):
        areas = axes.stackplot(
            range(weights_ES.shape[1]), weights_ES.numpy(), colors=colours[: len(branches)], linewidth=0
        )
        axes.set(title=domain, xlim=(0, weights_ES.shape[1] - 1), ylim=(0, 1))
    for axes in list(grid.flat)[len(posteriors) :]:
        axes.set_axis_off()
    figure.supxlabel("tokens read")
    figure.supylabel("p(branch | text so far)")
    figure.legend(areas[::-1], list(branches)[::-1], loc="outside right upper", frameon=False, title="branch")
    return figure


def experts(use: Mapping[str, Any]) -> Figure:
    """Shares of the experts of a mix in the choices of each domain's tokens, mean over layers; each row sums to 1."""
    from matplotlib.figure import Figure

    domains, names = list(use["shares"]), use["names"]
    share_DE = np.array([np.mean(use["shares"][domain], axis=0) for domain in domains])
    figure = Figure(figsize=(3.2 + 0.95 * len(names), 1.9 + 0.5 * len(domains)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(share_DE, cmap="Blues", vmin=0, vmax=max(0.5, float(share_DE.max())), aspect="auto")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_yticks(range(len(domains)), domains)
    axes.set(title="where tokens go, mean over layers", xlabel="expert from branch", ylabel="held-out text of")
    if max(share_DE.shape) <= _MOST_CELLS:
        for (d, e), value in np.ndenumerate(share_DE):
            axes.text(e, d, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.35 else "black")
    figure.colorbar(image, ax=axes)
    return figure
