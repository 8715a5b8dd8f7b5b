"""ZeRO-1/2 links parameters to their optimizer state after the first parameter group has stepped, and never again.

`_optimizer_step` runs once per group and links all groups each time, but the first call marks the link as complete.
Groups that had no state by then keep an empty link: `safe_get_full_optimizer_state` raises ("exp_avg not found") for
their parameters on the ranks that own them, while the other ranks wait in its all-reduce.
"""

import functools
from collections.abc import Callable
from typing import Any

from patches.record import Patch


def _linked_after_last_group(optimizer_step: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    @functools.wraps(optimizer_step)
    def step_one_group(self: Any, group_no: int) -> None:
        was_linked = self._hp_optimizer_states_linked
        optimizer_step(self, group_no)
        if not was_linked:
            self._hp_optimizer_states_linked = group_no == len(self.optimizer.param_groups) - 1

    return step_one_group


PATCH = Patch(
    name="deepspeed.optimizer_state_link",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    why="ZeRO-1/2 finds no optimizer state for parameter groups after the first",
    upstream="https://github.com/deepspeedai/DeepSpeed/pull/5104 (made the link lazy)",
    wrappers={
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._optimizer_step": _linked_after_last_group,
    },
)
