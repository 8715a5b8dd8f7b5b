"""Evaluation of a number of samples that fills no batch, against what its batches are without padding."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from recipes.config import Config, MoeBackend, RouterType, TokenDropPolicy
from tests.tiny import change, tiny_moe_config

EOD = 0
NO_LOSS = {"moe__moe_aux_loss_coeff": 0.0, "moe__moe_z_loss_coeff": 0.0}
CAPACITY = {"moe__moe_eval_capacity_factor": 0.5}
ROUTERS: dict[str, dict[str, Any]] = {
    "top-2": {},
    "top-1": {"moe__moe_router_topk": 1, "moe__moe_router_pre_softmax": True},
    "capacity": CAPACITY,
    "capacity by position": CAPACITY | {"moe__moe_token_drop_policy": TokenDropPolicy.position},
    "minimum capacity": {"moe__moe_eval_capacity_factor": 0.1, "moe__moe_min_capacity": 6},
    "biases and capacity": CAPACITY | {"moe__moe_router_enable_expert_bias": True},
    "shared": CAPACITY | {"moe__moe_shared_expert_intermediate_size": 16, "moe__moe_shared_expert_gate": True},
    "residual": CAPACITY | {"moe__moe_shared_expert_intermediate_size": 16, "moe__moe_use_residual": True},
    "sinkhorn": NO_LOSS | CAPACITY | {"moe__moe_router_type": RouterType.sinkhorn},
    "expert choice": NO_LOSS | {"moe__moe_router_type": RouterType.expert_choice, "moe__moe_router_pre_softmax": True},
    "hash": NO_LOSS | CAPACITY | {"moe__moe_router_type": RouterType.hash},
    "random": NO_LOSS | CAPACITY | {"moe__moe_router_type": RouterType.random},
    "DeepSpeed's top-2": {"moe__backend": MoeBackend.deepspeed},
    "DeepSpeed's top-1": {
        "moe__backend": MoeBackend.deepspeed,
        "moe__moe_router_topk": 1,
        "moe__moe_router_pre_softmax": True,
    },
}


def config_of(router: str, **changes: Any) -> Config:
    """The tiny model whose layers all have experts; batches of 8 sequences over all data-parallel ranks."""
    return change(tiny_moe_config(moe__moe_layer_freq=1), ROUTERS[router] | changes)


def samples(config: Config, first: int, count: int, micro_batch_size: int, place: tuple[int, int] = (0, 1)) -> Any:
    """Sequences `first` to `first + count` of one text, as a data-parallel rank evaluates them."""
    from recipes.data.loader import EvalSet

    length = config.model.seq_length
    ids = np.random.default_rng(3).integers(0, config.model.vocab_size, 16 * length + 1)
    source = SimpleNamespace(name="text", ids=ids[first * length : (first + count) * length + 1])
    return EvalSet(source, length, count, micro_batch_size, *place)


def padded_and_expected(model: Any, micro_batch_size: int, place: tuple[int, int] = (0, 1)) -> tuple[float, float]:
    """The nll of 9 samples in batches of 8, and (8 nll(first 8) + nll(ninth)) / 9 (a collective)."""
    from recipes.train.evaluate import evaluate

    def nll(first: int, count: int, size: int) -> float:
        sets = {"text": samples(model.config, first, count, size, place)}
        return evaluate(model, sets, EOD, model.config.data)[""]

    return nll(0, 9, micro_batch_size), (8 * nll(0, 8, micro_batch_size) + nll(8, 1, 1)) / 9


def of_cases(rank: int, world_size: int, configs: list[Config], wrap: Callable[[Any], Any] = lambda m: m) -> Any:
    """`padded_and_expected` of each config on ranks."""
    from recipes.launcher import rank_environment
    from recipes.model.gpt import GPT
    from recipes.topology import Role, layout_of
    from recipes.train.job import start_process

    start_process(configs[0], rank_environment(os.environ))
    found = []
    for config in configs:
        layout = layout_of(config, world_size)
        place = layout.index(Role.dp, rank), layout.data_parallel_size
        torch.manual_seed(0)
        found.append(padded_and_expected(GPT(config, layout), 8 // place[1], place))
    return found
