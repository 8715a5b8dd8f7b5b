"""The comparisons of whole layers with the oracle once more, on a CUDA device. (`test_experts` has the kernel in bf16.)

They run in a fresh process: one that is forked from a process that has asked for a device cannot use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from recipes.config import MoeBackend
from recipes.launcher import free_port
from tests.unit.moe import test_layer, test_pairwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BACKENDS = [{"backend": backend} for backend in MoeBackend]
TESTS: list[tuple[Callable[..., None], list[dict[str, Any]]]] = [
    (test_layer.test_every_shape_scope_and_order_of_softmax, BACKENDS),
    (test_layer.test_scores_groups_and_biases, [{}]),
    (test_layer.test_experts_that_choose, [{}]),
    (test_layer.test_experts_at_prices, [{}]),
    (test_layer.test_shared_experts_with_weights_of_their_own, BACKENDS),
    (test_layer.test_routing_without_a_router, [{}]),
    (test_layer.test_any_number_of_tokens_experts_and_choices, [{}]),
    (test_layer.test_short_batches_with_and_without_dropping, [{"topk": 2, **backend} for backend in BACKENDS]),
]


def in_fresh_process(function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(rank, *arguments)` in one process that is started anew."""
    torch.multiprocessing.spawn(function, (free_port(), *arguments), nprocs=1)


def join_group(port: int) -> None:
    from recipes.launcher import Ranks
    from recipes.train.job import start_process
    from tests.tiny import tiny_config

    os.environ["OMP_NUM_THREADS"] = "1"
    start_process(tiny_config(), Ranks(0, 0, 1, 1, "127.0.0.1", port))


def body(rank: int, port: int, name: str, arguments: list[dict[str, Any]]) -> None:
    """What the test of this name in `test_layer` does, with each of the arguments."""
    join_group(port)
    for each in arguments:
        getattr(test_layer, name).__wrapped__(**each)


def pairs(rank: int, port: int) -> None:
    join_group(port)
    for part in range(test_pairwise.PARTS):  # a sum that nearly cancels is off by more in another order
        test_pairwise.compare_all_here(test_pairwise.sample()[part :: test_pairwise.PARTS], bound=1e-4)


@pytest.mark.parametrize(("test", "arguments"), TESTS, ids=[test.__name__.removeprefix("test_") for test, _ in TESTS])
def test_as_on_a_cpu(test, arguments):
    in_fresh_process(body, test.__name__, arguments)


def test_every_pair_of_options():
    in_fresh_process(pairs)
