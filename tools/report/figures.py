"""Runs -> matplotlib figures. No state: no pyplot, no global settings are changed.

Colours are those of Okabe and Ito (2008), "Color Universal Design", told apart also by readers with colour blindness;
after the seventh run they come again with dashed lines.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.report.domains import DomainUse
from tools.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")  # yellow is too pale for lines
MOST_RUNS = 2 * len(COLOURS)
LAST_STEPS = 50  # over which loads and gates are averaged
_MOST_COLUMNS = 60  # of a heat map over steps
_DOTS_PER_INCH = 130
_STYLE: dict[Any, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "font.size": 10,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "text.parse_math": False,  # a "$" in a name is a dollar
}


def render(draw: Callable[[], Figure]) -> bytes:
    """The figure that `draw` makes, in our style, as a PNG."""
    import matplotlib

    image = io.BytesIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Names in scripts that matplotlib's font lacks become boxes; the page has them in full.
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
        draw().savefig(image, format="png", dpi=_DOTS_PER_INCH)
    return image.getvalue()


def smooth(values_T: np.ndarray, window: int) -> np.ndarray:
    """Mean over the `window` entries around each, fewer at the ends; entries that are not finite do not count."""
    finite_T = np.isfinite(values_T)
    half = window // 2
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite_T, values_T, 0.0))))
    numbers = np.concatenate(([0], np.cumsum(finite_T)))
    index_T = np.arange(len(values_T))
    first_T, end_T = np.maximum(index_T - half, 0), np.minimum(index_T + half + 1, len(values_T))
    count_T = numbers[end_T] - numbers[first_T]
    mean_T = (sums[end_T] - sums[first_T]) / np.maximum(count_T, 1)
    return np.where(count_T > 0, mean_T, np.nan)


def window(num_steps: int) -> int:
    """Steps that curves are smoothed over: a fiftieth of the run, an odd number."""
    return 2 * (num_steps // 100) + 1


def loss_curves(runs: Sequence[Run], against_seconds: bool) -> Figure:
    """Training loss and held-out loss, side by side on one scale."""
    figure, (left, right) = _panels(1, 2, sharey=True)
    for number, run in enumerate(runs):
        x_T = run.seconds_T if against_seconds else run.steps_T
        _curve(left, x_T, run.lm_loss_T, number)
        x = [e.seconds if against_seconds else e.step for e in run.evaluations]
        right.plot(x, [e.nll for e in run.evaluations], **_line(number), marker="o", markersize=4)
    left.set(title=f"training loss ({_smoothing(runs)})", ylabel="nats per token")
    right.set(title="held-out loss, all domains")
    right.tick_params(labelleft=True)
    for axes in (left, right):
        axes.set_xlabel("seconds of training" if against_seconds else "optimizer steps")
    right.set_xlim(left.get_xlim())
    left.set_ylim(*_loss_range(runs))
    _legend(figure, runs)
    return figure


def domain_losses(runs: Sequence[Run]) -> Figure:
    """Last held-out loss by domain of the runs that were evaluated."""
    last = {number: run.evaluations[-1] for number, run in enumerate(runs) if run.evaluations}
    domains = sorted({domain for evaluation in last.values() for domain in evaluation.by_domain})
    figure, axes = _figure(9, 1.6 + 0.42 * (len(domains) + 1))
    labels = ["all", *domains]
    for number, evaluation in last.items():
        values = [evaluation.nll, *(evaluation.by_domain.get(domain, np.nan) for domain in domains)]
        axes.plot(values, range(len(labels)), **_dot(number))
    axes.set_yticks(range(len(labels)), [_short(label) for label in labels])
    axes.set(xlabel="nats per token", title="held-out loss at the last evaluation", ylim=(len(labels) - 0.5, -0.5))
    _legend(figure, runs, dots=True)
    return figure


def optimizer_curves(runs: Sequence[Run]) -> Figure:
    """Learning rate and gradient norm."""
    from matplotlib.ticker import LogFormatter

    figure, (left, right) = _panels(1, 2)
    widths = np.linspace(
        1.6 if len(runs) == 1 else 5, 1.6, len(runs)
    )  # schedules are often equal: keep the lower ones in sight
    for number, run in enumerate(runs):
        left.plot(run.steps_T, run.lr_T, **_line(number), linewidth=widths[number])
        _curve(right, run.steps_T, run.grad_norm_T, number)
    left.set(title="learning rate", xlabel="optimizer steps", ylim=(0, None))
    left.yaxis.set_major_formatter("{x:g}")
    right.set(title=f"gradient norm before clipping ({_smoothing(runs)})", xlabel="optimizer steps", yscale="log")
    for set_formatter in (right.yaxis.set_major_formatter, right.yaxis.set_minor_formatter):
        set_formatter(LogFormatter(minor_thresholds=(2, 0.5)))  # the default one writes formulas
    _legend(figure, runs)
    return figure


def expert_load(run: Run, layers: Mapping[int, int]) -> Figure:
    """Share of each expert in the last steps, layer by layer, and the imbalance of each layer over the run.

    `layers`: global number -> experts. Where these are unlike, shares are shown as multiples of an even one.
    """
    from matplotlib.colors import TwoSlopeNorm

    assert run.counts_TNE is not None
    counts_TNE = run.counts_TNE.astype(float)
    last = min(LAST_STEPS, len(counts_TNE))
    load_NE = counts_TNE[-last:].sum(axis=0)
    share_NE = load_NE / load_NE.sum(axis=1, keepdims=True).clip(min=1)
    experts_N = np.array(list(layers.values()))
    own_NE = np.arange(share_NE.shape[1]) < experts_N[:, None]
    figure, (left, right) = _panels(1, 2, height=max(3.4, 1.8 + 0.42 * len(layers)), widths=(1.35, 1))
    labels = [f"layer {layer}" for layer in layers]
    if own_NE.all():
        even = 100 / share_NE.shape[1]
        norm = TwoSlopeNorm(even, vmin=0, vmax=max(2 * even, 100 * share_NE.max()))  # white is an even share
        image = _shares(left, share_NE, labels, "RdBu_r", norm)
        _scale(figure, image, left, "% of tokens")
    else:
        times_NE = np.where(own_NE, share_NE * experts_N[:, None], np.nan)
        norm = TwoSlopeNorm(1, vmin=0, vmax=max(2, np.nanmax(times_NE)))
        image = _heat_map(left, times_NE, labels, "RdBu_r", norm, digits=2)
        left.set_xlabel("expert (1 is an even share of its layer)")
        _scale(figure, image, left, "x even share")
    left.set_title(f"share of tokens, last {last} steps")
    mean_TN = (counts_TNE.sum(axis=2) / experts_N).clip(min=1e-9)
    for row, layer in enumerate(layers):
        _curve(right, run.steps_T, counts_TNE[:, row].max(axis=1) / mean_TN[:, row] - 1, row, f"layer {layer}")
    right.set(title=f"imbalance, max_vio ({_smoothing([run])})", xlabel="optimizer steps", ylim=(0, None))
    right.set_ylabel("(largest - mean) / mean load")
    if len(layers) <= 6:
        right.legend()
    return figure


def expert_gates(run: Run, layers: Mapping[int, int]) -> Figure:
    """Mean gate of each expert in the last steps, layer by layer (nothing for an expert without a token, or that a layer does not
    have), and how far each layer's load moved over the run."""
    from matplotlib.colors import Normalize

    assert run.counts_TNE is not None and run.gates_TNE is not None
    last = min(LAST_STEPS, len(run.counts_TNE))
    counts_TNE = run.counts_TNE[-last:]
    count_NE = (counts_TNE * np.isfinite(run.gates_TNE[-last:])).sum(axis=0)
    gate_NE = (np.nan_to_num(run.gates_TNE[-last:]) * counts_TNE).sum(axis=0) / count_NE.clip(min=1)
    most, gate_NE = gate_NE.max(), np.where(count_NE > 0, gate_NE, np.nan)
    labels = [f"layer {layer}" for layer in layers]
    figure, (left, right) = _panels(1, 2, height=max(3.4, 1.8 + 0.42 * len(layers)))
    image = _heat_map(left, gate_NE, labels, "viridis", Normalize(0, max(most, 1e-9)), digits=2)
    left.set(title=f"mean gate, last {last} steps", xlabel="expert")
    _scale(figure, image, left, "gate")
    change_NT = routing_change(run.counts_TNE).T
    first_T, width = run.steps_T[1:], -(-max(1, change_NT.shape[1]) // _MOST_COLUMNS)
    blocks = [change_NT[:, start : start + width].mean(axis=1) for start in range(0, change_NT.shape[1], width)]
    if blocks:
        span = (first_T[0] - 0.5, first_T[0] - 0.5 + width * len(blocks), len(layers) - 0.5, -0.5)
        image = right.imshow(100 * np.stack(blocks, axis=1), cmap="magma", vmin=0, aspect="auto", extent=span)
        _scale(figure, image, right, "% of choices")
    right.grid(visible=False)
    right.set_yticks(range(len(layers)), labels)
    right.set(title="choices that moved since the step before", xlabel="optimizer steps")
    return figure


def routing_change(counts_TNE: np.ndarray) -> np.ndarray:
    """Part of a layer's choices that would have to go elsewhere for the load of the step before: [T - 1, N]."""
    share_TNE = counts_TNE / counts_TNE.sum(axis=2, keepdims=True).clip(min=1)
    return 0.5 * np.abs(np.diff(share_TNE, axis=0)).sum(axis=2)


def stability(runs: Sequence[Run]) -> Figure:
    """Loss, gradient norm and router z-loss of every step; a cross where a step was not applied.

    A loss of more than one and a half times what the runs began with is not shown: it would flatten all others.
    """
    from matplotlib.ticker import NullFormatter

    curves = {
        "training loss": [run.lm_loss_T for run in runs],
        "gradient norm before clipping": [run.grad_norm_T for run in runs],
        "router z-loss": [run.z_loss_T for run in runs],
    }
    curves = {title: ys for title, ys in curves.items() if any(np.isfinite(y_T).any() for y_T in ys)}
    figure, panels = _panels(1, len(curves), squeeze=False)
    for axes, (title, ys) in zip(panels.flat, curves.items(), strict=True):
        for number, (run, y_T) in enumerate(zip(runs, ys, strict=True)):
            skipped_T = np.diff(run.skipped_T, prepend=0) > 0
            axes.plot(run.steps_T, y_T, **_line(number), linewidth=0.9)
            axes.plot(run.steps_T[skipped_T], y_T[skipped_T], "x", color=_colour(number), markersize=5)
        axes.set(title=title, xlabel="optimizer steps")
        if axes is not panels.flat[0]:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")  # the default one writes formulas
            axes.yaxis.set_minor_formatter(NullFormatter())
    losses = np.concatenate([run.lm_loss_T[np.isfinite(run.lm_loss_T)] for run in runs])
    limit = 1.5 * max((run.lm_loss_T[0] for run in runs if np.isfinite(run.lm_loss_T[0])), default=np.inf)
    if losses.size and losses.max() > limit:
        panels.flat[0].set_ylim(0.95 * losses.min(), limit)
    panels.flat[0].set_ylabel("nats per token")
    _legend(figure, runs)
    return figure


def domain_experts(use: DomainUse, layers: Mapping[int, int]) -> Figure:
    """One panel per layer: which share of a domain's tokens goes to which expert. `layers`: global number -> experts."""
    from matplotlib.colors import Normalize

    columns = min(2, len(use.layers))
    rows = -(-len(use.layers) // columns)
    height = rows * (1.3 + 0.42 * len(use.domains)) + 0.3
    figure, panels = _panels(rows, columns, height=height, squeeze=False)
    share_DNE = use.share_DNE
    norm = Normalize(0, 100 * max(share_DNE.max(), 2 / min(layers.values())))
    for place, axes in enumerate(panels.flat):
        if place >= len(use.layers):
            axes.set_visible(False)
            continue
        labels = use.domains if place % columns == 0 else [""] * len(use.domains)
        share_DE = share_DNE[:, place, : layers[use.layers[place]]]
        image = _shares(axes, share_DE, labels, "Blues", norm)
        axes.set_title(f"layer {use.layers[place]}")
    _scale(figure, image, list(panels.flat), "% of tokens")
    return figure


def scaling(points: Mapping[int, Sequence[float]], xlabel: str, ylabel: str) -> Figure:
    """x -> values of the seeds: each as a dot, their mean and standard deviation as a line with error bars."""
    figure, axes = _figure(6.5, 4)
    places = sorted(points)
    mean = [np.mean(points[x]) for x in places]
    deviation = np.array([np.std(points[x], ddof=1) if len(points[x]) > 1 else 0.0 for x in places])
    axes.errorbar(places, mean, deviation, color=COLOURS[0], marker="s", markersize=5, capsize=4, label="mean ± s.d.")
    dots = [(x, value) for x in places for value in points[x]]
    x, y = zip(*dots, strict=True)
    axes.plot(x, y, "o", color=COLOURS[1], markersize=5, alpha=0.7, label="one seed", zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(x) for x in places])
    axes.minorticks_off()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend()
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _panels(rows: int, columns: int, height: float = 3.9, widths: Sequence[float] | None = None, **options):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    return figure, figure.subplots(rows, columns, gridspec_kw={"width_ratios": widths}, **options)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _line(number: int) -> dict[str, Any]:
    return {"color": _colour(number), "linestyle": "--" if number // len(COLOURS) % 2 else "-"}


def _dot(number: int) -> dict[str, Any]:
    """Hollow where lines are dashed."""
    colour = _colour(number)
    face = "white" if number // len(COLOURS) % 2 else colour
    return {"color": colour, "markerfacecolor": face, "marker": "o", "linestyle": "", "markersize": 8, "alpha": 0.85}


def _curve(axes: Axes, x_T: np.ndarray, y_T: np.ndarray, number: int, label: str = "") -> None:
    """The smoothed values, the raw ones faint behind."""
    axes.plot(x_T, y_T, color=_colour(number), alpha=0.18, linewidth=0.7)
    axes.plot(x_T, smooth(y_T, window(len(y_T))), **_line(number), label=label or None)


def _smoothing(runs: Sequence[Run]) -> str:
    windows = sorted({window(len(run.steps_T)) for run in runs})
    return (
        "not smoothed"
        if windows == [1]
        else f"mean of {' to '.join(str(w) for w in windows[:: len(windows) - 1 or 1])} steps"
    )


def _loss_range(runs: Sequence[Run]) -> tuple[float | None, float | None]:
    """Limits that show the end of the curves: the first tenth of a run may begin above them."""
    shown = [smooth(run.lm_loss_T, window(len(run.lm_loss_T)))[len(run.lm_loss_T) // 10 :] for run in runs]
    late = [e.nll for run in runs for e in run.evaluations if e.step >= run.steps / 10]
    values = np.concatenate([*shown, late])
    values = values[np.isfinite(values)]
    if not len(values):
        return None, None
    margin = 0.04 * (values.max() - values.min()) + 0.01
    return float(values.min() - margin), float(values.max() + margin)


def _shares(axes: Axes, share_RE: np.ndarray, labels: Sequence[str], cmap: str, norm: Normalize) -> AxesImage:
    """Rows x experts in per cent."""
    image = _heat_map(axes, 100 * share_RE, labels, cmap, norm, digits=1)
    axes.set_xlabel(f"expert (an even share is {100 / share_RE.shape[1]:.3g} %)")
    return image


def _heat_map(
    axes: Axes, value_RE: np.ndarray, labels: Sequence[str], cmap: str, norm: Normalize, digits: int
) -> AxesImage:
    """Rows x experts, with the numbers while they can be read."""
    num_experts = value_RE.shape[1]
    image = axes.imshow(value_RE, cmap=cmap, norm=norm, aspect="auto")
    axes.set_facecolor("#eeeeee")  # of what is NaN
    axes.grid(visible=False)
    axes.set_yticks(range(len(labels)), [_short(label) for label in labels])
    axes.set_xticks(range(0, num_experts, 1 if num_experts <= 16 else -(-num_experts // 16)))
    if num_experts <= 16:
        for (row, expert), value in np.ndenumerate(value_RE):
            if np.isnan(value):
                continue
            red, green, blue, _ = image.to_rgba(value)
            colour = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"
            text = f"{value:.{digits}f}".removesuffix(".0")
            axes.text(expert, row, text, ha="center", va="center", color=colour, fontsize=8)
    return image


def _scale(figure: Figure, image, axes, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)


def _legend(figure: Figure, runs: Sequence[Run], dots: bool = False) -> None:
    """Above the panels. Texts are set afterwards: matplotlib leaves out labels that begin with "_"."""
    from matplotlib.lines import Line2D

    handles = []
    for number in range(len(runs)):
        hollow: dict[str, Any] = {"markerfacecolor": "white"} if number >= len(COLOURS) else {}
        line: dict[str, Any] = (
            {"marker": "o", "linestyle": "", "color": _colour(number), **hollow} if dots else _line(number)
        )
        handles.append(Line2D([], [], **line))
    columns = min(len(runs), max(1, 100 // (6 + max(len(_short(run.name)) for run in runs))))
    legend = figure.legend(handles, [str(n) for n in range(len(runs))], loc="outside upper left", ncols=columns)
    for text, run in zip(legend.get_texts(), runs, strict=True):
        text.set_text(_short(run.name))


def _short(text: str, length: int = 32) -> str:
    """One line that fits beside a panel."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 1]}…"
