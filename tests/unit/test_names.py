"""Which keys of the description have megatron-core's names, and which are ours."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from recipes.config import ModelConfig, MoeConfig, ParallelConfig

OURS = {
    ModelConfig: {
        "seq_length",
        "vocab_size",
        "make_vocab_size_divisible_by",
        "share_embeddings_and_output_weights",
        "activation",
        "rotary_base",
        "rotary_percent",
    },
    MoeConfig: {
        "num_moe_experts_per_layer",
        "backend",
        "moe_layer_offset",
        "moe_layer_pattern",
        "moe_use_residual",
        "moe_expert_dropout",
        "moe_init_scale",
        "moe_router_type",
        "moe_second_expert",
        "moe_router_norm_topk_prob",
        "moe_router_gumbel_scale",
        "moe_router_lr_scale",
        "moe_expert_lr_scale",
        "aux_loss_scope",
        "moe_loss_coeff_ramp",
        "moe_aux_loss_coeff_end",
        "moe_z_loss_coeff_end",
        "moe_eval_capacity_factor",
        "moe_min_capacity",
    },
    ParallelConfig: {"data_parallel_size"},
}


@pytest.mark.parametrize("group", OURS, ids=lambda group: group.__name__)
def test_what_is_not_megatron_cores_is_listed(group):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it does not find
        from megatron.core.transformer.transformer_config import TransformerConfig
    names = {field.name for field in dataclasses.fields(group)}
    assert names - {field.name for field in dataclasses.fields(TransformerConfig)} == OURS[group]


def test_the_counts_in_the_docstrings():
    for group in (ModelConfig, MoeConfig):
        total = len(dataclasses.fields(group))
        assert f"({total - len(OURS[group])} of {total})" in (group.__doc__ or "")
