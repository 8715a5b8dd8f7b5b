import io
import math
import os

import pytest
from rich.console import Console

from recipes.telemetry.console import (
    LiveProgress,
    NoProgress,
    PlainProgress,
    format_duration,
    loss_table,
    open_progress,
)

VALUES = {"lm_loss": 4.62413, "grad_norm": 1.25, "lr": 3e-4, "tokens_per_second": 5123.4, "consumed_samples": 8}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def plain(total=25, start=0, interval=10):
    stream = io.StringIO()
    return open_progress(total, start, interval, Console(file=stream)), stream


def test_plain_lines_come_first_last_and_every_interval():
    progress, stream = plain()
    for step in range(1, 26):
        progress.step(step, VALUES, eta_seconds=192.0)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert lines[1] == "step 10/25  lm_loss 4.6241  grad_norm 1.250  lr 3.00e-04  5,123 tokens/s  ETA 3m12s"


def test_a_resumed_run_shows_its_own_first_step():
    progress, stream = plain(total=60, start=50, interval=100)
    for step in range(51, 61):
        progress.step(step, {"lm_loss": math.nan}, eta_seconds=None)
    assert stream.getvalue().splitlines() == ["step 51/60  lm_loss nan  ETA ?", "step 60/60  lm_loss nan  ETA ?"]


def test_messages_are_text_and_stay_on_one_line():
    progress, stream = plain()
    message = "profiling steps [10,12] into [/tmp/run] " + "x" * 200
    progress.say(message)
    assert stream.getvalue() == message + "\n"


def test_a_log_file_gets_plain_lines_even_when_colour_is_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO())
    assert console.is_interactive, "the case this test is about"
    assert isinstance(open_progress(10, 0, 5, console), PlainProgress)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_progress(10, 0, 5, Console(file=Terminal())), PlainProgress)


def test_a_terminal_gets_a_live_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = open_progress(20, 10, 5, Console(file=stream, width=120))
    assert isinstance(progress, LiveProgress)
    progress.step(11, VALUES, eta_seconds=41.0)
    progress.say("saved [step_11]")
    progress.close()
    progress.close()
    shown = stream.getvalue()
    for part in ("11/20", "lm_loss 4.6241", "grad_norm 1.250", "lr 3.00e-04", "5,123 tokens/s", "ETA 41s", "[step_11]"):
        assert part in shown


def test_other_ranks_show_nothing(capfd):
    progress = NoProgress()
    progress.say("hello")
    progress.step(1, VALUES, 1.0)
    progress.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (41.4, "41s"), (59.7, "1m00s"), (192, "3m12s"), (7320, "2h02m"), (200000, "2d07h"), (None, "?")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_loss_table_shows_each_domain():
    stream = io.StringIO()
    Console(file=stream, width=80).print(loss_table("Held-out loss", {"ja": math.log(8.0), "code [py]": 1000.0}))
    text = stream.getvalue()
    assert "Held-out loss" in text
    (ja,) = (line for line in text.splitlines() if "ja" in line)
    assert "2.0794" in ja and "8.00" in ja
    (code,) = (line for line in text.splitlines() if "code [py]" in line)
    assert "inf" in code


class _Closed(io.StringIO):
    """What a terminal, or a pipe, is after its other end has gone."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error")])
def test_nobody_who_reads_is_no_reason_to_fail(error, monkeypatch):
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)  # rich would turn this process's output away
    progress = PlainProgress(Console(file=_Closed(error)), 3, 0, 1)
    progress.say("hello")
    progress.step(1, {"lm_loss": 1.0}, None)
    progress.close()
