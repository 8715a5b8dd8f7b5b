"""Which layers have experts, and how their weights start."""

from __future__ import annotations

import pytest
import torch

from recipes.logical import initial_value, logical_tensors, moe_layers
from tests.tiny import tiny_moe_config


def test_a_pattern_names_the_layers_with_experts():
    config = tiny_moe_config(model__num_layers=5, moe__moe_layer_freq=1, moe__moe_layer_pattern=[0, 1, 1, 0, 1])
    assert moe_layers(config) == [1, 2, 4]
    routers = [name for name in logical_tensors(config) if name.endswith(".moe.router.weight")]
    assert routers == [f"layers.{layer}.moe.router.weight" for layer in (1, 2, 4)]
    dense = {name.split(".")[1] for name in logical_tensors(config) if ".ffn.up." in name}
    assert dense == {"0", "3"}


def test_experts_and_routers_start_with_less_variance_and_nothing_else_does():
    changes = {"moe__moe_shared_expert_intermediate_size": 16, "moe__moe_use_residual": True}
    plain = logical_tensors(tiny_moe_config(**changes))
    scaled = logical_tensors(tiny_moe_config(**changes, moe__moe_init_scale=0.1))
    assert plain.keys() == scaled.keys()
    for name, tensor in plain.items():
        smaller = ".moe.experts." in name or ".moe.router." in name
        assert scaled[name].std == pytest.approx(tensor.std * (0.1**0.5 if smaller else 1.0)), name
    wide = initial_value(scaled["layers.0.moe.experts.1.up.weight"], seed=1)
    assert wide.var().item() == pytest.approx(0.1 * 0.1**2, rel=0.2)  # of a deviation of 0.1
    assert torch.equal(initial_value(scaled["layers.0.moe.coefficient.bias"], seed=1), torch.zeros(2))
