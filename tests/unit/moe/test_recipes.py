"""Shipped recipes with experts: the published coefficients, and experiments of the compute of their dense control."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from recipes.config import AuxLossScope, Config, RouterType, ScoreFunction, SecondExpert, to_plain
from recipes.plan.size import flops_per_token, total_parameters
from recipes.pretrain import compose

EXPERIMENTS = (
    "switch_paper_8e",
    "gshard_8e",
    "st_moe_8e",
    "deepseek_v3_32e",
    "olmoe_32e",
    "pr_moe_4e_8e",
    "expert_choice_8e",
    "hash_8e",
    "random_8e",
    "residual_8e",
    "sinkhorn_8e",
)


@functools.cache
def composed(*overrides: str) -> Config:
    return compose([*overrides, "model.vocab_size=4096"])


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (
            "switch_paper",
            {"moe_aux_loss_coeff": 1e-2, "moe_input_jitter_eps": 1e-2, "moe_expert_capacity_factor": 1.25},
        ),
        ("gshard", {"moe_second_expert": SecondExpert.threshold, "moe_router_pre_softmax": False}),
        ("st_moe", {"moe_z_loss_coeff": 1e-3, "moe_aux_loss_coeff": 1e-2, "moe_router_topk": 2}),
        (
            "deepseek_v3",
            {
                "moe_router_score_function": ScoreFunction.sigmoid,
                "moe_router_enable_expert_bias": True,
                "moe_router_bias_update_rate": 1e-3,
                "aux_loss_scope": AuxLossScope.sequence,
                "moe_aux_loss_coeff": 1e-4,
                "moe_router_topk_scaling_factor": 2.5,
            },
        ),
        ("olmoe_1b_7b", {"moe_aux_loss_coeff": 1e-2 / 16, "moe_z_loss_coeff": 1e-3 / 16 / 8}),
        ("mixtral_8x7b", {"moe_aux_loss_coeff": 0.02 * 2 / 32}),
        ("qwen3_30b_a3b", {"moe_aux_loss_coeff": pytest.approx(1e-3 * 8 / 48, rel=1e-6)}),
        ("expert_choice", {"moe_router_type": RouterType.expert_choice}),
    ],
)
def test_coefficients_are_the_published_ones(option, expected):
    moe = composed(f"moe={option}").moe
    assert {key: getattr(moe, key) for key in expected} == expected


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_differs_from_its_control_in_its_experts_and_not_in_compute(name):
    dense, sparse = composed("experiment=dense"), composed(f"experiment={name}")
    differences = [key for key in flat(dense) if flat(dense)[key] != flat(sparse)[key]]
    assert {key for key in differences if not key.startswith("moe.")} == {"run.name"}
    assert sparse.run.name == name
    assert flops_per_token(sparse) / flops_per_token(dense) == pytest.approx(1.0, abs=0.012)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("spike_8e_guard", {"train.spike_factor", "train.spike_window"}), ("spike_8e_z_loss", {"moe.moe_z_loss_coeff"})],
)
def test_what_helps_against_divergence_is_the_only_difference(name, keys):
    plain, helped = flat(composed("experiment=spike_8e")), flat(composed(f"experiment={name}"))
    assert {key for key in plain if plain[key] != helped[key]} == keys | {"run.name"}
    assert plain["moe.moe_z_loss_coeff"] == plain["train.spike_factor"] == plain["optimizer.clip_grad"] == 0


def test_the_pyramid_has_the_size_that_was_published():
    config = compose(["experiment=pr_moe_1b3_64gpu_h100_bf16"])
    assert round(total_parameters(config) / 1e9) == 31  # arXiv 2201.05596, table 4
    laptop, residual = composed("experiment=pr_moe_4e_8e"), composed("experiment=residual_8e")
    assert total_parameters(residual) - total_parameters(laptop) == 4 * (3 * 128 * 192 + 128)


def flat(config: Config) -> dict[str, Any]:
    return {f"{group}.{key}": value for group, keys in to_plain(config).items() for key, value in keys.items()}
