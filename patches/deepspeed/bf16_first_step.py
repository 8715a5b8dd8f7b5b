"""bf16 under ZeRO-0 takes an optimizer step with zero gradients at construction.

`FP16_UnfusedOptimizer.initialize_optimizer_states` calls `step()` to allocate the state. That decays the master weights
once by the full learning rate and leaves Adam's step counter at 1, so the first real AdamW update is 26 % too small.
Upstream removed the same call from the ZeRO and bf16 optimizers only. Torch optimizers allocate at their first step.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from patches.record import Patch


def _without_step(initialize_optimizer_states: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(initialize_optimizer_states)
    def initialize(self: Any) -> None:
        optimizer, self.optimizer = self.optimizer, SimpleNamespace(step=lambda: None)
        try:
            initialize_optimizer_states(self)
        finally:
            self.optimizer = optimizer

    return initialize


PATCH = Patch(
    name="deepspeed.bf16_first_step",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    why="bf16 with ZeRO-0 decays the weights and counts a step before training starts",
    upstream="https://github.com/deepspeedai/DeepSpeed/issues/5151 (fixed for ZeRO and BF16_Optimizer by PR 5104)",
    wrappers={
        "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer.initialize_optimizer_states": _without_step,
    },
)
