"""The tiny model of the tests."""

from __future__ import annotations

from typing import Any

from recipes.config import Config, OptimizerName


def tiny_config(**changes: Any) -> Config:
    """2 layers, hidden 32, 4 heads, 2 key/value heads, vocabulary 60 (padded to 64), 16 positions, 8 sequences per step."""
    config = Config()
    model = config.model
    model.num_layers, model.hidden_size, model.num_attention_heads, model.num_query_groups = 2, 32, 4, 2
    model.ffn_hidden_size, model.seq_length, model.vocab_size, model.make_vocab_size_divisible_by = 48, 16, 60, 64
    model.init_method_std = 0.1
    config.train.global_batch_size, config.train.micro_batch_size = 8, 8
    config.optimizer.name, config.optimizer.lr, config.optimizer.clip_grad = OptimizerName.sgd, 0.1, 0.0
    config.optimizer.weight_decay = 0.0
    config.zero.stage = 0
    return change(config, changes)


def tiny_moe_config(**changes: Any) -> Config:
    """The tiny model with 4 experts, top-2, in layer 0, balance and z-loss weighty enough to matter."""
    config = tiny_config()
    moe = config.moe
    moe.num_moe_experts, moe.moe_layer_freq, moe.moe_ffn_hidden_size = 4, 2, 24
    moe.moe_router_topk, moe.moe_router_pre_softmax = 2, False
    moe.moe_aux_loss_coeff, moe.moe_z_loss_coeff = 0.1, 0.01
    return change(config, changes)


def change(config: Config, changes: dict[str, Any]) -> Config:
    """Set `group__name` keys."""
    for key, value in changes.items():
        group, name = key.split("__")
        assert hasattr(getattr(config, group), name), key
        setattr(getattr(config, group), name, value)
    return config
