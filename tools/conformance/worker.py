"""What one rank does: train a few steps of the scaled recipe in one layout, and hand back all that can be compared.

measure    the engine of the recipe, in the process group of the environment
reference  plain autograd and torch's optimizers on the whole batch, alone
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes import collectives, groups
from recipes.config import Config, MoeBackend, OptimizerName, Precision
from recipes.data.loader import step_indices
from recipes.engine import make_engine
from recipes.launcher import rank_environment
from recipes.logical import LocalParameter, Piece, expert_counts
from recipes.model.gpt import GPT, registry
from recipes.moe.router import Routing
from recipes.topology import Layout, Role, layout_of
from recipes.train.batch import model_inputs, valid_tokens
from recipes.train.guard import SpikeGuard
from recipes.train.job import start_process
from recipes.train.step import StepResult, train_step
from tools.conformance import storing
from tools.conformance.compare import Box, Measured, Reference, Routed, Shelf, Worst, rms
from tools.conformance.rounding import RandomRounding, term_norms

# Libraries have made half a million objects, of which none becomes garbage: neither in ranks nor at the end of the server that
# they are forked from they need be looked at.
gc.freeze()

STEPS = 3
EOD = 0  # id that ends a document
# RMS of an unclipped SGD update: larger ones amplify rounding from step to step, smaller ones drown in it.
UPDATE = 0.01
ADAMW_LR = 0.01
# Rounding differs between layouts by about 1e-6; if ten times as much sends a token elsewhere, a layout may do so too.
NUDGE = 1e-5
AUX = ("load_balancing_loss", "z_loss")


def micro_batches(config: Config, step: int, accumulation: int, index: int, size: int) -> list[dict[str, torch.Tensor]]:
    """The inputs of data-parallel rank `index` of `size` at a step: its rows of the batch."""
    ids_BS1 = batch(config, step)
    rows = step_indices(0, config.train.micro_batch_size, accumulation, index, size)
    return [model_inputs(ids_BS1[row], EOD, config.data, collectives.device()) for row in rows]


def batch(config: Config, step: int) -> np.ndarray:
    """Random ids [B, S + 1] of several documents per sample.

    As far as there are ids, no two documents begin alike: equal tokens, when experts choose tokens, would be chosen by rounding.
    """
    shape = (config.train.global_batch_size, config.model.seq_length + 1)
    assert config.model.vocab_size is not None
    random = np.random.default_rng([config.run.seed, step])
    ids = 1 + random.permutation(config.model.vocab_size - 1)
    ids_BS1 = random.choice(ids, shape)
    ends = random.random(shape) < 1 / 8
    ends[:, 0] = False
    ends[:, 1:] &= ~ends[:, :-1]
    begins = np.roll(ends, 1, axis=1)
    begins[:, 0] = True
    ids_BS1[begins] = np.resize(ids, begins.sum())
    ids_BS1[ends] = EOD
    return ids_BS1


class Recorder:
    """Stands in for `MoeContext.auxiliary` of a model and keeps what was routed where in its first `steps` steps."""

    def __init__(self, model: GPT, rows: np.ndarray, part: int = 0, steps: int = 1):
        """`rows` [micro steps, B]: samples of each; `part`: which share of the positions this rank sees, if not all."""
        self.rows, self.part, self.steps, self.found = rows, part, steps, list[Routed]()
        self.calls: dict[int, int] = {}
        self.context = model.moe
        if self.context is not None:
            self.auxiliary: Callable = self.context.auxiliary
            self.context.auxiliary = self  # type: ignore[method-assign, assignment]

    def __call__(self, out: torch.Tensor, layer: int, routing: Routing, shape: tuple[int, int]) -> torch.Tensor:
        assert self.context is not None
        micro = self.calls.get(layer, 0)
        if self.context.recording and micro < self.steps * len(self.rows):
            self.calls[layer] = micro + 1
            chosen_SBE = routing.chosen_TE.view(*shape, -1).numpy()
            samples = self.rows[micro % len(self.rows)]
            self.found.append(Routed(layer, self.part * shape[0], samples, chosen_SBE))
        return self.auxiliary(out, layer, routing, shape)


def measure(configs: dict[OptimizerName, Config], shelf: Shelf) -> Measured:
    """Join the ranks of the environment, train with each optimizer from the same start, and leave (a collective).

    What AdamW has made becomes a checkpoint; that of the layout before is loaded, of the first layout its own.
    """
    ranks = rank_environment(os.environ)
    any_config = next(iter(configs.values()))
    start_process(any_config, ranks)
    layout = layout_of(any_config, ranks.world_size)
    adamw = _Trial(configs[OptimizerName.adamw], layout, ranks.rank)
    stored, error = storing.put(adamw.engine, adamw, shelf)
    adamw.engine.close()
    if checkpoint := shelf.previous or stored:
        error = error.or_worse(*_loaded(configs[OptimizerName.adamw], layout, checkpoint))
    sgd = _Trial(configs[OptimizerName.sgd], layout, ranks.rank)
    sgd.engine.close()
    updated = {OptimizerName.adamw: adamw.updated, OptimizerName.sgd: sgd.updated}
    held = {OptimizerName.adamw: adamw.held, OptimizerName.sgd: sgd.held}
    groups.leave()
    collectives.stop()
    gc.collect()
    aux = {key: sgd.aux[key] for key in AUX if key in sgd.aux}
    loss, norm, routes = sgd.first.lm_loss, sgd.first.grad_norm, sgd.recorder.found
    return Measured(loss, aux, norm, sgd.start, sgd.gradients, updated, held, routes, sgd.experts, error, stored)


def _loaded(config: Config, layout: Layout, checkpoint: Path) -> Worst:
    """How far a checkpoint is from what a fresh engine holds after loading it."""
    model, entries = build(config, layout)
    engine = make_engine(model, entries, config)
    error = storing.take(engine, checkpoint)
    engine.close()
    return error


def build(config: Config, layout: Layout) -> tuple[GPT, list[LocalParameter]]:
    """The model and its registry, its experts as if in training: not equally busy in the step before, with unlike biases."""
    model = GPT(config, layout)
    if model.moe is not None:
        random = np.random.default_rng(config.run.seed)
        counts = [random.integers(1, 20, number).tolist() for number in model.moe.num_experts]
        bias = [random.uniform(-0.05, 0.05, number).tolist() for number in model.moe.num_experts]
        model.moe.load({"previous_counts": counts, "bias": bias})
    return model, registry(model, config)


class _Trial(SpikeGuard):
    """Training with one optimizer. It is the guard of its steps, and so can look at the gradients before the update."""

    def __init__(self, config: Config, layout: Layout, rank: int):
        super().__init__(config.train)
        model, entries = build(config, layout)
        self.engine = make_engine(model, entries, config)
        accumulation, size = self.engine.accumulation_steps, layout.data_parallel_size
        index = layout.index(Role.dp, rank)
        rows = step_indices(0, config.train.micro_batch_size, accumulation, index, size)
        split = model.moe is not None and model.moe.tokens_split
        self.recorder = Recorder(model, rows, layout.index(Role.tp, rank) if split else 0)
        self.start, self.gradients, self.aux = boxes(self.engine.master_weights()), list[Box](), dict[str, Any]()
        results: list[StepResult] = []
        for step in range(STEPS):
            batches = micro_batches(config, step, accumulation, index, size)
            results.append(train_step(self.engine, batches, config.optimizer.lr, self))
            aux = {} if model.moe is None else model.moe.finish_step()
            self.aux = self.aux or aux
        self.first = results[0]
        self.experts = {} if model.moe is None else model.moe.state()
        self.updated, self.held = boxes(self.engine.master_weights()), boxes(self.engine.weights())

    def reason_to_skip(self, norm: float) -> None:
        if not self.gradients:
            self.gradients = boxes(self.engine.gradients())


def boxes(parts: Iterable[tuple[Piece, torch.Tensor]]) -> list[Box]:
    """Pieces as plain arrays that can be sent."""
    return [Box(piece.name, piece.offsets, value.detach().float().cpu().numpy().copy()) for piece, value in parts]


def reference(config: Config, accumulation: int) -> Reference:
    """The whole batch in `accumulation` micro steps on one process, without an engine. `config` is the scaled recipe."""
    config = copy.deepcopy(config)
    config.moe.backend, config.model.recompute_granularity = MoeBackend.grouped, None
    config.train.precision = Precision.fp32
    config.train.micro_batch_size = config.train.global_batch_size // accumulation
    start_process(config, rank_environment(os.environ))
    plain = _Plain(config, accumulation)
    lm_loss, aux = plain.gradient(step=0)
    gradients = plain.tensors(lambda parameter: parameter.grad)
    scale = rms(gradients.values())
    norm = float(np.sqrt(sum(np.square(tensor, dtype=np.float64).sum() for tensor in gradients.values())))
    found = Reference(
        lm_loss,
        {key: aux[key] for key in AUX if key in aux},
        norm,
        plain.tensors(lambda parameter: parameter),
        gradients,
        _whole_routes(plain.recorder, config),
        clip_grad=norm / 2 if config.optimizer.clip_grad else 0.0,
        adam_eps=scale,
        lr={OptimizerName.sgd: UPDATE / scale, OptimizerName.adamw: ADAMW_LR},
        gradient_terms=term_norms(lambda rounding: _gradients(config, accumulation, rounding), gradients),
    )
    for name in OptimizerName:
        plain = _train(config, accumulation, name, found)
        found.updates[name] = plain.updates(found)
        found.update_terms[name] = term_norms(
            lambda rounding, name=name: _train(config, accumulation, name, found, rounding=rounding).updates(found),  # type: ignore[misc]
            found.updates[name],
        )
        if name is OptimizerName.sgd:
            found.experts = {} if plain.model.moe is None else plain.model.moe.state()
        for sign in (1, -1) if found.routes else ():
            other = _train(config, accumulation, name, found, nudge=sign * NUDGE)
            found.decided &= _same_routes(plain.recorder, other.recorder)
    groups.leave()
    collectives.stop()
    return found


def _gradients(config: Config, accumulation: int, rounding: RandomRounding) -> dict[str, np.ndarray]:
    """Of the first step."""
    plain = _Plain(config, accumulation, rounding=rounding)
    plain.gradient(step=0)
    return plain.tensors(lambda parameter: parameter.grad)


def _train(config: Config, accumulation: int, name: OptimizerName, found: Reference, **changes: Any) -> _Plain:
    """The steps of an optimizer, clipped as the reference says; `changes`: `nudge` and `rounding` of _Plain."""
    plain = _Plain(config, accumulation, **changes)
    optimizer = plain.optimizer(name, found)
    for step in range(STEPS):
        plain.gradient(step)
        if found.clip_grad:
            torch.nn.utils.clip_grad_norm_(plain.model.parameters(), found.clip_grad)
        optimizer.step()
    return plain


def _same_routes(one: Recorder, other: Recorder) -> bool:
    pairs = zip(one.found, other.found, strict=True)
    return all(np.array_equal(mine.chosen_SBE, theirs.chosen_SBE) for mine, theirs in pairs)


class _Plain:
    """The model on one process with plain autograd; embedded tokens are changed at random by `nudge` of their size."""

    def __init__(self, config: Config, accumulation: int, nudge: float = 0.0, rounding: RandomRounding | None = None):
        self.config, self.accumulation = config, accumulation
        self.rounding = rounding or contextlib.nullcontext()
        self.model, self.entries = build(config, Layout(1))
        if nudge:
            generator = torch.Generator().manual_seed(config.run.seed)
            assert self.model.embedding is not None
            self.model.embedding.register_forward_hook(
                lambda _, __, x: x * (1 + nudge * torch.randn(x.shape, generator=generator))
            )
        rows = step_indices(0, config.train.micro_batch_size, accumulation)
        self.recorder = Recorder(self.model, rows, steps=STEPS)

    def gradient(self, step: int) -> tuple[float, dict[str, Any]]:
        """Fresh gradients of a step; returns loss and metrics of the experts."""
        self.model.zero_grad()
        batches = micro_batches(self.config, step, self.accumulation, 0, 1)
        tokens = sum(int(valid_tokens(inputs).sum()) for inputs in batches)
        total = 0.0
        for inputs in batches:
            with self.rounding:
                nll = self.model(**inputs).sum()
                (nll / tokens).backward()
            total += float(nll.detach())
        return total / tokens, {} if self.model.moe is None else self.model.moe.finish_step()

    def optimizer(self, name: OptimizerName, found: Reference) -> torch.optim.Optimizer:
        """torch's own, as the recipe sets it, matrices decaying."""
        settings, rate = self.config.optimizer, found.lr[name]
        members = [
            {
                "params": [entry.parameter],
                "weight_decay": settings.weight_decay if entry.weight_decay else 0.0,
                "lr": rate * _lr_scale(self.config, entry.pieces[0].name),
            }
            for entry in self.entries
        ]
        if name is OptimizerName.sgd:
            return torch.optim.SGD(members)
        betas = (settings.adam_beta1, settings.adam_beta2)
        return torch.optim.AdamW(members, betas=betas, eps=found.adam_eps)

    def tensors(self, of: Callable[[torch.nn.Parameter], Any]) -> dict[str, np.ndarray]:
        """Logical tensors read from something shaped like the parameters."""
        return {
            piece.name: piece.read(of(entry.parameter).detach()).numpy().copy()
            for entry in self.entries
            for piece in entry.pieces
        }

    def updates(self, found: Reference) -> dict[str, np.ndarray]:
        """Weights minus initial weights."""
        return {key: now.astype(np.float64) - found.start[key] for key, now in self.tensors(lambda p: p).items()}


def _lr_scale(config: Config, name: str) -> float:
    """Learning rate of a logical tensor as a multiple of the dense weights'."""
    moe = config.moe
    if name.endswith(".moe.router.weight"):
        return moe.moe_router_lr_scale
    if ".moe.experts." not in name:
        return 1.0
    scale, count = moe.moe_expert_lr_scale, expert_counts(config)[int(name.split(".")[1])]
    return math.sqrt(moe.moe_router_topk / count) if scale is None else scale


def _whole_routes(recorder: Recorder, config: Config) -> dict[int, np.ndarray]:
    """Layer -> whether chosen [sample, position, E] in the first step."""
    found: dict[int, np.ndarray] = {}
    for part in recorder.found:
        shape = (config.train.global_batch_size, config.model.seq_length, part.chosen_SBE.shape[2])
        found.setdefault(part.layer, np.zeros(shape, dtype=bool))[part.samples] = part.chosen_SBE.transpose(1, 0, 2)
    return found
