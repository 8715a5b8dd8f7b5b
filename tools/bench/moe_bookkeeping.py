"""What counting tokens, entropy and losses of the experts costs, measured in two ways on real training steps.

Steps with and without it, in turn: their ratio has all consequences in it, and the noise of whole steps, which is larger.
In the steps with it, the seconds spent in the recording itself, as a share of the step: sharp, but blind to what it may do to
the code around it, such as caches. On a GPU this share is that of the host.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.config import Config
from recipes.moe.context import MoeContext
from tools.bench.rounds import interleave, median_and_iqr, ratio
from tools.bench.train_step import real_step


def measure(config: Config, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Rows `with_metrics` and `without_metrics`: tokens per second and overhead over the step without (medians over rounds);
    share of the step that is recording (median over steps)."""
    with tempfile.TemporaryDirectory() as folder:
        step, job = real_step(config, Path(folder))
        with_metrics, without, shares = steps_to_compare(job.model.moe, step)
        seconds = interleave({"with_metrics": with_metrics, "without_metrics": without}, rounds, repeats)
        job.close(failed=False)
    tokens = config.train.global_batch_size * config.model.seq_length
    share = {"with_metrics": median_and_iqr(shares[1:]), "without_metrics": (0.0, 0.0)}  # the first step warmed up
    rows = []
    for name, times in seconds.items():
        overhead, spread = ratio(times, seconds["without_metrics"])
        rows.append(
            {
                "impl": name,
                "tokens_per_second": tokens / median_and_iqr(times)[0],
                "overhead": overhead - 1,
                "overhead_iqr": spread,
                "share_of_step": share[name][0],
                "share_of_step_iqr": share[name][1],
            }
        )
    return rows


def steps_to_compare(
    context: MoeContext, step: Callable[[], object]
) -> tuple[Callable[[], None], Callable[[], None], list[float]]:
    """`step` with recording and without, and the shares: each step with recording appends the part of its time spent in it."""
    spent, shares = [0.0], []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = method(*args)
            spent[0] += time.perf_counter() - start
            return result

        return call

    live = {name: timed(getattr(context, name)) for name in ("_record", "finish_step")}
    idle: dict[str, Callable[..., Any]] = {"_record": lambda *_: None, "finish_step": lambda *_: {}}

    def with_metrics() -> None:
        vars(context).update(live)
        spent[0], start = 0.0, time.perf_counter()
        step()
        shares.append(spent[0] / (time.perf_counter() - start))

    def without() -> None:
        vars(context).update(idle)
        step()

    return with_metrics, without, shares
