"""The bf16 optimizer reports memory while it is built, whether anybody asked or not.

`BF16_Optimizer` calls `see_memory_usage(..., force=True)` before and after each parameter group: rank 0 prints three lines and
collects garbage each time, which takes longer than building a small model.
"""

import functools
from collections.abc import Callable

from patches.record import Patch


def _unforced(see_memory_usage: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(see_memory_usage)
    def see(message: str, force: bool = False) -> None:
        see_memory_usage(message, force=False)

    return see


PATCH = Patch(
    name="deepspeed.bf16_memory_report",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    why="bf16 with ZeRO-1 prints a report of memory and collects garbage for each parameter group",
    upstream="deepspeed/runtime/bf16_optimizer.py: see_memory_usage(..., force=True)",
    wrappers={"deepspeed.runtime.bf16_optimizer:see_memory_usage": _unforced},
)
