"""How the ranks share the work: what a layout needs of the model and of the number of ranks, and which layouts a model has.

    description, ranks -> layout_problems() -> messages, each with the sum that fails
    description, ranks -> legal_layouts()   -> [Layout, ...];  with_layout() writes one of them into the description

Everything that is divided is divided evenly: attention heads, widths and tokens over tensor-parallel ranks, the experts of a
layer over expert-parallel ones. The vocabulary is padded instead, and refuses nothing. Pipeline stages may have unlike numbers
of layers, but each has one.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence

from recipes.config import Config
from recipes.logical import expert_width, ffn_width, moe_layers
from recipes.topology import Layout, expert_tensor_size, model_parallel_size
from recipes.validation.limits import Problems, divisible, expert_counts_by_key
from recipes.validation.pipeline import check_pipeline
from recipes.validation.settings import check_zero


def layout_problems(config: Config, world_size: int) -> Problems:
    """Every contradiction between the groups `parallel`, `model` and `moe` and the number of ranks."""
    rank_problems = list(_ranks(config, world_size))
    yield from rank_problems
    yield from _stages(config, world_size)
    yield from _tensor_parallel(config, world_size)
    if not config.moe.has_experts:
        return  # check_experts has refused settings that have no effect then
    yield from _expert_tensor(config)
    if not rank_problems and expert_tensor_size(config) in (1, config.parallel.tensor_model_parallel_size):
        yield from _expert_ranks(config, world_size)  # otherwise it is unknown over how many ranks
    size = config.parallel.expert_model_parallel_size
    divisor = f"parallel.expert_model_parallel_size={size}"
    few = ", or another expert_model_parallel_size"
    for key, count in expert_counts_by_key(config.moe).items():
        yield from divisible(key, count, divisor, size, few)


def check_batch(config: Config, world_size: int) -> Problems:
    """A batch that the data-parallel ranks can share; nothing when the number of ranks is wrong already."""
    if any(_ranks(config, world_size)):
        return
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    data = world_size // model_parallel_size(config)
    ranks = f"train.micro_batch_size={micro} x data-parallel {data}"
    otherwise = "" if batch % data else f", or train.micro_batch_size={batch // data}"
    yield from divisible("train.global_batch_size", batch, ranks, micro * data, otherwise)


def legal_layouts(config: Config, world_size: int, zero_stages: Sequence[int] = (0, 1, 2)) -> list[Layout]:
    """All layouts of the described model on `world_size` ranks: ordered by tensor-parallel size, then stages, at last ZeRO.

    The present settings of `parallel` and `zero.stage` do not matter. Layouts whose data-parallel ranks cannot share
    `train.global_batch_size` are left out; the micro batch is the caller's to choose.
    """
    experts = list(expert_counts_by_key(config.moe).values())
    found = []
    for tensor, stages in itertools.product(divisors(world_size), repeat=2):
        if world_size % (tensor * stages):
            continue
        stage = world_size // stages
        for sequence, expert, expert_tensor, zero in itertools.product(
            (False, True) if tensor > 1 else (False,),
            divisors(math.gcd(stage, *experts)) if experts else (1,),
            sorted({1, tensor}) if experts else (1,),
            zero_stages,
        ):
            if stage % (expert * expert_tensor):
                continue
            layout = Layout(
                world_size,
                tensor_parallel_size=tensor,
                pipeline_parallel_size=stages,
                expert_parallel_size=expert,
                expert_tensor_parallel_size=expert_tensor,
                sequence_parallel=sequence,
                zero_stage=zero,
            )
            if config.train.global_batch_size % layout.data_parallel_size == 0 and _accepted(config, layout):
                found.append(layout)
    return found


def _accepted(config: Config, layout: Layout) -> bool:
    changed = with_layout(config, layout)
    checks = (layout_problems, check_zero, check_pipeline)
    return not any(found for check in checks for found in check(changed, layout.world_size))


def with_layout(config: Config, layout: Layout) -> Config:
    """A copy of the description that asks for `layout`, with every size given and layers spread evenly over stages."""
    changed = copy.deepcopy(config)
    parallel, experts = changed.parallel, config.moe.has_experts
    parallel.data_parallel_size = layout.data_parallel_size
    parallel.tensor_model_parallel_size = layout.tensor_parallel_size
    parallel.sequence_parallel = layout.sequence_parallel
    parallel.pipeline_model_parallel_size = layout.pipeline_parallel_size
    parallel.num_layers_in_first_pipeline_stage = parallel.num_layers_in_last_pipeline_stage = None
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
    parallel, held_by = config.parallel, model_parallel_size(config)
    wanted, tensor = parallel.data_parallel_size, parallel.tensor_model_parallel_size
    stages = parallel.pipeline_model_parallel_size
    fits = world_size % held_by == 0
    started = f"{world_size} process{' was' if world_size == 1 else 'es were'} started"
    factors = [f"tensor_model_parallel_size={tensor}"] * (tensor > 1)
    factors += [f"pipeline_model_parallel_size={stages}"] * (stages > 1)
    if wanted is not None and wanted * held_by != world_size:
        asked = " x ".join([f"parallel.data_parallel_size={wanted}", *factors])
        if factors:
            asked += f" = {wanted * held_by} ranks"
        otherwise = ", or set parallel.data_parallel_size=null" if fits else ""
        yield f"{asked} but {started}; start {wanted * held_by}{otherwise}"
    elif not fits:
        if world_size % tensor:
            shown = f"parallel.tensor_model_parallel_size={tensor}"
            legal = _tensor_sizes(config, world_size)
        else:
            shown = f"parallel.{' x '.join(reversed(factors))}" + f" = {held_by}" * (tensor > 1)
            legal = _stage_counts(config, world_size)
        way_out = f"{f'use {_one_of(legal)}, or ' if legal else ''}start {held_by} processes or a multiple of them"
        yield f"{shown} must divide the number of ranks, but {started}; {way_out}"


def _stages(config: Config, world_size: int) -> Problems:
    """Layers for every pipeline stage."""
    layers, stages, given = config.model.num_layers, config.parallel.pipeline_model_parallel_size, _given_layers(config)
    if _can_share_layers(config, stages):
        return
    total, others = sum(given.values()), stages - len(given)
    shown = "parallel." + " + ".join(f"{key}={value}" for key, value in given.items())
    shown += f" = {total}" if len(given) > 1 else ""
    if stages > layers:
        legal = _stage_counts(config, world_size)
        way_out = f"use {_one_of(legal)}, or more layers" if legal else "use more layers"
        limit = f"at most model.num_layers={layers}, as each stage needs a layer"
        yield f"parallel.pipeline_model_parallel_size={stages} must be {limit}; {way_out}"
    elif stages == 1:
        few, way_out = "has" if len(given) == 1 else "have", "use more stages, or null"
        yield f"{shown} {few} no effect with parallel.pipeline_model_parallel_size=1; {way_out}"
    elif others == 0:
        limit = f"model.num_layers={layers}, as there is no other stage"
        yield f"{shown} must be {limit}; use numbers that add up to it, or null for one of them"
    else:
        few = f"{others} other stage{'s' if others > 1 else ''}"
        left = f"{max(0, layers - total) or 'none'} of model.num_layers={layers}"
        most = f"at most {layers - others}{' in all' if len(given) > 1 else ''}"
        yield f"{shown} leaves {left} for {few}, each of which needs one; use {most}, or null"


def _given_layers(config: Config) -> dict[str, int]:
    """The numbers of layers that are given, by key."""
    names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    return {name: value for name in names if (value := getattr(config.parallel, name)) is not None}


def _can_share_layers(config: Config, stages: int) -> bool:
    """Whether so many stages can have a layer each, and those with a given number theirs."""
    given = _given_layers(config)
    left, others = config.model.num_layers - sum(given.values()), stages - len(given)
    return (stages > 1 or not given) and (left >= others if others else left == 0)


def _stage_counts(config: Config, world_size: int) -> list[int]:
    """Numbers of stages that divide the ranks and can share the layers."""
    tensor = config.parallel.tensor_model_parallel_size
    ranks = world_size if world_size % tensor else world_size // tensor
    return [stages for stages in divisors(ranks) if _can_share_layers(config, stages)]


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
    elif config.moe.has_experts and expert_tensor_size(config) == 1:
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
    """Tensor-parallel sizes that divide the ranks and all else that they must."""
    shared = [value for _, value, _ in _divided_by_tensor(config)]
    if config.moe.has_experts and config.parallel.expert_tensor_parallel_size is None:
        shared += _expert_widths(config).values()
    stages = config.parallel.pipeline_model_parallel_size
    ranks = world_size if world_size % stages else world_size // stages
    return divisors(math.gcd(ranks, *shared))


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
    """Experts times the parts of each, over the ranks of a stage: data- and tensor-parallel ones together."""
    parallel, experts = config.parallel, expert_counts_by_key(config.moe).values()
    size, parts = parallel.expert_model_parallel_size, expert_tensor_size(config)
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    in_stage = world_size // stages
    if in_stage % (size * parts) == 0:
        return
    data = in_stage // tensor
    shown, ranks = f"parallel.expert_model_parallel_size={size}", f"the data-parallel size {data}"
    if tensor > 1:
        shown += f" x expert_tensor_parallel_size={parts} = {size * parts}"
        of_stage = " of each pipeline stage" if stages > 1 else ""
        ranks = f"{in_stage} ranks{of_stage} (data-parallel {data} x tensor-parallel {tensor})"
    else:
        ranks += " (experts are shared out among data-parallel ranks)"
    legal = _one_of(divisors(math.gcd(in_stage // parts, *experts)))
    needed = math.lcm(size * parts, tensor)
    plan = f"to plan only: parallel.data_parallel_size={needed // tensor}"
    yield f"{shown} must divide {ranks}; use {legal}, or start {needed * stages} processes ({plan})"


def _one_of(legal: list[int]) -> str:
    return ("one of " if len(legal) > 1 else "") + ", ".join(map(str, legal))
