"""Documents by themselves: attention against a dense mask, memory, and what a change of one document does to the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.config import DataConfig, PosteriorForm, Recompute, RouterType
from tests.ranks import forked
from tests.tiny import tiny_config, tiny_moe_config

SEPARATE = {"data__reset_position_ids": True, "data__reset_attention_mask": True}
LENGTHS = [[40, 1, 23], [64], [3, 1, 1, 59]]


def heads(dtype: torch.dtype, sequence: int = 64, batch: int = 3) -> list[torch.Tensor]:
    """Queries of 4 heads, keys and values of 2, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sequence, batch, count, 8) for count in (4, 2, 2)] + [(sequence, batch, 32)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def attention(dropout: float = 0.0) -> Any:
    from recipes.model.blocks import SdpaAttention

    return SdpaAttention(SimpleNamespace(attention_dropout=dropout))


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: list[list[int]]) -> torch.Tensor:
    """The same with a mask of S x S for each sequence."""
    blocks = [torch.block_diag(*(torch.ones(length, length).tril() for length in row)) for row in documents]
    mask_B1SS = torch.stack(blocks).bool()[:, None]
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_B1SS, enable_gqa=True)
    return out.permute(2, 0, 1, 3).flatten(2)


def with_gradients(function: Any, inputs: list[torch.Tensor], documents: list[list[int]]) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = function(*leaves, documents)
    out.backward(inputs[3].to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@forked
def test_outputs_and_gradients_are_those_of_a_dense_mask(dtype, bound):
    inputs = heads(dtype)
    exact = with_gradients(dense, [x.double() for x in inputs], LENGTHS)
    for found, expected in zip(with_gradients(attention(), inputs, LENGTHS), exact, strict=True):
        assert found.dtype is dtype
        assert (found.double() - expected).norm() <= bound * expected.norm()
    assert (with_gradients(attention(), inputs, [[64]] * 3)[0] - exact[0]).norm() > 0.1 * exact[0].norm()


def seed_dropout() -> None:
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(3)


class Largest(TorchDispatchMode):
    """The most elements that one tensor had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *found) if found else self.elements
        return out


@forked
def test_memory_follows_the_sequence_and_not_its_square():
    for sequence in (512, 1024):
        inputs, documents = heads(torch.float32, sequence, 1), [[128] * (sequence // 128)]
        with Largest() as largest:
            with_gradients(attention(), inputs, documents)
        assert largest.elements == sequence * 32  # one hidden state for each token
        with Largest() as largest:
            with_gradients(dense, inputs, documents)
        assert largest.elements >= sequence**2


@forked
def test_dropout_of_a_document_does_not_depend_on_what_others_say():
    *inputs, pull = heads(torch.float32)
    outs = []
    for change in (0.0, 1.0):
        seed_dropout()
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[:40, 0] += change
        outs.append(with_gradients(attention(0.3).train(), [*changed, pull], LENGTHS)[0])
    assert torch.equal(outs[0][40:], outs[1][40:]) and not torch.equal(outs[0][:40, 0], outs[1][:40, 0])
    undropped = with_gradients(attention(), [*inputs, pull], LENGTHS)[0]
    assert (outs[0] - undropped).norm() > 0.1 * undropped.norm()


ROUTERS = {
    "dense": None,
    "top-2": RouterType.topk,
    "hash": RouterType.hash,
    "random": RouterType.random,
    "ensemble": None,
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("reset_position_ids", [True, False])
@forked
def test_the_document_before_moves_no_logits(router, reset_position_ids):
    from recipes.btm.model import Ensemble, Weighing
    from recipes.model.gpt import GPT
    from recipes.train.batch import logit_inputs, model_inputs

    kind = ROUTERS[router]
    if kind is None:
        config = tiny_config(**SEPARATE)
    else:
        config = tiny_moe_config(**SEPARATE, moe__moe_layer_freq=1, moe__moe_router_type=kind)
    config.data.reset_position_ids = reset_position_ids
    model: Any = GPT(config).eval()
    if router == "ensemble":
        config.run.seed += 1
        weighing = Weighing(PosteriorForm.cumulative, (0.5, 0.5), None, None)
        model = Ensemble([model, GPT(config).eval()], weighing)
    ids_BS1 = torch.randint(1, 60, (2, 17), generator=torch.Generator().manual_seed(4)).numpy()
    ids_BS1[:, 6] = 0
    before = model.logits(**logit_inputs(model_inputs(ids_BS1, 0, config.data, torch.device("cpu"))))
    ids_BS1[:, :6] = ids_BS1[:, :6] % 59 + 1
    after = model.logits(**logit_inputs(model_inputs(ids_BS1, 0, config.data, torch.device("cpu"))))
    assert (before[:6] - after[:6]).abs().max() > 1e-2
    torch.testing.assert_close(before[7:], after[7:], rtol=0, atol=1e-6)
    together = model_inputs(ids_BS1, 0, DataConfig(), torch.device("cpu"))
    assert set(together) == {"tokens_BS", "labels_BS"}
    assert (model.logits(**logit_inputs(together))[7:] - after[7:]).abs().max() > 1e-3, "there is nothing to reset"


@pytest.mark.parametrize("recompute", [(Recompute.full, []), (Recompute.selective, ["core_attn", "moe"])])
@forked
def test_what_is_computed_again_knows_the_documents(recompute):
    from recipes.model.gpt import GPT
    from recipes.train.batch import model_inputs

    grads = []
    for granularity, modules in ((None, []), recompute):
        config = tiny_moe_config(**SEPARATE, moe__moe_router_type=RouterType.random, model__attention_dropout=0.2)
        config.moe.moe_aux_loss_coeff = config.moe.moe_z_loss_coeff = 0.0
        config.model.recompute_granularity, config.model.recompute_modules = granularity, modules
        model = GPT(config)
        ids_BS1 = torch.randint(0, 9, (8, 17), generator=torch.Generator().manual_seed(4)).numpy()
        seed_dropout()
        losses_B = model(**model_inputs(ids_BS1, 0, config.data, torch.device("cpu")))
        model(**model_inputs(ids_BS1[::-1], 0, config.data, torch.device("cpu")))  # another one in between
        losses_B.sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)
