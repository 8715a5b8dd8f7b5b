"""One optimizer step: micro-batches -> loss -> gradient -> judged -> applied or dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from recipes import collectives
from recipes.engine import Engine
from recipes.train.batch import valid_tokens
from recipes.train.guard import SpikeGuard


@dataclass(frozen=True)
class StepResult:
    """`lm_loss`: nats per valid token over all ranks and micro-batches. `skipped`: why the step was dropped, or None.

    `save_due`: whether rank 0 thought that it is time for a checkpoint.
    """

    lm_loss: float
    grad_norm: float
    skipped: str | None
    save_due: bool


def train_step(
    engine: Engine,
    micro_batches: list[dict[str, torch.Tensor]],
    lr: float,
    guard: SpikeGuard,
    save_due: bool = False,
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """Run one step on this rank's micro-batches (see `model_inputs`).

    `before_update` is called when the gradient is there, ahead of a collective of all ranks, after which alone weights,
    moments and guard change. `save_due` counts on rank 0.

    The loss is the sum over valid tokens divided by their number in the whole step, over all ranks and micro-batches, so
    that neither how the batch is cut nor how many tokens are masked in a part of it changes the gradient.
    """
    leads = float(engine.groups.leads)
    tokens = torch.stack([valid_tokens(inputs).sum() for inputs in micro_batches]).sum()
    global_tokens = max(int(collectives.sum_over_ranks(tokens * int(leads))), 1)
    sums = torch.zeros(2, dtype=torch.float64, device=tokens.device)
    sums[0] = engine.accumulate(micro_batches, global_tokens) * leads
    sums[1] = float(save_due and collectives.rank() == 0)
    before_update()
    norm = engine.gradient_norm()
    skipped = guard.reason_to_skip(norm)
    if skipped is None:
        engine.step(lr)
    else:
        engine.skip()
    nll, due = collectives.sum_over_ranks(sums).tolist()
    return StepResult(nll / global_tokens, norm, skipped, due > 0)
