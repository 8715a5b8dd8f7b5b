"""The learning rates that each group of the optimizer steps with, in a straight run and behind a resume."""

from __future__ import annotations

import math

import pytest

from recipes.config import Config, Resume
from recipes.telemetry.jsonl import read_metrics
from tests.distributed.test_moe_resume import moe_training_config

pytestmark = pytest.mark.distributed
WARMUP, PEAK, FLOOR = 5, 1e-2, 1e-3
SCALES = {"decay": 1.0, "no_decay": 1.0, "router": 0.25, "ep_size_2": 0.5}  # by the name of a group


def run_and_watch(rank: int, world_size: int, config: Config) -> list[dict[str, float]]:
    """The rates of all groups at each update of the weights."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from tests.distributed.workers import run_job

    found: list[dict[str, float]] = []

    def watch(optimizer, *_) -> None:
        rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
        if not any(rates.values()):  # DeepSpeed steps once at rate 0 when it starts
            return
        if not found or found[-1].keys() & rates.keys():
            found.append({})
        found[-1].update(rates)  # ZeRO steps with one group after the other

    register_optimizer_step_pre_hook(watch)
    run_job(rank, world_size, config)
    return found


def expected(step: int, steps: int) -> dict[str, float]:
    """By hand: linear to the peak, half a cosine to the floor."""
    part = (step - WARMUP) / (steps - WARMUP)
    rate = PEAK * step / WARMUP if step < WARMUP else FLOOR + (PEAK - FLOOR) * (1 + math.cos(math.pi * part)) / 2
    return {name: scale * rate for name, scale in SCALES.items()}


@pytest.mark.parametrize("stage", [0, 1])
def test_every_group_follows_the_schedule_also_behind_a_resume(run_ranks, tiny_data, tmp_path, stage):
    config = moe_training_config(tiny_data, tmp_path / "run", stage=stage)
    config.moe.moe_router_lr_scale, config.moe.moe_expert_lr_scale = SCALES["router"], SCALES["ep_size_2"]
    config.train.steps, config.train.eval_samples, config.schedule.lr_warmup_steps = 20, 0, WARMUP
    config.checkpoint.save_interval, config.checkpoint.keep = 3, 9

    def rates_after(load_step: int | None) -> list[dict[str, float]]:
        config.run.resume, config.checkpoint.load_step = Resume.auto, load_step
        first, second = run_ranks("tests.distributed.test_learning_rates:run_and_watch", 2, config)
        assert first == second
        rows = [row["lr"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
        assert rows[-len(first) :] == [rates["decay"] for rates in first]  # what is recorded is what was used
        return first

    straight = rates_after(None)
    for step, rates in enumerate(straight, start=1):
        assert rates == pytest.approx(expected(step, 20)), step
    for load_step in (3, 12):  # in the warm-up and behind it
        assert rates_after(load_step) == straight[load_step:]
    config.train.steps, config.run.resume_with = 25, ["train.steps"]
    for step, rates in enumerate(rates_after(12), start=13):
        assert rates == pytest.approx(expected(step, 25)), step
