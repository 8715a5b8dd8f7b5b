"""What counting tokens, entropy and losses of the experts costs: the same training steps with and without."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from recipes.config import Config
from tools.bench.rounds import interleave, ratio
from tools.bench.train_step import real_step


def measure(config: Config, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Rows `with_metrics` and `without_metrics`: tokens per second (median) and overhead over the step without."""
    with tempfile.TemporaryDirectory() as folder:
        step, job = real_step(config, Path(folder))
        context = job.model.moe
        assert context is not None
        live = {name: getattr(context, name) for name in ("_record", "finish_step")}
        idle = {"_record": lambda *_: None, "finish_step": dict}

        def run(methods: dict[str, Any]) -> None:
            for name, method in methods.items():
                setattr(context, name, method)
            step()

        work = {"with_metrics": lambda: run(live), "without_metrics": lambda: run(idle)}
        seconds = interleave(work, rounds, repeats)
        job.close(failed=False)
    tokens = config.train.global_batch_size * config.model.seq_length
    rows = []
    for name, times in seconds.items():
        overhead, spread = ratio(times, seconds["without_metrics"])
        rate = tokens / sorted(times)[len(times) // 2]
        rows.append({"impl": name, "tokens_per_second": rate, "overhead": overhead - 1, "overhead_iqr": spread})
    return rows
