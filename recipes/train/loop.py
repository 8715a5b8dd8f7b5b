"""The training loop: for each step fetch, train, record; now and then evaluate and save."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from recipes import collectives
from recipes.checkpoint.rng import rng_state
from recipes.checkpoint.save import save
from recipes.config import Config
from recipes.data.loader import global_batch
from recipes.topology import Role
from recipes.train.batch import model_inputs
from recipes.train.evaluate import evaluate
from recipes.train.schedule import learning_rate
from recipes.train.step import StepResult, train_step

if TYPE_CHECKING:
    from recipes.train.job import Job


@dataclass(frozen=True)
class Finished:
    """What a checkpoint of a finished step holds beside tensors of the engine, as it was then; `rng` None: one that was loaded."""

    step: int
    trainer: dict[str, Any]
    rng: dict[str, torch.Tensor] | None = None


def train(job: Job) -> None:
    """Run the steps that are left; everything that is due after a step is saved first, then evaluated."""
    config, last = job.config, job.config.train.steps
    if job.finished is not None:  # a stop, or a crash, may have come between the two
        _evaluate_if_due(job, job.finished.step)
    for step in range(job.first_step, last + 1):
        result = train_one(job, step)
        due = result.save_due or _due(step, config.checkpoint.save_interval)
        if (due and step < last) or (config.checkpoint.save_final and step == last):
            save_checkpoint(job)
        _evaluate_if_due(job, step)
    job.stop.enter()
    collectives.barrier()
    job.stop.close()


def train_one(job: Job, step: int) -> StepResult:
    """Fetch, train and record one step."""
    with job.timer.step(job.tokens_per_step), job.profile.step(step):
        inputs, lr = _fetch(job, step), _lr(job.config, step)
        result = train_step(job.engine, inputs, lr, job.guard, _save_due(job), job.stop.enter)
    _record(job, step, result)
    job.finished = Finished(step, _trainer_state(job, step), rng_state())
    job.stop.leave()
    return result


def _save_due(job: Job) -> bool:
    minutes = job.config.checkpoint.save_interval_minutes
    return minutes > 0 and time.monotonic() - job.saved_at >= 60 * minutes


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


def _evaluate_if_due(job: Job, step: int) -> None:
    last, config = job.config.train.steps, job.config.train
    due = config.eval_samples > 0 if step == last else step < last and _due(step, config.eval_interval)
    if due and job.evaluated_step != step:
        record_evaluation(job, step)


def record_evaluation(job: Job, step: int) -> None:
    """Evaluate on every domain; a line of `metrics.jsonl`, a point on W&B, a table on the terminal."""
    losses = evaluate(job.model, job.eval_sets, job.dataset.eod, job.config.data)
    values = {"eval/lm_loss" if not name else f"eval/{name}/lm_loss": loss for name, loss in losses.items()}
    job.evaluation, job.evaluated_step = values, step
    job.metrics.write(step, values)
    job.wandb.log(step, values)
    job.show_losses(step, losses)


def save_checkpoint(job: Job) -> None:
    """Write a checkpoint of the step that was just finished."""
    with job.stop.section():
        collectives.barrier()
        _write(job)


def _write(job: Job) -> None:
    done = job.finished
    assert done is not None
    # Weights that the last step could not move may be past saving: those before them stay, until a step is applied again.
    kept = None if done.trainer["guard"]["in_a_row"] else job.config.checkpoint.keep
    folder = job.folder / "checkpoints"
    saved = save(folder, done.step, job.engine, done.trainer, kept, protect=job.protected, rng=done.rng)
    job.saved_step, job.saved_at = done.step, time.monotonic()
    job.progress.say(f"checkpoint {saved}")


def save_apart(job: Job) -> None:
    """Write a checkpoint of the newest finished step, unless there is one, while the main thread is busy (see `Stop`)."""
    with collectives.apart(), torch.no_grad():
        if job.finished is not None and job.saved_step != job.finished.step:
            _write(job)
        with contextlib.suppress(RuntimeError):  # who is through may leave before the others
            collectives.barrier()


def _trainer_state(job: Job, step: int) -> dict[str, Any]:
    """Everything else that the rest of the run depends on."""
    return {
        "step": step,
        "consumed_samples": step * job.config.train.global_batch_size,
        "applied_steps": job.engine.applied_steps,
        "world_size": job.layout.world_size,
        "tensor_parallel_size": job.layout.tensor_parallel_size,
        "guard": job.guard.state(),
        "moe": None if job.model.moe is None else job.model.moe.state(),
        "wandb_run_id": job.wandb.run_id,
        "tokenizer": job.dataset.tokenizer_fingerprint,
        "data": job.start.data,
        "config": job.plain_config,
    }
