"""Every router and what balances it, over ranks: gradients, counts and biases of one process; repeatable and resumable."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest

from recipes.config import AuxLossScope, Config, Recompute, RouterType, ScoreFunction, SecondExpert
from tests.distributed.test_gradients import check, merged
from tests.tiny import change, tiny_moe_config

pytestmark = pytest.mark.distributed
RATE = 0.01
HERE = "tests.distributed.test_moe_routers"
SIGMOID = {
    "moe__moe_router_score_function": ScoreFunction.sigmoid,
    "moe__moe_router_pre_softmax": True,
    "moe__aux_loss_scope": AuxLossScope.sequence,
}
NO_LOSS = {"moe__moe_aux_loss_coeff": 0.0, "moe__moe_z_loss_coeff": 0.0, "moe__moe_router_pre_softmax": True}
ROUTERS: dict[str, dict[str, Any]] = {
    "sigmoid": SIGMOID | {"moe__moe_router_topk_scaling_factor": 2.5},
    "groups": SIGMOID | {"moe__moe_router_num_groups": 2, "moe__moe_router_group_topk": 1},
    "expert_choice": {
        "moe__moe_router_type": RouterType.expert_choice,
        "moe__moe_router_pre_softmax": True,
        "moe__moe_expert_capacity_factor": 0.8,
        "moe__moe_aux_loss_coeff": 0.0,
    },
    "sinkhorn": {"moe__moe_router_type": RouterType.sinkhorn},
    "hash": NO_LOSS | {"moe__moe_router_type": RouterType.hash},
    "random": NO_LOSS | {"moe__moe_router_type": RouterType.random},
    "biases": SIGMOID | {"moe__moe_router_enable_expert_bias": True, "moe__moe_router_bias_update_rate": RATE},
}
SHARED = {"moe__moe_shared_expert_intermediate_size": 16}
ROUTERS |= {
    "shared gate": SHARED | {"moe__moe_shared_expert_gate": True},
    "residual": SHARED | {"moe__moe_use_residual": True, "moe__moe_init_scale": 0.1},
}
NOISE: dict[str, dict[str, Any]] = {
    "jitter": {"moe__moe_input_jitter_eps": 0.5},
    "gumbel": {"moe__moe_router_gumbel_scale": 1.0},
    "sampled": {"moe__moe_second_expert": SecondExpert.sampled},
    "dropout": {"moe__moe_expert_dropout": 0.3},
    "threshold": {"moe__moe_second_expert": SecondExpert.threshold, "moe__moe_input_jitter_eps": 0.5},
}
TP2 = {"parallel__tensor_model_parallel_size": 2, "parallel__expert_tensor_parallel_size": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"parallel__expert_model_parallel_size": 2},
    "tp2-sp": TP2 | {"parallel__sequence_parallel": True},
    "tp2-ep2": TP2 | {"parallel__expert_model_parallel_size": 2},
    "tp2-etp2": TP2 | {"parallel__expert_tensor_parallel_size": 2},
}


def config_of(router: str, layout: str, **changes: Any) -> Config:
    """Two micro-batches per step."""
    tensor = LAYOUTS[layout].get("parallel__tensor_model_parallel_size", 1)
    changes = (ROUTERS | NOISE)[router] | LAYOUTS[layout] | changes
    return tiny_moe_config(train__micro_batch_size=4 if tensor == 2 else 2, zero__stage=1, **changes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_over_two_ranks_are_those_of_one_process(run_ranks, layout):
    cases = [{"config": config_of(router, layout)} for router in ROUTERS]
    check(run_ranks("gradient_cases", 2, cases), bound=2e-5)


def biases_after_steps(rank: int, world_size: int, configs: list[Config]) -> list[Any]:
    """Biases after three steps of which the second is skipped."""
    from recipes.engine import make_engine
    from recipes.launcher import rank_environment
    from recipes.model.gpt import GPT, registry
    from recipes.topology import layout_of
    from recipes.train.job import start_process
    from tests.distributed.workers import accumulate
    from tests.tiny import tiny_config

    start_process(tiny_config(), rank_environment(os.environ))
    results = []
    for config in configs:
        layout = layout_of(config, world_size)
        model = GPT(config, layout)
        engine = make_engine(model, registry(model, config), config)
        for step in range(3):
            accumulate(engine, config, rank, step)
            engine.gradient_norm()
            engine.skip() if step == 1 else engine.step(0.1)
            model.moe.finish_step(step != 1)
        results.append(model.moe.state())
        engine.close()
    return results


def test_biases_depend_on_no_layout(run_ranks):
    layouts = {**LAYOUTS, "pp2": {"parallel__pipeline_model_parallel_size": 2}, "dp2": {}}
    configs = []
    for layout in layouts.values():
        config = tiny_moe_config(train__micro_batch_size=4, model__num_layers=3, **ROUTERS["biases"], **layout)
        config.train.micro_batch_size //= 2 // config.parallel.tensor_model_parallel_size
        config.train.micro_batch_size *= config.parallel.pipeline_model_parallel_size
        configs.append(config)
    alone = tiny_moe_config(train__micro_batch_size=4, model__num_layers=3, **ROUTERS["biases"])
    (expected,) = run_ranks(f"{HERE}:biases_after_steps", 1, [alone])[0]
    largest = max(abs(bias) for row in expected["bias"] for bias in row)
    assert 0 < largest <= 2.001 * RATE and expected["steps"] == 3  # twice the rate at most: one step was skipped
    for rank, states in enumerate(run_ranks(f"{HERE}:biases_after_steps", 2, configs)):
        for layout, state in zip(layouts, states, strict=True):
            assert state == expected, (rank, layout)


def test_planted_a_bias_that_moves_by_the_counts_of_a_rank_is_seen(run_ranks):
    config = config_of("biases", "ep2")
    honest = run_ranks(f"{HERE}:biases_after_steps", 2, [config])
    broken = run_ranks(f"{HERE}:biased_by_own_counts", 2, [config])
    assert honest[0] == honest[1] and broken[0] != broken[1]


def biased_by_own_counts(rank: int, world_size: int, configs: list[Config]) -> list[Any]:
    """The planted fault."""
    from recipes.moe.context import MoeContext

    learn = MoeContext._learn_from
    own = lambda self, counts_NE: learn(self, self.own_NE)  # noqa: E731
    finish = MoeContext.finish_step

    def remember(self: MoeContext, applied: bool = True) -> dict[str, Any]:
        self.own_NE = self.report[:, : self.previous_NE.shape[1]].round().long()  # type: ignore[attr-defined]
        return finish(self, applied)

    MoeContext._learn_from, MoeContext.finish_step = own, remember  # type: ignore[method-assign]
    return biases_after_steps(rank, world_size, configs)


def test_biases_resume_bit_for_bit_and_reach_evaluation(run_ranks, tiny_data, tmp_path):
    from tests.distributed.test_moe_resume import different, interrupt, moe_training_config, router_state

    config = moe_training_config(tiny_data, tmp_path / "straight")
    change(config, ROUTERS["biases"])
    config.schedule.lr_decay_steps = 10
    run_ranks("run_job", 2, config)
    resumed = interrupt(run_ranks, config, tmp_path / "resumed")
    assert not different(tmp_path / "straight", resumed)
    state = router_state(tmp_path / "straight", 10)
    assert state == router_state(resumed, 10) and state["steps"] == 10 and any(state["bias"][0])
    opened = run_ranks(f"{HERE}:opened_biases", 1, config.run.dir)[0]
    assert opened == state["bias"]


def opened_biases(rank: int, world_size: int, folder: str) -> Any:
    """Biases of a stored model, opened in one process."""
    from pathlib import Path

    from recipes.checkpoint.model import open_model
    from recipes.launcher import Ranks

    for name in Ranks().environment():
        os.environ.pop(name, None)
    model, *_ = open_model(Path(folder))
    return copy.deepcopy(model.moe.bias_NE.tolist())


def test_routers_find_their_tokens_again_in_a_pipeline_that_recomputes(run_ranks):
    """The backward pass of a micro-batch comes after the forward pass of the next one."""
    cases = []
    for router in ("hash", "random", "expert_choice"):
        config = tiny_moe_config(train__micro_batch_size=2, model__num_layers=3, zero__stage=1, **ROUTERS[router])
        config.parallel.pipeline_model_parallel_size = 2
        config.model.recompute_granularity = Recompute.full
        cases.append({"config": config})
    check(run_ranks("gradient_cases", 2, cases), bound=2e-5)


def seeded_cases(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`gradient_cases` with the generators in the same state before each model is computed."""
    import torch
    from megatron.core import tensor_parallel

    from tests.distributed import workers

    for name in ("engine_step", "reference"):
        function = getattr(workers, name)

        def seeded(*arguments: Any, function=function) -> Any:
            tensor_parallel.model_parallel_cuda_manual_seed(3)
            torch.manual_seed(3)
            return function(*arguments)

        setattr(workers, name, seeded)
    return workers.gradient_cases(rank, world_size, cases)


def test_ranks_that_route_the_same_tokens_draw_the_same(run_ranks):
    """Each has a part of every expert: together they are the one process, noise and all."""
    cases = [{"config": config_of(router, "tp2-etp2")} for router in NOISE if router != "dropout"]  # of other columns
    check(run_ranks(f"{HERE}:seeded_cases", 2, cases), bound=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_run_draws_what_the_first_did(run_ranks, layout):
    cases = [{"config": config_of(router, layout)} for router in NOISE]
    first, again = (run_ranks("gradient_cases", 2, cases) for _ in range(2))
    for number, router in enumerate(NOISE):
        one, two = (merged(results, number, "grads") for results in (first, again))  # replicas must be equal
        assert all((one[name] == two[name]).all() for name in one), router
        counts = [results[0][number]["moe"]["moe/tokens_per_expert"] for results in (first, again)]
        assert counts[0] == counts[1]
        assert (sum(counts[0][0]) < 2 * 8 * 16) == (router == "threshold")


def test_ranks_that_route_other_tokens_draw_other_numbers(run_ranks):
    draws = run_ranks(f"{HERE}:drawn_noise", 2, config_of("jitter", "tp2-sp"))
    assert draws[0] != draws[1]
    draws = run_ranks(f"{HERE}:drawn_noise", 2, config_of("jitter", "ep2"))
    assert draws[0] != draws[1]


def drawn_noise(rank: int, world_size: int, config: Config) -> list[float]:
    """The first jitter of a run."""
    import torch

    from recipes.groups import enter
    from recipes.launcher import rank_environment
    from recipes.moe.context import MoeContext
    from recipes.moe.routing import Router
    from recipes.topology import layout_of
    from recipes.train.job import start_process

    start_process(config, rank_environment(os.environ))
    router = Router(config, MoeContext(config, enter(layout_of(config, world_size))), 0)
    return router._jittered(torch.ones(1, 4)).tolist()[0]


def noisy_steps(rank: int, world_size: int, configs: list[Config]) -> list[dict[str, Any]]:
    """Gradients and counts of each description with generators in the same state."""
    import torch
    from megatron.core import tensor_parallel

    from recipes.launcher import rank_environment
    from recipes.model.gpt import GPT, registry
    from recipes.train.job import start_process
    from tests.distributed.workers import tiny_tokens

    start_process(configs[0], rank_environment(os.environ))
    results = []
    for config in configs:
        torch.manual_seed(3)
        tensor_parallel.model_parallel_cuda_manual_seed(3)
        model, tokens = GPT(config), tiny_tokens(config)
        (model(tokens[:, :-1], tokens[:, 1:].contiguous()).sum() / 100).backward()
        grads = {p.name: p.read(e.parameter.grad).clone() for e in registry(model, config) for p in e.pieces}
        results.append({"grads": grads, "moe": model.moe.finish_step()})
    return results


@pytest.mark.parametrize("router", NOISE)
def test_recomputation_draws_the_same_noise(run_ranks, router):
    configs = []
    for granularity in (None, Recompute.selective, Recompute.full):
        config = tiny_moe_config(model__hidden_dropout=0.2, model__num_layers=3, **NOISE[router])
        config.model.recompute_granularity, config.model.recompute_modules = granularity, ["moe"]
        configs.append(config)
    configs.append(tiny_moe_config(model__hidden_dropout=0.2, model__num_layers=3))
    plain, *others, quiet = run_ranks(f"{HERE}:noisy_steps", 1, configs)[0]
    for other in others:
        assert other["moe"] == plain["moe"]
        for name, grad in plain["grads"].items():
            assert (other["grads"][name] == grad).all(), name
    assert quiet["moe"] != plain["moe"], "no noise reached the choice"


@pytest.mark.parametrize(("router", "tensor"), [("threshold", 1), ("gumbel", 2)])
def test_noisy_runs_resume_bit_for_bit(run_ranks, tiny_data, tmp_path, router, tensor):
    """With dropout, as an uninterrupted run: weights, moments, generators, counts."""
    from tests.distributed.test_moe_resume import different, interrupt, moe_training_config, router_state

    config = moe_training_config(tiny_data, tmp_path / "straight", tensor_parallel=tensor)
    change(config, NOISE[router])
    assert config.model.hidden_dropout > 0
    config.schedule.lr_decay_steps = 10
    run_ranks("run_job", 2, config)
    resumed = interrupt(run_ranks, config, tmp_path / "resumed")
    assert not different(tmp_path / "straight", resumed)
    assert router_state(tmp_path / "straight", 10) == router_state(resumed, 10)
