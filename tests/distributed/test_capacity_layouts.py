"""Full experts under tensor parallelism: which tokens are turned away depends on what a rank routes, and on nothing else."""

from __future__ import annotations

import itertools

import pytest

from recipes.config import TokenDropPolicy
from tests.distributed.test_gradients import check
from tests.distributed.test_moe_extremes import LayerCase, check_layer
from tests.tiny import tiny_moe_config
from tests.unit.moe.layers import layer_config

pytestmark = pytest.mark.distributed
TP2 = {"parallel__tensor_model_parallel_size": 2}


def test_ranks_with_parts_of_every_expert_turn_away_what_one_process_does(run_ranks):
    """They route the same tokens: gradients, losses and counts of the whole model are those of one process."""
    cases = []
    for sequence, policy in itertools.product((False, True), TokenDropPolicy):
        config = tiny_moe_config(train__micro_batch_size=4, **TP2, parallel__expert_tensor_parallel_size=2)
        config.parallel.sequence_parallel, config.moe.moe_token_drop_policy = sequence, policy
        config.moe.moe_expert_capacity_factor = 0.5
        cases.append({"config": config})
    results = run_ranks("gradient_cases", 2, cases)
    check(results, bound=2e-5)
    assert all(found["moe"]["moe/drop_rate"] > 0.05 for found in results[0])


@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_ranks_with_shares_of_the_positions_turn_away_their_own_tokens(run_ranks, expert_parallel):
    """As if each had been a data-parallel rank with these tokens."""
    cases = []
    for policy, factor, routing, topk in itertools.product(
        TokenDropPolicy, (0.5, 1.0), ("spread", "crowded", "idle"), (1, 2)
    ):
        config = layer_config(8, 1, **TP2, parallel__sequence_parallel=True, parallel__expert_tensor_parallel_size=1)
        config.parallel.expert_model_parallel_size, config.moe.moe_token_drop_policy = expert_parallel, policy
        config.moe.moe_expert_capacity_factor = config.moe.moe_eval_capacity_factor = factor
        config.moe.moe_router_topk, config.moe.moe_router_pre_softmax = topk, topk == 1
        config.moe.moe_aux_loss_coeff = config.moe.moe_z_loss_coeff = 0.0
        cases.append(LayerCase(config, [4, 4], routing))
    results = run_ranks("tests.distributed.test_moe_extremes:layer_on_ranks", 2, cases)
    for case, *outcome in zip(cases, *results, strict=True):
        check_layer(case, outcome)
    assert sum(found["metrics"]["moe/drop_rate"] > 0 for found in results[0]) > len(cases) / 2
