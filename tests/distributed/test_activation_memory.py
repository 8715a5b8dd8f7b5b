"""Memory that waits for the backward pass is what the plan says, in every layout and under every recomputation.

Measured are the storages that forward passes made and that are still there when one of them has ended, whoever holds them; and
beside them, where that is all, what autograd saved.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.parallel_state import get_global_memory_buffer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes import recycled
from recipes.config import Activation, Config, Normalization, Precision, Recompute
from recipes.plan.activations import stage_activations
from recipes.plan.size import plan
from recipes.recycled import recycler
from recipes.topology import Role, layout_of
from tests.tiny import change, tiny_config, tiny_moe_config

pytestmark = pytest.mark.distributed
HERE = "tests.distributed.test_activation_memory"


class Storages(TorchDispatchMode):
    """Remembers the storages that operations make within the context, without keeping them."""

    def __init__(self, weights: list[torch.Tensor]):
        super().__init__()
        self.others = {weight.untyped_storage()._cdata for weight in weights}  # which views share
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.add(out)
        return out

    def add(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.others:
                storage = tensor.untyped_storage()
                self.found[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def measure(self) -> None:
        """Update the peak by what is alive now, buffers for communication and recycled memory without a user apart."""
        apart = {buffer.untyped_storage()._cdata for buffer in get_global_memory_buffer().buffer.values()}
        apart |= {kept._cdata for _, kept in recycler._kept.values() if recycled._holders(kept) == recycled._OWN}
        alive = {key: entry for key, entry in self.found.items() if not entry[0].expired() and key not in apart}
        self.found, self.peak = alive, max(self.peak, sum(count for _, count in alive.values()))


class Watch:
    """Stands in for the forward pass of a model's stage and measures it, and what is computed again."""

    def __init__(self, model, engine):
        weights = list(model.parameters())
        self.kept, self.again, self.saved = Storages(weights), Storages(weights), dict[int, int]()
        self.stage, self.buffers = model.stage, getattr(engine.inner, "pipe_buffers", {}).get("inputs", [])
        model.stage = self

    def __call__(self, received: torch.Tensor | None, *args, **inputs) -> torch.Tensor:
        self.saved.clear()
        if received is not None:
            self.kept.add([received, self.buffers])
        with self.kept, torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            out = self.stage(received, *args, **inputs)
        self.kept.measure()
        return out

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.kept.others:
            self.saved[storage._cdata] = storage.nbytes()
        return tensor

    @contextlib.contextmanager
    def computing_again(self, plain) -> Iterator[None]:
        self.again.found.clear()
        self.again.others |= self.kept.found.keys()  # what it starts from
        with plain, self.again:
            try:
                yield
            finally:
                self.again.measure()


def measured(rank: int, world_size: int, configs: list[Config]) -> list[dict[str, Any]]:
    """Bytes of each config on this rank, in one step through the engine: see Watch."""
    from recipes import collectives
    from recipes.engine import make_engine
    from recipes.launcher import rank_environment
    from recipes.model import recompute
    from recipes.model.gpt import GPT, registry
    from recipes.train.batch import model_inputs
    from recipes.train.job import start_process
    from tests.distributed.workers import own_rows, tiny_tokens

    start_process(configs[0], rank_environment(os.environ))
    plain_again, results = recompute._again, []
    for config in configs:
        layout, tokens = layout_of(config, world_size), tiny_tokens(config)
        model = GPT(config, layout)
        engine = make_engine(model, registry(model, config), config)
        watch = Watch(model, engine)
        recompute._again = lambda *args, watch=watch: watch.computing_again(plain_again(*args))
        rows = own_rows(engine, config, rank)
        batches = [model_inputs(tokens[row].numpy(), 0, config.data, collectives.device()) for row in rows]
        engine.accumulate(batches, tokens[:, 1:].numel())
        bytes_ = {"kept": watch.kept.peak, "again": watch.again.peak, "saved": sum(watch.saved.values())}
        results.append({"stage": layout.index(Role.pp, rank), **bytes_})
        engine.close()
    recompute._again = plain_again
    return results


def compare(run_ranks, world_size: int, configs: list[Config], bound: float = 0.03) -> list[list[dict[str, Any]]]:
    """Every rank against the plan of its stage, and the largest against what the plan prints; returns what was measured."""
    ranks = run_ranks(f"{HERE}:measured", world_size, configs)
    for number, config in enumerate(configs):
        layout, found = layout_of(config, world_size), [rank[number] for rank in ranks]
        for result in found:
            expected = stage_activations(config, layout)[result["stage"]]
            assert expected.kept == pytest.approx(result["kept"], rel=bound), (number, result, expected)
            # Outputs and other things that do not stay are there too while something is computed again.
            assert expected.again <= result["again"], (number, result, expected)
            both = expected.kept + expected.again
            assert both == pytest.approx(result["kept"] + result["again"], rel=0.15), (number, result, expected)
        printed = plan(config, world_size)["activation_bytes_per_rank"]
        assert printed == pytest.approx(max(result["kept"] for result in found), rel=bound), (number, printed)
    return ranks


def shaped(make=tiny_config, recompute: tuple[str, ...] | None = None, **changes: Any) -> Config:
    """A model of some size; `recompute`: modules, or () for whole blocks."""
    config = make(model__num_layers=3, model__hidden_size=128, model__ffn_hidden_size=352, model__seq_length=128)
    change(
        config,
        {"train__micro_batch_size": 4, "train__global_batch_size": 4, "model__vocab_size": 500, "zero__stage": 1},
    )
    if make is tiny_moe_config:
        config.moe.moe_ffn_hidden_size = 96
    if recompute is not None:
        config.model.recompute_granularity = Recompute.selective if recompute else Recompute.full
        config.model.recompute_modules = list(recompute)
    return change(config, changes)


CHOICES = (None, (), ("core_attn",), ("layernorm",), ("core_attn", "layernorm", "mlp"))
WIDE = {"model__hidden_size": 256, "model__num_attention_heads": 8, "model__ffn_hidden_size": 704}


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("make", [tiny_config, tiny_moe_config])
def test_one_process(run_ranks, make, precision):
    configs = [shaped(make, recompute, train__precision=precision) for recompute in CHOICES]
    if make is tiny_moe_config:
        configs.insert(-1, shaped(make, ("moe_act",), train__precision=precision))
        configs.append(shaped(make, ("moe",), moe__moe_shared_expert_intermediate_size=96, train__precision=precision))
    configs.append(shaped(make, train__precision=precision, **WIDE))
    (results,) = compare(run_ranks, 1, configs)
    plain, full, *others = (result["kept"] for result in results)
    assert full < 0.25 * plain and max(others[:-1]) <= plain
    for number in (0, 1):  # what autograd saved is all that there is, but for the ids of the batch and statistics
        assert results[number]["saved"] == pytest.approx(results[number]["kept"], rel=0.04)


def test_other_blocks(run_ranks):
    """Every choice in the description that changes what is kept."""
    shared = {"moe__moe_shared_expert_intermediate_size": 64, "moe__moe_layer_freq": 1}
    positions = {"data__reset_position_ids": True, "data__reset_attention_mask": True}
    configs = [
        shaped(model__activation=Activation.gelu, model__add_bias_linear=True, model__num_query_groups=4),
        shaped(model__qk_layernorm=True, model__rotary_percent=0.5, model__hidden_dropout=0.1),
        shaped(model__normalization=Normalization.LayerNorm, model__qk_layernorm=True, train__precision=Precision.bf16),
        shaped(model__attention_dropout=0.1, train__precision=Precision.bf16),
        shaped(recompute=("core_attn",), **positions),
        shaped(**positions),
        shaped(tiny_moe_config, moe__moe_router_topk=1, moe__moe_router_pre_softmax=True, moe__moe_layer_freq=1),
        shaped(
            tiny_moe_config,
            moe__num_moe_experts=None,
            moe__num_moe_experts_per_layer=[4, 32],  # in layers 0 and 2: logits of 32 are seen in the sum
            moe__moe_use_residual=True,
            moe__moe_shared_expert_intermediate_size=64,
        ),
        shaped(tiny_moe_config, moe__moe_use_residual=True, **shared, train__precision=Precision.bf16),
        shaped(tiny_moe_config, moe__moe_shared_expert_gate=True, **shared),
        shaped(tiny_moe_config, moe__moe_expert_capacity_factor=0.5, moe__moe_shared_expert_intermediate_size=64),
    ]
    compare(run_ranks, 1, configs)


@pytest.mark.parametrize("make", [tiny_config, tiny_moe_config])
def test_tensor_and_sequence_parallelism(run_ranks, make):
    sequence = {"parallel__sequence_parallel": True}
    variants: list[tuple[tuple[str, ...] | None, dict[str, Any]]] = [(None, {}), (None, sequence), ((), sequence)]
    variants += [(("layernorm", "core_attn"), sequence), (None, sequence | {"train__precision": Precision.bf16})]
    if make is tiny_moe_config:
        whole = {"parallel__expert_tensor_parallel_size": 1, "moe__moe_shared_expert_intermediate_size": 64}
        variants += [(("moe",), sequence), (None, sequence | whole | {"parallel__expert_model_parallel_size": 2})]
        variants += [(("layernorm",), whole)]
    compare(
        run_ranks,
        2,
        [shaped(make, which, parallel__tensor_model_parallel_size=2, **other) for which, other in variants],
    )


def test_expert_parallelism(run_ranks):
    """Random routers do not spread tokens evenly: single ranks differ from the plan, the mean does not."""
    config = shaped(tiny_moe_config, parallel__expert_model_parallel_size=2, train__micro_batch_size=2)
    ranks = run_ranks(f"{HERE}:measured", 2, [config])
    expected = stage_activations(config, layout_of(config, 2))[0].kept
    assert sum(rank[0]["kept"] for rank in ranks) / 2 == pytest.approx(expected, rel=0.02)
    assert max(rank[0]["kept"] for rank in ranks) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("make", [tiny_config, tiny_moe_config])
def test_pipeline_stages(run_ranks, make):
    """The first of two stages keeps two micro-batches, if there are two."""
    configs = [
        shaped(make, which, parallel__pipeline_model_parallel_size=2, train__micro_batch_size=4 // micro_batches)
        for which, micro_batches in itertools.product((None, (), ("core_attn", "layernorm")), (1, 4))
    ]
    configs.append(shaped(make, parallel__pipeline_model_parallel_size=2, train__micro_batch_size=1))
    configs[-1].train.precision = Precision.bf16
    ranks = compare(run_ranks, 2, configs, bound=0.05)
    assert ranks[0][1]["kept"] == pytest.approx(ranks[0][0]["kept"] / 2, rel=0.08), "2 of 4 micro-batches, not all"


def test_four_stages(run_ranks):
    sizes = {"parallel__pipeline_model_parallel_size": 4, "model__num_layers": 5, "train__micro_batch_size": 1}
    compare(run_ranks, 4, [shaped(tiny_moe_config, which, **sizes) for which in (None, ())], bound=0.05)
