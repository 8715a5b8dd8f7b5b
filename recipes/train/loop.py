"""The training loop: for each step fetch, train, record; now and then evaluate and save."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.checkpoint.save import save
from recipes.config import Config, to_plain
from recipes.data.loader import global_batch
from recipes.topology import Role
from recipes.train.batch import model_inputs
from recipes.train.evaluate import evaluate
from recipes.train.schedule import learning_rate
from recipes.train.step import StepResult, train_step

if TYPE_CHECKING:
    from recipes.train.job import Job


def train(job: Job) -> None:
    """Run the steps that are left. Ends early, after saving, when any rank was asked to stop."""
    config, stopped = job.config, False
    for step in range(job.first_step, config.train.steps + 1):
        result = train_one(job, step)
        stopped = result.stop_requested and step < config.train.steps
        if _due(step, config.train.eval_interval) and step < config.train.steps and not stopped:
            record_evaluation(job, step)
        if stopped or (_due(step, config.checkpoint.save_interval) and step < config.train.steps):
            save_checkpoint(job, step)
        if stopped:
            job.progress.say(f"stopped after step {step} as asked; run.resume=auto goes on from here")
            return
    if config.train.eval_samples:
        record_evaluation(job, config.train.steps)
    if config.checkpoint.save_final and job.first_step <= config.train.steps:
        save_checkpoint(job, config.train.steps)


def train_one(job: Job, step: int) -> StepResult:
    """Fetch, train and record one step."""
    with job.timer.step(job.tokens_per_step), job.profile.step(step):
        result = train_step(job.engine, _fetch(job, step), _lr(job.config, step), job.guard, job.stop_requested())
    _record(job, step, result)
    return result


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _lr(config: Config, step: int) -> float:
    return learning_rate(step, config.train.steps, config.schedule, config.optimizer)


def _fetch(job: Job, step: int) -> list[dict[str, Any]]:
    batches = global_batch(
        job.blend,
        step - 1,
        job.config.train.micro_batch_size,
        job.engine.accumulation_steps,
        job.layout.index(Role.dp, job.ranks.rank),
        job.layout.data_parallel_size,
    )
    return [model_inputs(tokens_BS1, job.dataset.eod, job.config.data, job.device) for tokens_BS1 in batches]


def _record(job: Job, step: int, result: StepResult) -> None:
    values = {
        "lm_loss": result.lm_loss,
        "grad_norm": result.grad_norm,
        "lr": _lr(job.config, step),
        "tokens_per_second": job.timer.tokens_per_second,
        "consumed_samples": step * job.config.train.global_batch_size,
        "skipped_steps": job.guard.skipped,
    }
    if job.model.moe is not None:
        values |= job.model.moe.finish_step(result.skipped is None)
    job.last_values = values
    job.metrics.write(step, values)
    job.wandb.log(step, values)
    shown = values | {"tokens_per_second": job.timer.smoothed_tokens_per_second}
    job.progress.step(step, shown, job.timer.eta_seconds(job.config.train.steps - step))
    if result.skipped:
        job.progress.say(f"step {step} skipped: {result.skipped}")


def record_evaluation(job: Job, step: int) -> None:
    """Evaluate on every domain; a line of `metrics.jsonl`, a point on W&B, a table on the terminal."""
    losses = evaluate(job.model, job.eval_sets, job.dataset.eod, job.config.data)
    values = {"eval/lm_loss" if not name else f"eval/{name}/lm_loss": loss for name, loss in losses.items()}
    job.evaluation = values
    job.metrics.write(step, values)
    job.wandb.log(step, values)
    job.show_losses(step, losses)


def save_checkpoint(job: Job, step: int) -> Path:
    """Write a checkpoint of everything that the rest of the run depends on."""
    config = job.config
    trainer = {
        "step": step,
        "consumed_samples": step * config.train.global_batch_size,
        "applied_steps": job.engine.applied_steps,
        "world_size": job.layout.world_size,
        "tensor_parallel_size": job.layout.tensor_parallel_size,
        "guard": job.guard.state(),
        "moe": None if job.model.moe is None else job.model.moe.state(),
        "wandb_run_id": job.wandb.run_id,
        "tokenizer": job.dataset.tokenizer_fingerprint,
        "config": to_plain(config),
    }
    # Weights that the last step could not move may be past saving: those before them stay, until a step is applied again.
    keep = None if job.guard.in_a_row else config.checkpoint.keep
    folder = save(job.folder / "checkpoints", step, job.engine, trainer, keep, protect=job.protected)
    job.progress.say(f"checkpoint {folder}")
    return folder
