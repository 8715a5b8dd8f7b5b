"""A step as the loop takes it, with labels that do not count: neither accumulation nor layout changes loss or gradient."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recipes.config import Config, DataConfig
from tests.distributed.test_gradients import merged, worst
from tests.tiny import tiny_config

pytestmark = pytest.mark.distributed
HERE = "tests.distributed.test_train_step"
EOD = 0
VALID = (5, 14)  # labels that count in each sequence of the first and of the second half of a batch


def batch(config: Config) -> np.ndarray:
    """Ids [B, S + 1] with ends of documents at as many positions as do not count."""
    shape = (config.train.global_batch_size, config.model.seq_length + 1)
    ids_BS1 = np.random.default_rng(0).integers(1, 60, shape)
    for row, ids_S1 in enumerate(ids_BS1):
        ids_S1[1 : 1 + config.model.seq_length - VALID[row // (len(ids_BS1) // 2)]] = EOD
    return ids_BS1


def steps(rank: int, world_size: int, configs: list[Config]) -> list[dict[str, Any]]:
    """Loss, norm and gradients of the first step under each description; on rank 0 also those of plain autograd."""
    from recipes.engine import make_engine
    from recipes.groups import enter
    from recipes.launcher import rank_environment
    from recipes.model.gpt import GPT, registry
    from recipes.topology import Layout, layout_of
    from recipes.train.batch import model_inputs
    from recipes.train.guard import SpikeGuard
    from recipes.train.job import start_process
    from recipes.train.step import train_step
    from tests.distributed.workers import own_rows

    start_process(tiny_config(), rank_environment(os.environ))
    results = []
    for config in configs:
        layout = layout_of(config, world_size)
        model = GPT(config, layout)
        engine = make_engine(model, registry(model, config), config)
        grads: list[Any] = []

        class Guard(SpikeGuard):
            """Looks at the gradients before the update."""

            def reason_to_skip(self, norm: float, engine=engine, grads=grads) -> None:
                grads += engine.gradients()

        rows = own_rows(engine, config, rank)
        inputs = [model_inputs(batch(config)[row], EOD, config.data, torch.device("cpu")) for row in rows]
        taken = train_step(engine, inputs, 0.1, Guard(config.train))
        results.append({"loss": taken.lm_loss, "norm": taken.grad_norm, "grads": grads})
        engine.close()
    enter(Layout(world_size))  # a model that a rank has for itself needs a layout without tensor parallelism
    if rank == 0:
        results[0]["reference"] = reference(configs[0])
    return results


def reference(config: Config) -> dict[str, Any]:
    """The mean over all labels behind a token that ends no document, in one forward pass."""
    from recipes.model.gpt import GPT, registry

    model, ids = GPT(config), torch.from_numpy(batch(config))
    counts_BS = ids[:, :-1] != EOD
    assert counts_BS.sum(1).tolist() == [VALID[0]] * 4 + [VALID[1]] * 4
    logits_BSV = model.logits(ids[:, :-1].contiguous()).transpose(0, 1)
    loss = F.cross_entropy(logits_BSV[counts_BS], ids[:, 1:][counts_BS])
    loss.backward()
    return {
        "loss": loss.item(),
        "grads": {p.name: p.read(e.parameter.grad).clone() for e in registry(model, config) for p in e.pieces},
    }


def test_loss_and_gradient_are_means_over_the_labels_that_count(run_ranks):
    """Alone and in accumulation over two data-parallel, two tensor-parallel ranks and two stages."""
    configs = []
    for layout, micro_batches in (
        ({}, (4, 2, 1)),
        ({"parallel__tensor_model_parallel_size": 2}, (8, 2)),
        ({"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}, (1,)),
        ({"parallel__pipeline_model_parallel_size": 2}, (8, 1)),
    ):
        for number, size in enumerate(micro_batches):
            configs.append(tiny_config(train__micro_batch_size=size, zero__stage=number % 2, **layout))
            configs[-1].data = DataConfig(eod_mask_loss=True)
    results = run_ranks(f"{HERE}:steps", 2, configs)
    expected = results[0][0]["reference"]
    for number in range(len(configs)):
        error, name = worst(merged(results, number, "grads"), expected["grads"])
        assert error <= 2e-5, f"case {number}: gradient of {name} is off by {error:.2e}"
        norm = torch.cat([grad.flatten() for grad in expected["grads"].values()]).norm().item()
        for rank in results:
            assert rank[number]["loss"] == pytest.approx(expected["loss"], rel=1e-6), number
            assert rank[number]["norm"] == pytest.approx(norm, rel=1e-5), number
