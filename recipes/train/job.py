"""Assembles a run from its description, trains, and leaves the run folder complete.

RUN/config.yaml  environment.json  metrics.jsonl  summary.json  tokenizer.*  checkpoints/step_*/  wandb/  profile/
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from patches.registry import applied, apply_all
from recipes import collectives
from recipes.checkpoint.format import Checkpoint
from recipes.checkpoint.load import load_engine, load_master_weights
from recipes.checkpoint.model import load_biases
from recipes.config import Config, Resume, config_hash, to_plain
from recipes.data.blend import open_blend
from recipes.data.dataset import DatasetInfo, load_dataset
from recipes.data.loader import EvalSet
from recipes.engine import make_engine
from recipes.groups import enter, leave
from recipes.launcher import Ranks
from recipes.model.gpt import GPT, registry
from recipes.plan.size import total_parameters
from recipes.telemetry.console import NoProgress, loss_table, open_progress
from recipes.telemetry.jsonl import MetricsFile, NoMetrics, read_metrics
from recipes.telemetry.profiler import NoProfile, ProfileWindow
from recipes.telemetry.summary import write_json
from recipes.telemetry.throughput import StepTimer
from recipes.telemetry.wandb_run import NullLogger, RunLogger, open_run
from recipes.topology import Role, layout_of
from recipes.train import loop
from recipes.train.guard import SpikeGuard
from recipes.train.signals import Stop
from recipes.train.start import decide_start, describe_run, on_rank_zero


def run(config: Config, ranks: Ranks) -> None:
    """Train as described. Raises ValueError for mistakes that only show now; a signal ends the process (see `Stop`)."""
    started = time.monotonic()
    start_process(config, ranks)
    job = Job(config, ranks)
    failed = True
    try:
        loop.train(job)
        failed = False
        job.write_summary(time.monotonic() - started)
    except BaseException:
        job.stop.hold()
        raise
    finally:
        job.close(failed)
    job.engine.close()
    leave()
    collectives.stop()
    if wrong := job.not_finite():
        if ranks.rank == 0:
            print(f"error: {wrong}", file=sys.stderr, flush=True)
        raise SystemExit(1)


def start_process(config: Config, ranks: Ranks) -> None:
    """Threads, upstream patches, process groups and seeds."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size))
    # Megatron-core overlaps communication in launch order. CUDA reads this once, when it is first used.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if torch.cuda.is_available():
        # Some launchers show each rank its own device alone; `start` refuses two ranks on one.
        torch.cuda.set_device(ranks.local_rank % torch.cuda.device_count())
    os.environ.update(ranks.environment())
    apply_all(say=lambda line: None)  # shown by Job, kept in environment.json
    collectives.start(ranks, config_hash(config))
    groups = enter(layout_of(config, ranks.world_size))
    # Dropout differs between data-parallel ranks, which hold different samples of one batch, and between pipeline stages, which
    # hold different layers; where tensor-parallel ranks share matrices or positions, megatron-core's tracker makes it differ
    # between those too.
    place = groups.index(Role.dp) + groups.size(Role.dp) * groups.index(Role.pp)
    seed = config.run.seed + 100_003 * place
    random.seed(seed)
    np.random.seed(seed % 2**32)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def check_same_data(dataset: DatasetInfo) -> None:
    """Raise ValueError on every rank unless all have opened the same data, from which each works out the samples for itself."""
    content = repr(dataclasses.replace(dataset, folder=Path(), note=None))
    if not collectives.same_on_all_ranks(hashlib.sha256(content.encode()).hexdigest()):
        raise ValueError(
            f"data.path={dataset.folder}: the ranks found different data there; give every node the same files, "
            "or name a folder that all nodes share"
        )


class Job:
    """Everything that the loop uses, on one rank."""

    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.ranks = config, ranks
        self.device = collectives.device()
        assert config.data.path is not None  # validation has made sure
        self.dataset = load_dataset(config.data.path)
        check_same_data(self.dataset)
        self.start = decide_start(config, self.dataset)
        self.folder = self.start.folder
        self.protected = [] if self.start.checkpoint is None else [self.start.checkpoint.path]
        self.first_step = self.start.step + 1
        self.guard = SpikeGuard(config.train)
        self.layout = layout_of(config, ranks.world_size)
        try:
            self.model = GPT(config, self.layout).to(self.device)
            self.engine = make_engine(self.model, registry(self.model, config), config)
            self._open_data()
            notes = [] if self.start.checkpoint is None else self._load(self.start.checkpoint)
            self._open_telemetry(notes)  # after all that may fail, so that no W&B run is left open
        except ValueError:
            self.start.abandon()
            raise
        self.tokens_per_step = config.train.global_batch_size * config.model.seq_length
        self._remember()
        self.stop = Stop(  # until here a signal ends the process at once: nothing is lost
            ranks.rank, ranks.world_size, collectives.store(), lambda: loop.save_apart(self), self._leave_early
        )

    def _remember(self) -> None:
        """What this run has done before it was stopped, from its checkpoint and its records."""
        self.started, self.saved_at = time.monotonic(), time.monotonic()
        self.plain_config = to_plain(self.config)
        self.finished: loop.Finished | None = None
        self.last_values: dict[str, Any] = {}
        self.evaluation: dict[str, float] = {}
        self.evaluated_step = 0
        checkpoint = self.start.checkpoint
        if checkpoint is not None and self.start.resumes:
            self.finished = loop.Finished(checkpoint.step, checkpoint.trainer)
            records: dict[str, Any] = {"step": {}, "evaluation": {}}
            if self.ranks.rank == 0:
                for row in read_metrics(self.folder / "metrics.jsonl"):
                    records["step" if "lm_loss" in row else "evaluation"] = row
            records = collectives.broadcast_json(records)
            self.last_values = {key: value for key, value in records["step"].items() if key != "step"}
            self.evaluated_step = records["evaluation"].pop("step", 0)
            self.evaluation = records["evaluation"]
        self._evaluated_before = self.evaluated_step
        self.saved_step = 0 if self.finished is None else self.finished.step

    def _open_data(self) -> None:
        config = self.config
        weights = config.data.domain_weights or "proportional"
        self.blend = open_blend(self.dataset, weights, config.model.seq_length, config.run.seed)
        self.eval_sets = {
            domain: EvalSet(
                self.dataset.open(domain, "valid"),
                config.model.seq_length,
                config.train.eval_samples,
                config.train.micro_batch_size,
                self.layout.index(Role.dp, self.ranks.rank),
                self.layout.data_parallel_size,
            )
            for domain in self.dataset.domains
            if config.train.eval_samples and self.dataset.domains[domain]["valid"].tokens
        }

    def _open_telemetry(self, notes: list[str]) -> None:
        config, rank_zero, checkpoint = self.config, self.ranks.rank == 0, self.start.checkpoint
        done = self.first_step - 1
        run_id = checkpoint.trainer["wandb_run_id"] if checkpoint is not None and self.start.resumes else None
        self.wandb: RunLogger = NullLogger(run_id)

        def begin_records() -> None:
            self.wandb = open_run(self.folder, config.telemetry, True, run_id, to_plain(config))
            describe_run(self.folder, config, self.dataset)

        on_rank_zero(begin_records, config)
        self.timer = StepTimer()
        self.progress = (
            open_progress(config.train.steps, done, config.telemetry.log_interval) if rank_zero else NoProgress()
        )
        # A job that died before its first checkpoint is also one to go on with: from step 0.
        goes_on_after = done if config.run.resume is Resume.auto else None
        self.metrics = MetricsFile(self.folder / "metrics.jsonl", goes_on_after) if rank_zero else NoMetrics()
        folder, window = self.folder / "profile", config.telemetry.profile_steps
        self.profile = NoProfile() if window is None else ProfileWindow(window[0], window[1], folder, self.ranks.rank)
        parameters = total_parameters(config)
        names = [line.split()[1] for line in applied()]
        self.progress.say(f"upstream defects patched (details in environment.json): {', '.join(names)}")
        self.progress.say(f"run folder {self.folder}  ({parameters:,} parameters, {self.ranks.world_size} ranks)")
        of_data = [self.dataset.note, *(eval_set.note for eval_set in self.eval_sets.values())]
        for note in [*notes, *filter(None, of_data)]:
            self.progress.say(note)

    def _load(self, checkpoint: Checkpoint) -> list[str]:
        """Load everything, or the weights alone; returns what to tell about it."""
        trainer = checkpoint.trainer
        if self.start.weights_only:
            load_master_weights(checkpoint, self.engine)
            load_biases(self.model, checkpoint)
            return [f"started from the weights of {checkpoint.path}; the next step is 1", *self.start.notes]
        self.guard.load(trainer["guard"])
        if self.model.moe is not None and trainer["moe"] is not None:  # a mix of dense models has no load to go on from
            self.model.moe.load(trainer["moe"])
        how = "resumed" if self.start.resumes else "started"
        notes = [f"{how} from {checkpoint.path}; the next step is {self.first_step}", *self.start.notes]
        if not load_engine(checkpoint, self.engine):
            ranks = f"{trainer['world_size']} ranks, tensor-parallel {trainer.get('tensor_parallel_size', 1)}"
            notes.append(f"it was written by {ranks}: dropout starts from fresh seeds")
        return notes

    def _leave_early(self) -> None:
        """The records of a run that was stopped; the main thread may still write to them."""
        if self.finished is None:
            self.progress.say("stopped before the first step was done: nothing to save")
        elif self.ranks.rank == 0:
            self.progress.say(f"stopped after step {self.saved_step} as asked; run.resume=auto goes on from here")
            self.write_summary(time.monotonic() - self.started)
        self.progress.close()
        self.wandb.finish(failed=False)

    def show_losses(self, step: int, losses: dict[str, float]) -> None:
        """The held-out loss per domain as a table."""
        rows = {name or "all": loss for name, loss in losses.items()}
        self.progress.say(loss_table(f"held-out loss after step {step}", rows))

    def close(self, failed: bool) -> None:
        """End all records, each even if another one cannot; the W&B run is marked failed when any rank failed."""
        with contextlib.ExitStack() as last_to_first:
            if self.start.claim is not None:
                last_to_first.callback(self.start.claim.close)
            last_to_first.callback(self.wandb.finish, failed)
            last_to_first.callback(self.metrics.close)
            last_to_first.callback(self.progress.close)
            last_to_first.callback(self.profile.close)

    def not_finite(self) -> str | None:
        """Why the run came to nothing: its held-out loss, or without evaluation that of its last step, is no number."""
        losses = self.evaluation or {key: self.last_values[key] for key in ("lm_loss",) if key in self.last_values}
        if wrong := next((key for key, value in losses.items() if not math.isfinite(value)), None):
            way_out = (
                "training has diverged; go back by checkpoint.load_step=N to a step before, with a lower optimizer.lr"
            )
            return f"{self.folder}: {wrong} is {losses[wrong]}: {way_out}"
        return None

    def write_summary(self, seconds: float) -> None:
        """`summary.json`: the last values, the evaluation, the time spent. Stays as it is when this job had nothing to do."""
        done = 0 if self.finished is None else self.finished.step
        evaluated = self.evaluated_step == done or not self.config.train.eval_samples
        path = self.folder / "summary.json"
        idle = done < self.first_step and self.evaluated_step == self._evaluated_before
        if self.ranks.rank != 0 or (idle and path.exists()):
            return
        summary = {
            "name": self.config.run.name,
            "steps": done,
            "complete": done == self.config.train.steps and evaluated,
            "parameters": total_parameters(self.config),
            "world_size": self.ranks.world_size,
            "seconds": seconds,
            "tokens_per_second": self.timer.smoothed_tokens_per_second or self.last_values.get("tokens_per_second"),
            **{key: self.last_values.get(key) for key in ("lm_loss", "grad_norm", "skipped_steps")},
            **self.evaluation,
        }
        write_json(path, summary)
