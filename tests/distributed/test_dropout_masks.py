"""Who draws the same dropout: ranks that hold copies of an activation, and nobody else."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from recipes.config import Config, Recompute
from tests.tiny import tiny_config

pytestmark = pytest.mark.distributed
HERE = "tests.distributed.test_dropout_masks"
TP2 = {"parallel__tensor_model_parallel_size": 2}
SEQUENCE = TP2 | {"parallel__sequence_parallel": True}


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


def drawn(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Digests of the masks of hidden states in one forward pass of training, and of the generators behind it."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from recipes.launcher import rank_environment
    from recipes.model.gpt import GPT
    from recipes.topology import layout_of
    from recipes.train.job import start_process
    from tests.distributed.workers import tiny_tokens

    start_process(config, rank_environment(os.environ))
    model, tokens, masks = GPT(config, layout_of(config, world_size)), tiny_tokens(config), []
    dropout = F.dropout

    def watched(x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        out = dropout(x, *more, **named)
        masks.append(digest((out == 0) & (x != 0)))
        return out

    F.dropout = watched
    with torch.no_grad():  # the only way through a pipeline without an engine
        model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return {
        "masks": masks,
        "generator": digest(torch.get_rng_state()),
        "tracker": digest(*get_cuda_rng_tracker().get_states().values()),
    }


def config_of(**changes: Any) -> Config:
    """4 layers with dropout: a mask behind the embedding and two per layer."""
    config = tiny_config(model__num_layers=4, train__micro_batch_size=2, **changes)
    config.model.hidden_dropout = config.model.attention_dropout = 0.5
    return config


def test_copies_of_hidden_states_share_masks_and_divided_heads_do_not(run_ranks):
    """Two data-parallel pairs of tensor-parallel ranks, which have the whole hidden states each."""
    found = run_ranks(f"{HERE}:drawn", 4, config_of(**TP2))
    for one, other in ((found[0], found[1]), (found[2], found[3])):
        assert len(one["masks"]) == 9 and one["masks"] == other["masks"]
        assert one["generator"] == other["generator"]
    assert not set(found[0]["masks"]) & set(found[2]["masks"])
    assert len({rank["tracker"] for rank in found}) == 4  # what attention draws from


def test_no_two_ranks_share_masks_of_divided_positions(run_ranks):
    found = run_ranks(f"{HERE}:drawn", 4, config_of(**SEQUENCE))
    masks = [mask for rank in found for mask in rank["masks"]]
    assert len(masks) == 4 * 9 and len(set(masks)) == len(masks)


def test_no_two_stages_share_masks(run_ranks):
    found = run_ranks(f"{HERE}:drawn", 2, config_of(parallel__pipeline_model_parallel_size=2))
    assert [len(rank["masks"]) for rank in found] == [5, 4]
    assert not set(found[0]["masks"]) & set(found[1]["masks"])
    assert found[0]["tracker"] != found[1]["tracker"]


def gradients(rank: int, world_size: int, configs: list[Config]) -> list[list[torch.Tensor]]:
    """Of all parameters of this rank under each description, with generators in the same state."""
    from megatron.core import tensor_parallel

    from recipes.launcher import rank_environment
    from recipes.model.gpt import GPT
    from recipes.topology import layout_of
    from recipes.train.job import start_process
    from tests.distributed.workers import tiny_tokens

    start_process(configs[0], rank_environment(os.environ))
    found = []
    for config in configs:
        tensor_parallel.model_parallel_cuda_manual_seed(3)
        model, tokens = GPT(config, layout_of(config, world_size)), tiny_tokens(config)
        model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found


def test_what_is_computed_again_draws_the_masks_of_divided_positions_again(run_ranks):
    configs = [config_of(**SEQUENCE) for _ in range(3)]
    configs[1].model.recompute_granularity = Recompute.full
    configs[2].model.recompute_granularity = Recompute.selective
    configs[2].model.recompute_modules = ["core_attn", "layernorm", "mlp"]
    for plain, *others in run_ranks(f"{HERE}:gradients", 2, configs):
        for other in others:
            assert all(torch.equal(*pair) for pair in zip(plain, other, strict=True))
