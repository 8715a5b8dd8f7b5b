"""What a person sees of a run: a live bar on a terminal, one plain line every few steps in a log file.

`open_progress` picks between the two; ranks other than 0 use `NoProgress`.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text


class Progress(Protocol):
    """Shown progress of a training run."""

    def say(self, message: str | Table) -> None:
        """Show a plain-English message, or a table, without disturbing the progress."""

    def step(self, step: int, values: Mapping[str, float], eta_seconds: float | None) -> None:
        """Show that optimizer step `step` (1-based) is done.

        Args:
            values: metrics of the step; `lm_loss`, `grad_norm`, `lr` and `tokens_per_second` are shown when present.
            eta_seconds: time left, None when not known yet.
        """

    def close(self) -> None:
        """End the display; later calls do nothing."""


class NoProgress:
    """Shows nothing, for ranks other than 0."""

    def say(self, message: str | Table) -> None:
        return

    def step(self, step: int, values: Mapping[str, float], eta_seconds: float | None) -> None:
        return

    def close(self) -> None:
        return


class PlainProgress:
    """One line every `log_interval` steps and for the first and the last step, for logs and pipes."""

    def __init__(self, console: Console, total_steps: int, start_step: int, log_interval: int) -> None:
        self._console = console
        self._total = total_steps
        self._first = start_step + 1
        self._interval = log_interval

    def say(self, message: str | Table) -> None:
        _print(self._console, message)

    def step(self, step: int, values: Mapping[str, float], eta_seconds: float | None) -> None:
        if step in (self._first, self._total) or step % self._interval == 0:
            parts = [f"step {step}/{self._total}", *describe(values), f"ETA {format_duration(eta_seconds)}"]
            self.say("  ".join(parts))

    def close(self) -> None:
        return


class LiveProgress:
    """A bar that is redrawn in place; messages scroll above it."""

    def __init__(self, console: Console, total_steps: int, start_step: int) -> None:
        columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
        # Two redraws a second: the drawing thread takes the interpreter lock from the training thread.
        self._bar = RichProgress(*columns, console=console, refresh_per_second=2)
        self._task = self._bar.add_task("first step", total=total_steps, completed=start_step)
        self._bar.start()

    def say(self, message: str | Table) -> None:
        _print(self._bar.console, message)

    def step(self, step: int, values: Mapping[str, float], eta_seconds: float | None) -> None:
        text = "  ".join([*describe(values), f"ETA {format_duration(eta_seconds)}"])
        self._bar.update(self._task, completed=step, description=text)

    def close(self) -> None:
        with _somebody_reads(self._bar.console):
            self._bar.stop()


def open_progress(total_steps: int, start_step: int, log_interval: int, console: Console | None = None) -> Progress:
    """A live bar when the console is a terminal that can move its cursor, else plain lines.

    Args:
        total_steps: optimizer steps of the whole run.
        start_step: optimizer steps done before (0, or the step of the checkpoint resumed from).
        log_interval: steps between plain lines.
        console: standard output unless given.
    """
    console = console or Console()
    # isatty as well: rich believes FORCE_COLOR, and a log file full of cursor movements helps nobody.
    if console.is_interactive and console.file.isatty():
        return LiveProgress(console, total_steps, start_step)
    return PlainProgress(console, total_steps, start_step, log_interval)


def describe(values: Mapping[str, float]) -> list[str]:
    """The metrics worth watching, formatted, in a fixed order; those not in `values` are left out."""
    formats = {
        "lm_loss": "lm_loss {:.4f}",
        "grad_norm": "grad_norm {:.3f}",
        "lr": "lr {:.2e}",
        "tokens_per_second": "{:,.0f} tokens/s",
    }
    return [template.format(values[key]) for key, template in formats.items() if key in values]


def format_duration(seconds: float | None) -> str:
    """41 -> "41s", 192 -> "3m12s", 7320 -> "2h02m", 200000 -> "2d07h"; unknown -> "?"."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{hours}h{m:02d}m"
    return f"{m}m{s:02d}s" if minutes else f"{s}s"


def loss_table(title: str, rows: Mapping[str, float]) -> Table:
    """Held-out loss by domain.

    Args:
        rows: domain -> mean negative log-likelihood in nats per token.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("domain")
    table.add_column("nll (nats/token)", justify="right")
    table.add_column("perplexity", justify="right")
    for domain, nll in rows.items():
        perplexity = math.exp(nll) if nll < 700 else math.inf  # exp overflows a double near 709.8
        table.add_row(Text(domain), f"{nll:.4f}", f"{perplexity:.2f}")
    return table


def _print(console: Console, message: RenderableType) -> None:
    # A message is text, not markup: "[10,12]" or a path must come out as it is, on one line however narrow the window.
    with _somebody_reads(console):
        console.print(message, markup=False, highlight=False, soft_wrap=isinstance(message, str))


@contextlib.contextmanager
def _somebody_reads(console: Console) -> Iterator[None]:
    """A terminal that was closed, or the end of what reads our output, is no reason to end a run: be silent from then on."""
    try:
        yield
    except (OSError, SystemExit):  # the latter is what rich makes of a broken pipe
        console.quiet = True
