"""Every path to a model holds every logical tensor; Transformer Engine's blocks, by stand-ins of the same structure, compute what
the local ones do, and a block without one of its modules is refused."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch

from recipes.config import Config, Normalization
from tests.ranks import forked
from tests.tiny import change, tiny_config, tiny_moe_config

ALL_KINDS = {
    "model__add_bias_linear": True,
    "model__qk_layernorm": True,
    "model__normalization": Normalization.LayerNorm,
}


def use_transformer_engine() -> None:
    """Let this process build Transformer Engine's blocks of classes that have its parameters and need no CUDA."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from recipes.model import blocks

    class LayerNormLinear(ColumnParallelLinear):
        """The norm within the matrix product behind it."""

        def __init__(self, input_size: int, output_size: int, *, config, **more: Any):
            super().__init__(input_size, output_size, config=config, **more)
            norm = blocks.build_norm(config, input_size, config.layernorm_epsilon)
            self.register_parameter("layer_norm_weight", norm.weight)
            self.register_parameter("layer_norm_bias", getattr(norm, "bias", None))
            self.normalise = (norm,)  # a tuple: its parameters are registered here

        def forward(self, x, *more):
            return super().forward(self.normalise[0](x), *more)

    class Provider:
        """What megatron-core asks Transformer Engine for."""

        linear = column_parallel_linear = lambda self: ColumnParallelLinear
        row_parallel_linear = lambda self: RowParallelLinear  # noqa: E731
        fuse_layernorm_and_linear = lambda self: True  # noqa: E731
        column_parallel_layer_norm_linear = lambda self: LayerNormLinear  # noqa: E731
        layer_norm = lambda self, *_, **__: blocks.Norm  # noqa: E731
        core_attention = lambda self: blocks.SdpaAttention  # noqa: E731
        activation_func = lambda self: None  # noqa: E731

        def grouped_mlp_modules(self, *_, **__):
            from megatron.core.transformer.mlp import MLPSubmodules
            from megatron.core.transformer.moe.experts import SequentialMLP

            return SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

    gpt_layer_specs.TESpecProvider = Provider
    blocks.uses_transformer_engine = lambda model: True


def loss_and_gradients(config: Config) -> dict[str, torch.Tensor]:
    """Of one batch, by logical name."""
    from recipes.model.gpt import GPT, registry

    model = GPT(config)
    entries = registry(model, config)
    for entry in entries:  # norms and biases start at ones and zeros, which would hide one used for another
        for piece in (piece for piece in entry.pieces if len(piece.shape) == 1):
            draw = torch.Generator().manual_seed(zlib.crc32(piece.name.encode()))
            piece.write(entry.parameter.data, torch.randn(piece.shape, generator=draw))
    ids = torch.randint(0, 60, (2, 17), generator=torch.Generator().manual_seed(3))
    loss = model(ids[:, :-1], ids[:, 1:].contiguous()).sum()
    loss.backward()
    found = {piece.name: piece.read(entry.parameter.grad) for entry in entries for piece in entry.pieces}
    return found | {"loss": loss.detach()}


@pytest.mark.parametrize("kinds", [{}, ALL_KINDS], ids=["plain", "biases and norms"])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@forked
def test_transformer_engines_blocks_are_the_same_model(experts, kinds):
    config = change(tiny_moe_config() if experts else tiny_config(), kinds)
    local = loss_and_gradients(config)
    use_transformer_engine()
    found = loss_and_gradients(config)
    assert found.keys() == local.keys()
    for name, value in local.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=name)


@forked
def test_a_block_without_its_norm_is_refused():
    """The layer specification for dense blocks, with experts in place of the MLP: nobody normalises what they read."""
    from recipes.model import blocks, gpt

    use_transformer_engine()
    as_it_is = blocks.layer_spec
    gpt.layer_spec = lambda *arguments: as_it_is(*arguments[:3])
    with pytest.raises(RuntimeError, match=r"layers\.0\.ffn_norm\.weight \(0 of 32 elements\)"):
        gpt.GPT(tiny_moe_config())


@forked
def test_a_norm_that_was_left_out_of_the_local_block_is_refused():
    from megatron.core.transformer.identity_op import IdentityOp

    from recipes.model import blocks, gpt

    as_it_is = blocks.layer_spec

    def without(*arguments):
        spec = as_it_is(*arguments)
        spec.submodules.input_layernorm = IdentityOp
        return spec

    gpt.layer_spec = without
    with pytest.raises(RuntimeError, match=r"layers\.0\.attention_norm\.weight .*layers\.1\.attention_norm\.weight"):
        gpt.GPT(tiny_config())


def expected_of_all_ranks(rank: int, world_size: int, configs: list[Config]) -> list[dict[str, int]]:
    """Builds each model, which is checked in that, and returns what this rank was to hold."""
    import os

    from recipes.groups import enter, leave
    from recipes.launcher import rank_environment
    from recipes.model.complete import expected_elements
    from recipes.model.gpt import GPT
    from recipes.topology import layout_of
    from recipes.train.job import start_process

    start_process(configs[0], rank_environment(os.environ))
    found = []
    for config in configs:
        leave()
        layout = layout_of(config, world_size)
        enter(layout)
        found.append(expected_elements(config, GPT(config, layout).groups))
    return found


@pytest.mark.distributed
def test_what_ranks_hold_adds_up_to_the_model(run_ranks):
    from recipes.logical import logical_tensors

    split = {"parallel__tensor_model_parallel_size": 2, "train__micro_batch_size": 2}
    staged = {"parallel__pipeline_model_parallel_size": 2, "train__micro_batch_size": 2}
    configs = [
        tiny_config(**split, model__vocab_size=5),  # all true rows on one rank
        tiny_config(**staged),
        tiny_config(**staged, model__share_embeddings_and_output_weights=False),
        tiny_moe_config(train__micro_batch_size=2, parallel__expert_model_parallel_size=2),
        tiny_moe_config(**split, parallel__expert_tensor_parallel_size=2),
    ]
    ranks = run_ranks("tests.unit.model.test_complete:expected_of_all_ranks", 2, configs)
    whole = {name: tensor.numel for name, tensor in logical_tensors(configs[0]).items()}
    sums = [{name: sum(held[number].get(name, 0) for held in ranks) for name in whole} for number in range(2)]
    assert sums[0]["embedding.weight"] == whole["embedding.weight"] == 5 * 32
    assert sums[0]["layers.0.ffn.up.weight"] == whole["layers.0.ffn.up.weight"]
    assert sums[0]["final_norm.weight"] == 2 * whole["final_norm.weight"]
    tied, untied = ([held[number] for held in ranks] for number in (1, 2))
    assert [sorted(name for name in held if "." in name and not name.startswith("layers")) for held in tied] == [
        ["embedding.weight"],
        ["embedding.weight", "final_norm.weight"],
    ]
    assert [sorted(name for name in held if not name.startswith("layers")) for held in untied] == [
        ["embedding.weight"],
        ["final_norm.weight", "head.weight"],
    ]
    experts = [{name.split(".")[4] for name in held[3] if ".experts." in name} for held in ranks]
    assert experts == [{"0", "1"}, {"2", "3"}]
