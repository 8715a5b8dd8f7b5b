"""Faults that tests put into a rank from outside, before it starts."""

from __future__ import annotations

import datetime
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _at_step_three(rank: int, act: Callable[[], None]) -> None:
    """Call `act` before the third training step of a rank."""
    from recipes.train import loop

    if os.environ.get("RANK", os.environ.get("SLURM_PROCID")) != str(rank):
        return
    train_step, calls = loop.train_step, []

    def faulty(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            Path("failed").touch()
            act()
        return train_step(*args)

    loop.train_step = faulty


def _raise() -> None:
    raise ZeroDivisionError("planted fault")


def rank_zero_raises() -> None:
    """Rank 0 raises at step 3."""
    _at_step_three(0, _raise)


def rank_one_raises() -> None:
    """Rank 1 raises at step 3."""
    _at_step_three(1, _raise)


def rank_one_is_killed() -> None:
    """Rank 1 vanishes at step 3, as when the system is out of memory."""
    _at_step_three(1, lambda: os.kill(os.getpid(), signal.SIGKILL))


def rank_one_hangs() -> None:
    """Rank 1 stops moving at step 3."""
    _at_step_three(1, lambda: time.sleep(3600))


def rank_one_hangs_and_patience_is_short() -> None:
    """The same, and ranks wait for each other for 4 seconds."""
    collectives = importlib.import_module("recipes.collectives")
    collectives.TIMEOUT = datetime.timedelta(seconds=4)
    rank_one_hangs()


def _in_the_third_micro_batch_of_stage_one(act: Callable[[], None]) -> None:
    """Call `act` in the middle of the pipeline's schedule, on the ranks of the last of two stages."""
    from recipes.model.gpt import GPT

    stage, calls = GPT.stage, []

    def faulty(model: Any, *args: Any, **inputs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3 and not model.first:
            Path("failed").touch()
            act()
        return stage(model, *args, **inputs)

    GPT.stage = faulty  # type: ignore[method-assign]


def stage_one_raises() -> None:
    """The last stage raises while the first one waits for its gradient."""
    _in_the_third_micro_batch_of_stage_one(_raise)


def stage_one_hangs_and_patience_is_short() -> None:
    """The last stage stops moving, and ranks wait for each other for 4 seconds."""
    collectives = importlib.import_module("recipes.collectives")
    collectives.TIMEOUT = datetime.timedelta(seconds=4)
    _in_the_third_micro_batch_of_stage_one(lambda: time.sleep(3600))


def fake_wandb() -> None:
    """Put a stand-in in the place of the wandb module that writes each call to `wandb_calls`."""
    from tests.distributed import fake_wandb as stand_in

    sys.modules["wandb"] = stand_in  # type: ignore[assignment]


def fake_wandb_and_rank_one_raises() -> None:
    """Both."""
    fake_wandb()
    rank_one_raises()


def slow_phases() -> None:
    """Steps, evaluations and saves take as long as the environment says (see `slow_pretrain`)."""
    from tests.distributed.slow_pretrain import slow_down

    slow_down()


def ports_are_soon_given_up() -> None:
    """A port in use is waited for no longer than a second."""
    importlib.import_module("recipes.meeting")._PORT_WITHIN = 1.0
