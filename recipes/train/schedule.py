"""Learning rate as a pure function of the step, so that a resumed run cannot take another path."""

from __future__ import annotations

import math

from recipes.config import DecayStyle, OptimizerConfig, ScheduleConfig


def learning_rate(step: int, total_steps: int, schedule: ScheduleConfig, optimizer: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step` (1-based) of `total_steps`.

    Linear from 0 over the warm-up, whose last step has the peak; then down to `min_lr`, reached at `lr_decay_steps`. `wsd`
    (Hu et al. 2024, arXiv 2404.06395, sec. 4) holds the peak until its last `wsd_decay_steps`.
    """
    peak, floor, warmup = optimizer.lr, optimizer.min_lr, schedule.lr_warmup_steps
    if step <= warmup:
        return peak * step / warmup
    end = schedule.lr_decay_steps or total_steps
    start = end - schedule.wsd_decay_steps if schedule.lr_decay_style is DecayStyle.wsd else warmup
    progress = min(max((step - start) / max(end - start, 1), 0.0), 1.0)
    match schedule.lr_decay_style:
        case DecayStyle.constant:
            return peak
        case DecayStyle.cosine:
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case DecayStyle.linear | DecayStyle.wsd:
            return peak + (floor - peak) * progress
