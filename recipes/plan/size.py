"""Parameters, FLOPs per token and bytes per rank of a description. Pure arithmetic, no torch.

    logical tensors of the model -> parameters, FLOPs;  layout, precision, optimizer, ZeRO stage -> bytes per rank

FLOPs are those of forward and backward (three times the forward), a multiply-add being 2: per token, 6 for each weight
of a matrix product, the head included and the embedding look-up not, plus 6 x layers x seq x heads x width for
attention. That counts the causal half only; PaLM (arXiv 2204.02311, app. B) counts the full square, 12 x. Of the experts
those that a token is sent to count, and the router; nothing is subtracted for dropped tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from recipes.config import Config, OptimizerName, Precision
from recipes.logical import expert_counts, expert_width, head_width, stage_layers, tensor_kinds
from recipes.plan.activations import stage_activations
from recipes.plan.shapes import Held, held_weights, small_weights
from recipes.topology import Cluster, Layout, Role, layout_of, used_zero_stage

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Weights:
    """Numbers of weights over all layers and ranks: tied ones once, vocabulary unpadded.

    `experts` are those among which routers choose (not a shared one), `active_experts` those of them that one token is sent
    to; `multiplied` are the dense weights that take part in matrix products.
    """

    dense: int
    experts: int
    active_experts: int
    multiplied: int


def count_weights(config: Config) -> Weights:
    """The weights of a description. Raises ValueError for an unknown vocabulary size."""
    model = config.model
    if model.vocab_size is None:
        raise ValueError("model.vocab_size=null: sizes need it; set it, or name data by data.path")
    dense = multiplied = experts = active = 0
    for tensor, layers, copies in tensor_kinds(config):
        numel = tensor.numel * (len(layers) or 1)
        if ".moe.experts." in tensor.name:
            experts += numel * copies
            active += numel * config.moe.moe_router_topk
            continue
        dense += numel
        look_up = tensor.name == "embedding.weight" and not model.share_embeddings_and_output_weights
        if len(tensor.shape) == 2 and not look_up:  # tied, the embedding is the head
            multiplied += numel
    return Weights(dense, experts, active, multiplied)


def total_parameters(config: Config) -> int:
    """Weights of the model."""
    weights = count_weights(config)
    return weights.dense + weights.experts


def active_parameters(config: Config) -> int:
    """Weights that one token meets: all but the experts that it is not sent to."""
    weights = count_weights(config)
    return weights.dense + weights.active_experts


def flops_per_token(config: Config) -> int:
    """Floating point operations of forward and backward per token of a full sequence (conventions above)."""
    model, weights = config.model, count_weights(config)
    attention = model.num_layers * model.seq_length * model.num_attention_heads * head_width(model)
    return 6 * (weights.multiplied + weights.active_experts) + 6 * attention


KEPT_WHOLE = (
    100_000  # elements up to which ZeRO-3 keeps a parameter on every rank: DeepSpeed's param_persistence_threshold
)


@dataclass(frozen=True)
class RankBytes:
    """Bytes that live on one rank through a whole step. `optimizer` (masters, moments) may lie in host memory."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.gradients + self.optimizer


def bytes_per_rank(config: Config, world_size: int) -> RankBytes:
    """Weights, gradients and optimizer states of one rank, of the pipeline stage that has most of them.

    Activations (see recipes/plan/activations.py) and communication buffers are not counted.

    What DeepSpeed 0.19 allocates: ZeRO keeps an fp32 master beside fp32 weights too; bf16 gradients are summed in fp32
    (ZeRO-1: a whole fp32 sum beside the bf16 gradients, ZeRO-2: the rank's part of the sum), except at stage 0. ZeRO-1
    divides masters and moments, ZeRO-2 also gradients, ZeRO-3 also weights (Rajbhandari et al. 2020, arXiv 1910.02054, sec.
    3); before the last micro-batch is reduced, ZeRO-1 holds whole gradients, and ZeRO-3 gathers the weights that it uses. What
    a rank holds of the weights ZeRO divides over the ranks that hold the same: expert-data-parallel ones for the experts,
    data-parallel ones for all else.
    """
    return max(_bytes_by_stage(config, layout_of(config, world_size)), key=lambda stage: stage.total)


def _bytes_by_stage(config: Config, layout: Layout) -> list[RankBytes]:
    return [_held_bytes(config, layout, local) for local in held_weights(config, layout)]


def _held_bytes(config: Config, layout: Layout, local: Held) -> RankBytes:
    stage, bf16 = used_zero_stage(config, layout), config.train.precision is Precision.bf16
    held = local.dense + local.experts
    part = math.ceil(local.dense / layout.data_parallel_size)
    part += math.ceil(local.experts / layout.expert_data_parallel_size)
    master = 4 if bf16 or stage else 0
    moments = 8 if config.optimizer.name is OptimizerName.adamw else 0
    whole_gradients = 4 if not bf16 else 2 if stage == 0 else 2 + 4
    return RankBytes(
        weights=(held if stage < 3 else part + small_weights(config, layout, KEPT_WHOLE)) * (2 if bf16 else 4),
        gradients=4 * part if stage >= 2 else whole_gradients * held,
        optimizer=(part if stage else held) * (master + moments),
    )


def plan(config: Config, world_size: int, cluster: Cluster | None = None) -> dict[str, Any]:
    """The sizes of a valid description on `world_size` ranks, as plain values for JSON; on known nodes what crosses them."""
    model, train, layout = config.model, config.train, layout_of(config, world_size)
    tokens_per_step = train.global_batch_size * model.seq_length
    flops = flops_per_token(config)
    memory = bytes_per_rank(config, world_size)
    stages = _stages(config, layout)
    accumulation = train.global_batch_size // (train.micro_batch_size * layout.data_parallel_size)
    others = layout.pipeline_parallel_size - 1
    sizes = {
        "total_params": total_parameters(config),
        "active_params": active_parameters(config),
        "flops_per_token": flops,
        "num_moe_layers": len(expert_counts(config)),
        "num_moe_experts_per_layer": list(expert_counts(config).values()),
        "world_size": world_size,
        "data_parallel_size": layout.data_parallel_size,
        "tensor_model_parallel_size": layout.tensor_parallel_size,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pipeline_parallel_size,
        "expert_model_parallel_size": layout.expert_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
        "expert_data_parallel_size": layout.expert_data_parallel_size,
        "accumulation": accumulation,
        "bubble_share": others / (accumulation + others),
        "tokens_per_step": tokens_per_step,
        "total_tokens": tokens_per_step * train.steps,
        "total_flops": tokens_per_step * train.steps * flops,
        "bytes_per_rank": asdict(memory) | {"total": memory.total},
        "activation_bytes_per_rank": max(stage["activation_bytes"] for stage in stages),
        "recomputed_bytes_per_rank": max(stage["recomputed_bytes"] for stage in stages),
        "stages": stages,
    }
    if cluster is not None:
        sizes["nodes"] = asdict(cluster) | {"crossed_by": _crossing(config, layout, cluster)}
    return sizes


def _stages(config: Config, layout: Layout) -> list[dict[str, Any]]:
    """Of each pipeline stage its layers, and what one of its ranks holds: see RankBytes and Activations."""
    found = []
    layers = stage_layers(config, layout.pipeline_parallel_size)
    held = zip(_bytes_by_stage(config, layout), stage_activations(config, layout), strict=True)
    for number, (memory, activations) in enumerate(held):
        found.append(
            {
                "layers": [layers[number][0], layers[number][-1]],
                "bytes": asdict(memory) | {"total": memory.total},
                "micro_batches": activations.in_flight,
                "activation_bytes": activations.kept,
                "recomputed_bytes": activations.again,
                "sum": memory.total + activations.kept + activations.again,
            }
        )
    return found


def _crossing(config: Config, layout: Layout, cluster: Cluster) -> list[str]:
    """The groups whose messages leave a node."""
    roles = [Role.tp, Role.dp, Role.pp]
    if config.moe.has_experts:
        roles += [Role.etp, Role.ep, Role.edp]
    return [role.value for role in roles if cluster.crosses_nodes(layout, role)]


def describe(config: Config, world_size: int, cluster: Cluster | None = None) -> RenderableType:
    """The plan as a table to print."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"plan of {config.run.name}"), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _rows(config, plan(config, world_size, cluster)).items():
        table.add_row(name, Text(text))
    return table


def _rows(config: Config, sizes: Mapping[str, Any]) -> dict[str, str]:
    model, train = config.model, config.train
    pipeline = f" x {len(sizes['stages'])} pipeline stages" if len(sizes["stages"]) > 1 else ""
    sequence = " (sequence parallel)" if sizes["sequence_parallel"] else ""
    return {
        "model": f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads, "
        f"{model.seq_length} tokens per sequence, vocabulary {model.vocab_size}",
        **_expert_rows(config, sizes),
        "parameters": f"{sizes['total_params']:,}",
        "active parameters": f"{sizes['active_params']:,}",
        "FLOPs per token": f"{sizes['flops_per_token']:,} (forward and backward, causal attention)",
        "ranks": f"{sizes['world_size']} = data-parallel {sizes['data_parallel_size']} x tensor-parallel "
        f"{sizes['tensor_model_parallel_size']}{sequence}{pipeline}, ZeRO stage {config.zero.stage}, {train.precision.name}",
        **_stage_rows(sizes),
        **_node_rows(sizes),
        "batch": f"{train.global_batch_size} sequences = data-parallel {sizes['data_parallel_size']} x "
        f"{train.micro_batch_size} x {sizes['accumulation']} accumulated; {sizes['tokens_per_step']:,} tokens per step",
        "run": f"{train.steps:,} steps, {sizes['total_tokens']:,} tokens, {sizes['total_flops']:.3g} FLOPs",
        **_memory_rows(config, sizes),
    }


def _stage_rows(sizes: Mapping[str, Any]) -> dict[str, str]:
    stages = sizes["stages"]
    if len(stages) == 1:
        return {}
    layers = " | ".join(
        f"{first}-{last}" if first < last else str(first) for first, last in (s["layers"] for s in stages)
    )
    share = f"{len(stages) - 1} / ({sizes['accumulation']} micro-batches + {len(stages) - 1})"
    return {
        "stages": f"{len(stages)}, layers {layers}",
        "bubble": f"each stage waits for {sizes['bubble_share']:.1%} of a step = {share}",
    }


def _memory_rows(config: Config, sizes: Mapping[str, Any]) -> dict[str, str]:
    """What a rank holds; with several stages that of the stage which holds most of it."""
    stages, memory, again = sizes["stages"], sizes["bytes_per_rank"], sizes["recomputed_bytes_per_rank"]

    def largest(number: Callable[[Mapping[str, Any]], int]) -> tuple[Mapping[str, Any], str]:
        at = max(range(len(stages)), key=lambda stage: number(stages[stage]))
        return stages[at], f", stage {at}" if len(stages) > 1 else ""

    _, held_by = largest(lambda stage: stage["bytes"]["total"])
    busiest, kept_by = largest(lambda stage: stage["activation_bytes"])
    heaviest, all_of = largest(lambda stage: stage["sum"])
    batches = "a micro-batch" if busiest["micro_batches"] == 1 else f"{busiest['micro_batches']} micro-batches"
    more = f", and up to {_size(again)} more while it is computed again" if again else ""
    spread = ", tokens spread evenly over experts" if config.moe.has_experts else ""
    where = ", in host memory" if config.zero.offload_optimizer else ""
    return {
        "weight bytes per rank": _size(memory["weights"]) + held_by,
        "gradient bytes per rank": _size(memory["gradients"]) + held_by,
        "optimizer bytes per rank": _size(memory["optimizer"]) + held_by + where,
        "activation bytes per rank": f"{_size(busiest['activation_bytes'])}{kept_by}: what {batches} "
        f"keep{'s' * (busiest['micro_batches'] == 1)} for the backward pass in plain torch{spread}{more}",
        "sum of these": f"{_size(heaviest['sum'])}{all_of}; communication buffers and single operations come on top",
    }


def _node_rows(sizes: Mapping[str, Any]) -> dict[str, str]:
    if (nodes := sizes.get("nodes")) is None:
        return {}
    crossed = ", ".join(nodes["crossed_by"]) or "none"
    return {
        "nodes": f"{nodes['num_nodes']} x {nodes['accelerators_per_node']} ranks; groups that cross nodes: {crossed}"
    }


def _expert_rows(config: Config, sizes: Mapping[str, Any]) -> dict[str, str]:
    moe, size, parts = config.moe, sizes["expert_model_parallel_size"], sizes["expert_tensor_parallel_size"]
    if not moe.has_experts:
        return {}
    shared, counts = moe.moe_shared_expert_intermediate_size, sizes["num_moe_experts_per_layer"]
    share = ", ".join(f"{count // size} of the {count}" for count in dict.fromkeys(counts)) + " experts of a layer"
    layers = " + ".join(f"{count} x {_layers(len(list(run)))}" for count, run in itertools.groupby(counts))
    return {
        "experts": f"{layers}, top-{moe.moe_router_topk}, "
        f"width {expert_width(config)}" + (f", and a shared one of width {shared}" if shared else ""),
        "expert parallelism": f"EP {size}: {share} on each rank" + (f", 1/{parts} of each" if parts > 1 else "") + "; "
        f"{sizes['world_size']} ranks = expert-data-parallel {sizes['expert_data_parallel_size']} x EP {size} x ETP {parts}"
        + (f" x {len(sizes['stages'])} pipeline stages" if len(sizes["stages"]) > 1 else ""),
    }


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"


def _size(count: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count:,} ({count / factor:.2f} {unit})"
    return f"{count:,}"
