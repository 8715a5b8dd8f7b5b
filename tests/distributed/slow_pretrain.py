"""The training entry with slow phases, for launchers: `SLOW_step`, `SLOW_evaluate` and `SLOW_save` are seconds.

Each phase that begins is a line of the file `phases` in the working directory: rank, phase, step.
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
    time.sleep(float(os.environ.get(f"SLOW_{phase}", "0")))


def slow_down() -> None:
    """Delay the forward and backward passes of a step, evaluations, and the writing of checkpoints."""
    from recipes.checkpoint import save
    from recipes.engine import Engine
    from recipes.train import loop

    accumulate, evaluate, write, steps = Engine.accumulate, loop.evaluate, save.write_shard, [0]

    def slow_accumulate(*args: Any) -> Any:
        steps[0] += 1
        if steps[0] > FAST_STEPS:
            begin("step", steps[0])
        return accumulate(*args)

    def slow_evaluate(*args: Any) -> Any:
        begin("evaluate", steps[0])
        return evaluate(*args)

    def slow_write(*args: Any) -> Any:
        begin("save", steps[0])
        return write(*args)

    Engine.accumulate = slow_accumulate  # type: ignore[method-assign]
    loop.evaluate, save.write_shard = slow_evaluate, slow_write


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
