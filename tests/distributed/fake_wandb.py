"""A stand-in for the wandb module: every call becomes a line of `wandb_calls` in the working directory."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

errors = SimpleNamespace(
    UsageError=type("UsageError", (Exception,), {}), AuthenticationError=type("AuthenticationError", (Exception,), {})
)
Settings = dict


def _note(call: str, **values: Any) -> None:
    with open("wandb_calls", "a") as file:
        file.write(json.dumps({"call": call, "pid": os.getpid(), **values}) + "\n")


def init(**options: Any) -> SimpleNamespace:
    """The run; `define_metric`, `log` and `finish` are noted too."""
    _note("init", id=options["id"], config=options["config"])
    return SimpleNamespace(
        define_metric=lambda name, step_metric=None: _note("define_metric", name=name, step_metric=step_metric),
        log=lambda data, step=None: _note("log", data=data, step=step),
        finish=lambda exit_code=None: _note("finish", exit_code=exit_code),
    )
