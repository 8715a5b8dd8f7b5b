"""How the ranks share the work: what a layout needs of the model and of the number of ranks, and which layouts a model has.

    description, ranks -> layout_problems() -> messages, each with the sum that fails
    description, ranks -> legal_layouts()   -> [Layout, ...];  with_layout() writes one of them into the description

Everything that is divided is divided evenly: attention heads, widths and tokens over tensor-parallel ranks, the experts of a
layer over expert-parallel ones. The vocabulary is padded instead, and refuses nothing.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator

from recipes.config import Config
from recipes.logical import expert_width, ffn_width, moe_layers
from recipes.topology import Layout, expert_tensor_size
from recipes.validation.limits import Problems, divisible
from recipes.validation.settings import check_zero


def layout_problems(config: Config, world_size: int) -> Problems:
    """Every contradiction between the groups `parallel`, `model` and `moe` and the number of ranks."""
    rank_problems = list(_ranks(config, world_size))
    yield from rank_problems
    yield from _tensor_parallel(config, world_size)
    if config.moe.num_moe_experts is None:
        return  # check_experts has refused settings that have no effect then
    yield from _expert_tensor(config)
    if not rank_problems and expert_tensor_size(config) in (1, config.parallel.tensor_model_parallel_size):
        yield from _expert_ranks(config, world_size)  # otherwise it is unknown over how many ranks
    size = config.parallel.expert_model_parallel_size
    divisor = f"parallel.expert_model_parallel_size={size}"
    few = ", or another expert_model_parallel_size"
    yield from divisible("moe.num_moe_experts", config.moe.num_moe_experts, divisor, size, few)


def check_batch(config: Config, world_size: int) -> Problems:
    """A batch that the data-parallel ranks can share; nothing when the number of ranks is wrong already."""
    if any(_ranks(config, world_size)):
        return
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    data = world_size // config.parallel.tensor_model_parallel_size
    ranks = f"train.micro_batch_size={micro} x data-parallel {data}"
    otherwise = "" if batch % data else f", or train.micro_batch_size={batch // data}"
    yield from divisible("train.global_batch_size", batch, ranks, micro * data, otherwise)


def legal_layouts(config: Config, world_size: int) -> list[Layout]:
    """All layouts of the described model on `world_size` ranks, tensor-parallel size first, then ZeRO stage last.

    The present settings of `parallel` and `zero.stage` do not matter. Layouts whose data-parallel ranks cannot share
    `train.global_batch_size` are left out; the micro batch is the caller's to choose.
    """
    experts = config.moe.num_moe_experts
    found = []
    for tensor in divisors(world_size):
        for sequence, expert, expert_tensor, stage in itertools.product(
            (False, True) if tensor > 1 else (False,),
            (1,) if experts is None else divisors(math.gcd(experts, world_size)),
            sorted({1, tensor}) if experts is not None else (1,),
            (0, 1, 2),
        ):
            if world_size % (expert * expert_tensor):
                continue
            layout = Layout(
                world_size,
                tensor_parallel_size=tensor,
                expert_parallel_size=expert,
                expert_tensor_parallel_size=expert_tensor,
                sequence_parallel=sequence,
                zero_stage=stage,
            )
            if config.train.global_batch_size % layout.data_parallel_size == 0 and _accepted(config, layout):
                found.append(layout)
    return found


def _accepted(config: Config, layout: Layout) -> bool:
    changed = with_layout(config, layout)
    return not any(itertools.chain(layout_problems(changed, layout.world_size), check_zero(changed, layout.world_size)))


def with_layout(config: Config, layout: Layout) -> Config:
    """A copy of the description that asks for `layout`, with every size given."""
    changed = copy.deepcopy(config)
    parallel, experts = changed.parallel, config.moe.num_moe_experts is not None
    parallel.data_parallel_size = layout.data_parallel_size
    parallel.tensor_model_parallel_size = layout.tensor_parallel_size
    parallel.sequence_parallel = layout.sequence_parallel
    parallel.expert_model_parallel_size = layout.expert_parallel_size
    parallel.expert_tensor_parallel_size = layout.expert_tensor_parallel_size if experts else None
    changed.zero.stage = layout.zero_stage
    return changed


def divisors(number: int) -> list[int]:
    """All divisors in increasing order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _ranks(config: Config, world_size: int) -> Problems:
    """The ranks that were started against those that the description asks for."""
    wanted, tensor = config.parallel.data_parallel_size, config.parallel.tensor_model_parallel_size
    fits = world_size % tensor == 0
    started = f"{world_size} process{' was' if world_size == 1 else 'es were'} started"
    if wanted is not None and wanted * tensor != world_size:
        asked = f"parallel.data_parallel_size={wanted}"
        if tensor > 1:
            asked += f" x tensor_model_parallel_size={tensor} = {wanted * tensor} ranks"
        otherwise = ", or set parallel.data_parallel_size=null" if fits else ""
        yield f"{asked} but {started}; start {wanted * tensor}{otherwise}"
    elif not fits:
        legal = _one_of(_tensor_sizes(config, world_size))
        way_out = f"use {legal}, or start {tensor} processes or a multiple of them"
        yield f"parallel.tensor_model_parallel_size={tensor} must divide the number of ranks, but {started}; {way_out}"


def _divided_by_tensor(config: Config) -> Iterator[tuple[str, int, str]]:
    """What tensor-parallel ranks share evenly: (key, value, why it is shared when that is not evident)."""
    model, parallel = config.model, config.parallel
    yield "model.num_attention_heads", model.num_attention_heads, ""
    if model.num_query_groups is not None:
        yield "model.num_query_groups", model.num_query_groups, ""
    if len(moe_layers(config)) < model.num_layers:
        yield "model.ffn_hidden_size", ffn_width(model), "derived from null" if model.ffn_hidden_size is None else ""
    if parallel.sequence_parallel:
        yield "model.seq_length", model.seq_length, "parallel.sequence_parallel=true shares the tokens out"
    elif config.moe.num_moe_experts is not None and expert_tensor_size(config) == 1:
        why = "with parallel.expert_tensor_parallel_size=1 they share a layer's tokens among its experts"
        yield "model.seq_length", model.seq_length, why


def _expert_widths(config: Config) -> dict[str, int]:
    """What expert-tensor-parallel ranks share evenly, by key."""
    moe = config.moe
    widths = {f"{'model.' if moe.moe_ffn_hidden_size is None else 'moe.moe_'}ffn_hidden_size": expert_width(config)}
    if moe.moe_shared_expert_intermediate_size is not None:
        widths["moe.moe_shared_expert_intermediate_size"] = moe.moe_shared_expert_intermediate_size
    return widths


def _tensor_sizes(config: Config, world_size: int) -> list[int]:
    """Tensor-parallel sizes that divide all that they must."""
    shared = [value for _, value, _ in _divided_by_tensor(config)]
    if config.moe.num_moe_experts is not None and config.parallel.expert_tensor_parallel_size is None:
        shared += _expert_widths(config).values()
    return divisors(math.gcd(world_size, *shared))


def _tensor_parallel(config: Config, world_size: int) -> Problems:
    size = config.parallel.tensor_model_parallel_size
    shown, legal = f"parallel.tensor_model_parallel_size={size}", _tensor_sizes(config, world_size)
    for key, value, why in _divided_by_tensor(config):
        if value % size:
            reason = f" ({why})" if why else ""
            yield f"{shown} must divide {key}={value}{reason}; use {_one_of(legal)}, or another {key}"
    if config.parallel.sequence_parallel and size == 1:
        larger = [number for number in legal if number > 1]
        way_out = f"set that size to {_one_of(larger)}, or " if larger else ""
        reason = "it shares tokens among tensor-parallel ranks"
        yield f"parallel.sequence_parallel=true with {shown}: {reason}; {way_out}use parallel.sequence_parallel=false"


def _expert_tensor(config: Config) -> Problems:
    """The size of the groups that share an expert's matrices, and what they divide."""
    size, tensor = expert_tensor_size(config), config.parallel.tensor_model_parallel_size
    widths = _expert_widths(config)
    if size not in (1, tensor):
        legal = [number for number in sorted({1, tensor}) if all(width % number == 0 for width in widths.values())]
        limit = f"1 or parallel.tensor_model_parallel_size={tensor}"
        yield f"parallel.expert_tensor_parallel_size={size} must be {limit}; use {_one_of(legal)}"
        return
    derived = " (null: tensor_model_parallel_size)" if config.parallel.expert_tensor_parallel_size is None else ""
    shown = f"parallel.expert_tensor_parallel_size={size}{derived}"
    for key, width in widths.items():
        yield from divisible(key, width, shown, size, ", or use parallel.expert_tensor_parallel_size=1")


def _expert_ranks(config: Config, world_size: int) -> Problems:
    """Experts times the parts of each, over all ranks: their grid is laid over data- and tensor-parallel ranks together."""
    parallel, experts = config.parallel, config.moe.num_moe_experts
    assert experts is not None
    size, parts = parallel.expert_model_parallel_size, expert_tensor_size(config)
    tensor = parallel.tensor_model_parallel_size
    if world_size % (size * parts) == 0:
        return
    data = world_size // tensor
    shown, ranks = f"parallel.expert_model_parallel_size={size}", f"the data-parallel size {world_size}"
    if tensor > 1:
        shown += f" x expert_tensor_parallel_size={parts} = {size * parts}"
        ranks = f"{world_size} ranks (data-parallel {data} x tensor-parallel {tensor})"
    else:
        ranks += " (experts are shared out among data-parallel ranks)"
    legal = _one_of(divisors(math.gcd(world_size // parts, experts)))
    needed = math.lcm(size * parts, tensor)
    plan = f"to plan only: parallel.data_parallel_size={needed // tensor}"
    yield f"{shown} must divide {ranks}; use {legal}, or start {needed} processes ({plan})"


def _one_of(legal: list[int]) -> str:
    return ("one of " if len(legal) > 1 else "") + ", ".join(map(str, legal))
