"""The training entry with slow phases, for launchers: `SLOW_<phase>`, or `SLOW_<phase>_<step>`, are the seconds of a phase.

start: before the imports; step and backward: before the forward pass of a step, and behind its backward pass; evaluate; save: the
writing of each file. Each phase that begins is a line of the file `phases` in the working directory: rank, phase, step.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

FAST_STEPS = 2  # the first ones are as fast as they can be


def begin(phase: str, step: int) -> None:
    """Note that a phase has begun, and stay in it."""
    with Path("phases").open("a") as phases:
        phases.write(f"{os.environ.get('RANK', '0')} {phase} {step}\n")
    time.sleep(float(os.environ.get(f"SLOW_{phase}_{step}", os.environ.get(f"SLOW_{phase}", "0"))))


def slow_down() -> None:
    """Delay the forward and backward passes of a step, evaluations, and the writing of checkpoints."""
    from recipes.checkpoint import save
    from recipes.engine import Engine
    from recipes.engine.pipeline import PipelineEngine
    from recipes.train import loop

    fetch, record_evaluation, write, now = loop._fetch, loop.record_evaluation, save.write_shard, [0]

    def noted_fetch(job: Any, step: int) -> Any:
        now[0] = step
        return fetch(job, step)

    def slow(accumulate: Any) -> Any:
        def slow_accumulate(*args: Any) -> Any:
            if now[0] > FAST_STEPS:
                begin("step", now[0])
            result = accumulate(*args)
            if now[0] > FAST_STEPS:
                begin("backward", now[0])
            return result

        return slow_accumulate

    def slow_evaluation(job: Any, step: int) -> None:
        begin("evaluate", step)
        record_evaluation(job, step)

    def slow_write(*args: Any) -> Any:
        begin("save", now[0])
        return write(*args)

    for engine in (Engine, PipelineEngine):
        engine.accumulate = slow(engine.accumulate)  # type: ignore[method-assign]
    loop._fetch, loop.record_evaluation, save.write_shard = noted_fetch, slow_evaluation, slow_write


def main() -> int:
    """As the entry itself, whose heavy imports come after the begin of its watch."""
    from recipes import pretrain, process

    process.watch(os.environ)
    try:
        begin("start", 0)
        slow_down()
    except process.Signalled as stopped:
        process.end_by(stopped)
    return pretrain.main()


if __name__ == "__main__":
    sys.exit(main())
