"""What ranks run in the distributed tests. Plain functions, so that they can be sent to forked processes."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from recipes.checkpoint.format import open_checkpoint
from recipes.checkpoint.load import load_engine
from recipes.checkpoint.save import save
from recipes.config import Config, MoeBackend, Precision
from recipes.data.blend import open_blend
from recipes.data.dataset import load_dataset
from recipes.data.loader import global_batch, step_indices
from recipes.data.synthetic import write_dataset
from recipes.engine import Engine, make_engine
from recipes.groups import enter
from recipes.launcher import Ranks, rank_environment
from recipes.model.gpt import GPT, registry
from recipes.topology import Layout, Role, layout_of
from recipes.train.batch import model_inputs
from recipes.train.job import run, start_process
from tests.tiny import tiny_config
from tools.conformance.rounding import RandomRounding, term_norms


def tiny_tokens(config: Config, step: int = 0) -> torch.Tensor:
    """The global batch of a step: ids [B, S + 1], with some end-of-document tokens."""
    shape = (config.train.global_batch_size, config.model.seq_length + 1)
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, config.model.vocab_size, shape, generator=generator)


def loss_mask(tokens_BS1: torch.Tensor) -> torch.Tensor:
    """An uneven mask: sequence b counts its first 2 + b labels."""
    positions = torch.arange(tokens_BS1.shape[1] - 1)
    return (positions[None, :] < 2 + torch.arange(tokens_BS1.shape[0])[:, None]).float()


def reference(config: Config, world_size: int, masked: bool = False) -> dict[str, Any]:
    """Loss, raw gradients, norm and weights after one SGD step from plain autograd in one process, without an engine.

    It takes the same micro-steps as `world_size` ranks do together, since the balance loss may depend on them.
    """
    config = copy.deepcopy(config)
    config.train.micro_batch_size *= world_size
    total, model, grads = plain_gradients(config, masked)
    terms = term_norms(lambda rounding: numpy(plain_gradients(config, masked, rounding)[2]), numpy(grads))
    entries = registry(model, config)
    norm = torch.cat([g.double().flatten() for g in grads.values()]).norm().item()
    clip = config.optimizer.clip_grad
    rate = config.optimizer.lr * (min(1.0, clip / (norm + 1e-6)) if clip else 1.0)
    weights = {p.name: p.read(e.parameter.detach()) - rate * grads[p.name] for e in entries for p in e.pieces}
    return {"loss": total, "grads": grads, "norm": norm, "weights": weights, "moe": moe_report(model), "terms": terms}


def plain_gradients(
    config: Config, masked: bool, rounding: RandomRounding | None = None
) -> tuple[float, GPT, dict[str, torch.Tensor]]:
    """Loss, model and gradients of a step of micro-batches in one process."""
    model, tokens = GPT(config), tiny_tokens(config)
    mask = loss_mask(tokens) if masked else torch.ones_like(tokens[:, 1:], dtype=torch.float32)
    total = 0.0
    for rows in torch.arange(len(tokens)).split(config.train.micro_batch_size):
        part = tokens[rows]
        with rounding or contextlib.nullcontext():
            loss = model(**_inputs(config, part) | {"loss_mask_BS": mask[rows]}).sum() / mask.sum()
            loss.backward()
        total += loss.item()
    return total, model, {p.name: p.read(e.parameter.grad).clone() for e in registry(model, config) for p in e.pieces}


def numpy(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The same as arrays."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _inputs(config: Config, tokens_BS1: torch.Tensor) -> dict[str, Any]:
    return model_inputs(tokens_BS1.numpy(), 0, config.data, tokens_BS1.device)


def moe_report(model: GPT) -> dict[str, Any]:
    """Auxiliary losses and token counts of the step."""
    return {} if model.moe is None else model.moe.finish_step()


def engine_step(config: Config, rank: int, world_size: int, masked: bool, fault: str | None) -> dict[str, Any]:
    """The same from our engine on this rank's share of the batch. `fault`: see test_gradients."""
    layout = layout_of(config, world_size)
    model = GPT(config, layout)
    entries = registry(model, config)
    for entry in entries:
        if fault in {piece.name for piece in entry.pieces}:
            entry.parameter.register_hook(lambda grad: 2 * grad)
    engine = make_engine(model, entries, config)
    if fault == "norm":
        parts = engine._gradient_parts
        engine._gradient_parts = lambda: [(copies, tensors[:-1]) for copies, tensors in parts()]
    tokens = tiny_tokens(config)
    mask = loss_mask(tokens) if masked else torch.ones_like(tokens[:, 1:], dtype=torch.float32)
    total = mask.sum()
    batches = [_inputs(config, tokens[row]) | {"loss_mask_BS": mask[row]} for row in own_rows(engine, config, rank)]
    loss = engine.accumulate(batches, total).item() / total.item() * model.groups.leads
    norm = engine.gradient_norm()
    grads = engine.gradients()
    engine.step(config.optimizer.lr)
    result = {"loss": loss, "grads": grads, "norm": norm, "weights": engine.master_weights(), "moe": moe_report(model)}
    engine.close()
    return result


def data_place(layout: Layout, rank: int) -> tuple[int, int]:
    """Which of how many data-parallel parts of the batch a rank reads."""
    return layout.index(Role.dp, rank), layout.data_parallel_size


def own_rows(engine: Engine, config: Config, rank: int) -> Any:
    """Which samples of the first global batch a rank reads, micro-batch by micro-batch."""
    place = data_place(engine.layout, rank)
    return step_indices(0, config.train.micro_batch_size, engine.accumulation_steps, *place)


def accumulate(engine: Engine, config: Config, rank: int, step: int) -> None:
    """Forward and backward passes of a rank's share of a step, all of whose labels count."""
    tokens = tiny_tokens(config, step)
    batches = [
        {"tokens_BS": tokens[row, :-1], "labels_BS": tokens[row, 1:].contiguous()}
        for row in own_rows(engine, config, rank)
    ]
    engine.accumulate(batches, tokens[:, 1:].numel())


def gradient_cases(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case: `config`, `masked`, `fault`. Returns the result of each, on rank 0 with its reference."""
    start_process(tiny_config(), rank_environment(os.environ))
    results = []
    for case in cases:
        config = copy.deepcopy(case["config"])
        result = engine_step(config, rank, world_size, case.get("masked", False), case.get("fault"))
        results.append(result)
    enter(Layout(world_size))  # a model that a rank has for itself needs a layout without tensor parallelism
    for case, result in zip(cases, results, strict=True):
        if rank == 0:
            config = copy.deepcopy(case["config"])
            config.train.precision, config.moe.backend = Precision.fp32, MoeBackend.grouped
            dp_size = layout_of(config, world_size).data_parallel_size
            result["reference"] = reference(config, dp_size, case.get("masked", False))
    return results


def write_data(rank: int, world_size: int, folder: str, vocab_size: int, tokens: int) -> None:
    """A synthetic indexed data set."""
    write_dataset(Path(folder), vocab_size, tokens)


def run_job(rank: int, world_size: int, config: Config) -> None:
    """A whole training run."""
    run(config, rank_environment(os.environ))


def resave(rank: int, world_size: int, config: Config, stage: int, folder: str) -> str:
    """Load the last checkpoint of a run under another ZeRO stage, layout or backend, and save it elsewhere."""
    config = copy.deepcopy(config)
    source = open_checkpoint(Path(config.run.dir) / "checkpoints" / f"step_{config.train.steps:08d}")
    config.zero.stage, config.train.micro_batch_size = stage, 1
    start_process(config, rank_environment(os.environ))
    model = GPT(config, layout_of(config, world_size))
    engine = Engine(model, registry(model, config), config)
    load_engine(source, engine)
    path = save(Path(folder) / "checkpoints", source.step, engine, source.trainer, keep=1, protect=[])
    return str(path)


def call_test(rank: int, world_size: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    """Run the body of a `forked` test."""
    start_process(tiny_config(), rank_environment(os.environ))
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def skip_cases(rank: int, world_size: int, cases: list[Config]) -> list[dict[str, Any]]:
    """Three steps; and the same with bad steps in between: one skipped although finite, one with an infinite gradient."""
    start_process(tiny_config(), rank_environment(os.environ))
    results = []
    for config in cases:
        outcome: dict[str, Any] = {}
        for run_name, script in (("plain", "0 1 2"), ("skipping", "0 skip 1 infinite 2")):
            model = GPT(config, layout_of(config, world_size))
            engine = Engine(model, registry(model, config), config)
            for action in script.split():
                tokens = tiny_tokens(config, step=int(action) if action.isdigit() else 7)
                for row in step_indices(0, config.train.micro_batch_size, engine.accumulation_steps, rank, world_size):
                    part = tokens[row]
                    loss = engine(part[:, :-1], part[:, 1:].contiguous()).sum() / tokens[:, 1:].numel()
                    engine.backward(loss * (float("inf") if action == "infinite" and rank == 1 else 1.0))
                norm = engine.gradient_norm()
                if action == "infinite":
                    outcome["norm_with_infinity"] = norm
                engine.step(0.01) if action.isdigit() else engine.skip()
            outcome[run_name] = {}
            for entry in engine.parameters:
                for name, state in engine.joined_state(entry).items():
                    outcome[run_name][f"{name} of {entry.name}"] = state.clone()
            outcome["applied_steps"] = engine.applied_steps
            engine.close()
        results.append(outcome)
    return results


def call_tool(rank: int, world_size: int, module: str, arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a tool, started without a launcher's variables."""
    for name in Ranks().environment():
        os.environ.pop(name, None)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = importlib.import_module(module).main(arguments)
    return code, out.getvalue(), err.getvalue()


def seed_report(rank: int, world_size: int, data: str, seed: int) -> dict[str, Any]:
    """Digests of what depends on seeds: initial weights, three steps of samples, dropout masks, generator states."""
    config = tiny_config(run__seed=seed, train__micro_batch_size=2)
    start_process(config, rank_environment(os.environ))

    def digest(*tensors: torch.Tensor) -> str:
        return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()

    report: dict[str, Any] = {"weights": digest(*(p.detach() for p in GPT(config).parameters()))}
    blend = open_blend(load_dataset(data), {}, config.model.seq_length, seed)
    report["rng_before_loading"] = digest(torch.get_rng_state())
    batches = [global_batch(blend, step, 2, 2, rank, world_size) for step in range(3)]
    report["rng_after_loading"] = digest(torch.get_rng_state())
    report["samples"] = [int(k) for step in range(3) for k in step_indices(step, 2, 2, rank, world_size).ravel()]
    report["tokens"] = digest(*(torch.from_numpy(micro) for step in batches for micro in step))
    report["dropout"] = digest(torch.nn.functional.dropout(torch.ones(100)))
    with get_cuda_rng_tracker().fork():
        report["tracked_dropout"] = digest(torch.nn.functional.dropout(torch.ones(100)))
    return report
