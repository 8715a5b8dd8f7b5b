"""Logical tensors: what the weights are called, independent of how ranks and fused matrices hold them.

`logical_tensors` lists the tensors of a model description (name, shape, initial distribution, decay) without building it.
`registry` finds, for each local parameter of a built model, the pieces of logical tensors inside it; a piece can be read and
written. Initialisation, checkpoints, gradient comparison and the size planner all go through these two.

    embedding.weight [V, H]      layers.0.attention.{q,k,v,out}.weight      layers.0.ffn.{gate,up,down}.weight
    final_norm.weight [H]        layers.0.attention.{q_norm,k_norm}.weight  layers.0.{attention,ffn}_norm.weight
    head.weight [V, H] (untied)

A layer with E experts has, in place of ffn.*, layers.0.moe.router.weight [E, H], layers.0.moe.experts.7.{gate,up,down}.weight
with the global number of the expert, and, as described, layers.0.moe.shared.{gate,up,down}.weight, .shared_gate.weight [1, H],
.coefficient.weight [2, H] and .bias [2].

V is the true vocabulary: padding rows belong to no logical tensor. Matrices are [out, in]. Tensor-parallel ranks hold equal
parts: rows of q, k, v, gate, up, embedding and head, columns of out and down (Shoeybi et al. 2019, arXiv 1909.08053, sec. 3).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipes.config import Activation, Config, ModelConfig, MoeConfig, Normalization, RouterType

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class LogicalTensor:
    """One tensor of the model. `init` is the value of a constant start, or None for a normal one of deviation `std`."""

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    init: float | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def head_width(model: ModelConfig) -> int:
    """Channels of one attention head."""
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def num_kv_heads(model: ModelConfig) -> int:
    """Key/value heads."""
    return model.num_query_groups or model.num_attention_heads


def ffn_width(model: ModelConfig) -> int:
    """Feed-forward width; the default keeps the size of a 4 x hidden GELU block (Shazeer 2020, arXiv 2002.05202, sec. 3)."""
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    if model.activation is Activation.gelu:
        return 4 * model.hidden_size
    return math.ceil(8 * model.hidden_size / 3 / 64) * 64


def expert_width(config: Config) -> int:
    """Width of one expert."""
    return config.moe.moe_ffn_hidden_size or ffn_width(config.model)


def expert_counts(config: Config) -> dict[int, int]:
    """How many experts each layer has that has some, over all ranks: by its global number, in order."""
    moe, layers = config.moe, moe_layers(config)
    if moe.num_moe_experts_per_layer is not None:
        return dict(zip(layers, moe.num_moe_experts_per_layer, strict=True))
    return {layer: moe.num_moe_experts for layer in layers if moe.num_moe_experts is not None}


def num_moe_experts(config: Config, layer: int) -> int:
    """Experts of one layer that has some, over all ranks."""
    return expert_counts(config)[layer]


def learns_routes(moe: MoeConfig) -> bool:
    """Whether layers with experts have a router with weights."""
    return moe.moe_router_type not in (RouterType.hash, RouterType.random)


def moe_layers(config: Config) -> list[int]:
    """Global numbers of the layers with experts (megatron-core's meaning of `moe_layer_freq`: with offset 0, or as a list)."""
    moe, layers = config.moe, config.model.num_layers
    if not moe.has_experts:
        return []
    if moe.moe_layer_pattern is not None:
        return [layer for layer, has_experts in enumerate(moe.moe_layer_pattern[:layers]) if has_experts]
    return list(range(moe.moe_layer_offset, layers, moe.moe_layer_freq))


def stage_layers(config: Config, stages: int) -> list[list[int]]:
    """Global numbers of the layers of each of `stages` pipeline stages, in order; uneven ones give the first stages more."""
    parallel, layers = config.parallel, config.model.num_layers
    if stages == 1:
        return [list(range(layers))]
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    open_stages = stages - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    share, more = divmod(left, open_stages) if open_stages else (0, left)
    counts = [share + (stage < more) for stage in range(open_stages)]
    counts = ([] if first is None else [first]) + counts + ([] if last is None else [last])
    assert sum(counts) == layers and min(counts) > 0, "validation has made sure"
    numbers = iter(range(layers))
    return [[next(numbers) for _ in range(count)] for count in counts]


def logical_tensors(config: Config) -> dict[str, LogicalTensor]:
    """Every logical tensor of the model by name, in forward order. `model.vocab_size` must be known."""
    model = config.model
    first, *last = _outer_tensors(model)
    tensors, counts = [first], expert_counts(config)
    for layer in range(model.num_layers):
        tensors += _block_tensors(config, layer, counts.get(layer, 0))
    return {tensor.name: tensor for tensor in [*tensors, *last]}


def tensor_kinds(config: Config) -> Iterator[tuple[LogicalTensor, list[int], int]]:
    """Every logical tensor, but one for all that are alike: the tensor, the layers that have it (none: it is of no layer), and how
    many of it each of them has.

    Layers with equally many experts are alike, and so are the experts of a layer: the sizes of a model of any depth follow at once.
    """
    counts, alike = expert_counts(config), {}  # type: ignore[var-annotated]
    for layer in range(config.model.num_layers):
        alike.setdefault(counts.get(layer, 0), []).append(layer)
    for tensor in _outer_tensors(config.model):
        yield tensor, [], 1
    for num_experts, layers in alike.items():
        for tensor in _block_tensors(config, layers[0], num_experts, listed=min(1, num_experts)):
            yield tensor, layers, num_experts if ".moe.experts." in tensor.name else 1


def _outer_tensors(model: ModelConfig) -> Iterator[LogicalTensor]:
    """Those of no layer."""
    assert model.vocab_size is not None, "the vocabulary size is filled in from the tokenizer before tensors are named"
    yield LogicalTensor("embedding.weight", (model.vocab_size, model.hidden_size), std=model.init_method_std)
    yield from _norm_tensors(model, "final_norm", model.hidden_size)
    if not model.share_embeddings_and_output_weights:
        yield LogicalTensor("head.weight", (model.vocab_size, model.hidden_size), std=model.init_method_std)


def _norm_tensors(model: ModelConfig, name: str, width: int) -> Iterator[LogicalTensor]:
    yield LogicalTensor(f"{name}.weight", (width,), init=1.0)
    if model.normalization is Normalization.LayerNorm:
        yield LogicalTensor(f"{name}.bias", (width,), init=0.0)


def _linear_tensors(name: str, out_width: int, in_width: int, std: float, bias: bool) -> Iterator[LogicalTensor]:
    yield LogicalTensor(f"{name}.weight", (out_width, in_width), std=std)
    if bias:
        yield LogicalTensor(f"{name}.bias", (out_width,), init=0.0)


def _mlp_tensors(
    config: Config, prefix: str, width: int, bias: bool = False, scale: float = 1.0
) -> Iterator[LogicalTensor]:
    model = config.model
    for name in ("gate", "up") if model.activation is Activation.swiglu else ("up",):
        yield from _linear_tensors(f"{prefix}.{name}", width, model.hidden_size, scale * model.init_method_std, bias)
    yield from _linear_tensors(f"{prefix}.down", model.hidden_size, width, scale * _residual_std(model), bias)


def _residual_std(model: ModelConfig) -> float:
    """Of matrices that write to the residual stream: GPT-2 (Radford et al. 2019), sec. 2.3."""
    return model.init_method_std / math.sqrt(2 * model.num_layers)


def _block_tensors(config: Config, layer: int, num_experts: int, listed: int | None = None) -> Iterator[LogicalTensor]:
    """Of a layer with `num_experts` (0: a dense one), of which the first `listed` are named; None: all."""
    model, prefix = config.model, f"layers.{layer}"
    hidden, width = model.hidden_size, head_width(model)
    query, kv = width * model.num_attention_heads, width * num_kv_heads(model)
    std, bias = model.init_method_std, model.add_bias_linear
    yield from _norm_tensors(model, f"{prefix}.attention_norm", hidden)
    for name, out_width in (("q", query), ("k", kv), ("v", kv)):
        yield from _linear_tensors(f"{prefix}.attention.{name}", out_width, hidden, std, bias or model.add_qkv_bias)
    if model.qk_layernorm:
        yield from _norm_tensors(model, f"{prefix}.attention.q_norm", width)
        yield from _norm_tensors(model, f"{prefix}.attention.k_norm", width)
    yield from _linear_tensors(f"{prefix}.attention.out", hidden, query, _residual_std(model), bias)
    yield from _norm_tensors(model, f"{prefix}.ffn_norm", hidden)
    if not num_experts:
        yield from _mlp_tensors(config, f"{prefix}.ffn", ffn_width(model), bias)
        return
    yield from _moe_tensors(config, f"{prefix}.moe", num_experts, num_experts if listed is None else listed)


def _moe_tensors(config: Config, prefix: str, num_experts: int, listed: int) -> Iterator[LogicalTensor]:
    moe, hidden, std = config.moe, config.model.hidden_size, config.model.init_method_std
    scale = math.sqrt(moe.moe_init_scale)  # of deviations (Fedus et al. 2021, arXiv 2101.03961, sec. 2.4)
    if learns_routes(moe):
        yield from _linear_tensors(f"{prefix}.router", num_experts, hidden, scale * std, bias=False)
    for expert in range(listed):
        yield from _mlp_tensors(config, f"{prefix}.experts.{expert}", expert_width(config), scale=scale)
    if moe.moe_shared_expert_intermediate_size:
        yield from _mlp_tensors(config, f"{prefix}.shared", moe.moe_shared_expert_intermediate_size)
    if moe.moe_shared_expert_gate:
        yield from _linear_tensors(f"{prefix}.shared_gate", 1, hidden, std, bias=False)
    if moe.moe_use_residual:
        yield from _linear_tensors(f"{prefix}.coefficient", 2, hidden, std, bias=True)


def padded_vocab_size(model: ModelConfig, tensor_parallel_size: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks: each rank has a multiple of make_vocab_size_divisible_by."""
    assert model.vocab_size is not None
    multiple = model.make_vocab_size_divisible_by * tensor_parallel_size
    return -(-model.vocab_size // multiple) * multiple


_ROWS_DIVIDED = ("embedding", "head", "q", "k", "v", "gate", "up")
_COLUMNS_DIVIDED = ("out", "down")


def divided_axis(name: str) -> int | None:
    """The axis along which ranks divide a logical tensor: tensor-parallel ones, or expert-tensor-parallel ones what belongs to a
    layer with experts. None: it is replicated."""
    module, kind = name.split(".")[-2:]
    if module in _ROWS_DIVIDED:
        return 0
    return 1 if module in _COLUMNS_DIVIDED and kind == "weight" else None


@dataclass(frozen=True)
class Shard:
    """The `index`-th of `count` equal parts."""

    index: int = 0
    count: int = 1

    def box(self, tensor: LogicalTensor, padded: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and shape of this part of a tensor, the whole of a replicated one.

        `padded`: length of the divided axis with its padding, which belongs to no box; a part that is all padding has length 0.
        """
        offsets, shape, axis = [0] * len(tensor.shape), list(tensor.shape), divided_axis(tensor.name)
        if axis is not None:
            length, rest = divmod(padded or shape[axis], self.count)
            assert not rest, (tensor.name, padded or shape[axis], self.count)
            offsets[axis] = min(self.index * length, shape[axis])
            shape[axis] = min(length, shape[axis] - offsets[axis])
        return tuple(offsets), tuple(shape)


@dataclass(frozen=True)
class Place:
    """What a rank holds of a layer: its part of the dense matrices, which of the layer's experts, its part of each."""

    tensor: Shard = Shard()
    expert_tensor: Shard = Shard()
    experts: Shard = Shard()

    def shard(self, name: str) -> Shard:
        """This rank's part of a logical tensor, if it is divided."""
        return self.expert_tensor if ".moe." in name else self.tensor


@dataclass(frozen=True)
class Piece:
    """The part of a local parameter that belongs to one logical tensor: `local.view(view).narrow(dim, start, length)`.

    It is the box [offsets, offsets + shape) of the logical tensor.
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    view: tuple[int, ...]
    dim: int
    start: int
    length: int

    @property
    def box(self) -> tuple[slice, ...]:
        """Where it lies in the logical tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))

    def window(self, local: torch.Tensor) -> torch.Tensor:
        """A view of the piece inside a tensor shaped like the local parameter (weight, gradient or moment)."""
        return local.view(self.view).narrow(self.dim, self.start, self.length)

    def read(self, local: torch.Tensor) -> torch.Tensor:
        """The piece in its logical shape."""
        return self.window(local).reshape(self.shape)

    def write(self, local: torch.Tensor, value: torch.Tensor) -> None:
        """Overwrite the piece by a value in its logical shape."""
        window = self.window(local)
        window.copy_(value.reshape(window.shape))


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of the built model and the logical pieces that it holds: none if it is all padding.

    `sharded`: tensor-parallel ranks hold different parts of it. `tied`: the first and the last pipeline stage have a copy each.
    """

    name: str
    parameter: nn.Parameter
    pieces: tuple[Piece, ...]
    sharded: bool = False
    tied: bool = False

    @property
    def weight_decay(self) -> bool:
        """Matrices decay; norms and biases do not."""
        return not self.pieces or len(self.pieces[0].global_shape) > 1


def assemble(parts: Iterable[tuple[Piece, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Logical tensors by name from the pieces of all ranks. Later copies of a piece overwrite earlier ones.

    Raises AssertionError naming a tensor whose pieces do not cover it.
    """
    whole: dict[str, torch.Tensor] = {}
    covered: dict[str, dict[tuple[int, ...], int]] = {}
    for piece, value in parts:
        target = whole.setdefault(piece.name, value.new_empty(piece.global_shape))
        target[piece.box] = value
        covered.setdefault(piece.name, {})[piece.offsets] = value.numel()
    for name, tensor in whole.items():
        assert sum(covered[name].values()) == tensor.numel(), f"the pieces of {name} do not cover it"
    return whole


def _part(tensor: LogicalTensor, place: Place, view: tuple[int, ...], dim: int, start: int, length: int) -> Piece:
    """The piece holding a rank's part of the logical tensor; where it lies in the parameter: see Piece."""
    return Piece(tensor.name, tensor.shape, *place.shard(tensor.name).box(tensor), view, dim, start, length)


def _all(tensor: LogicalTensor, place: Place, shape: tuple[int, ...]) -> Piece:
    """The piece that is a whole parameter of `shape`."""
    return _part(tensor, place, shape, 0, 0, shape[0])


# megatron-core's parameter names within a block, and the logical tensor that each holds whole.
_BLOCK_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "self_attention.linear_proj": "attention.out",
    "pre_mlp_layernorm": "ffn_norm",
    "mlp.linear_fc2": "ffn.down",
    # Transformer Engine fuses each norm into the linear layer behind it.
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "mlp.linear_fc1.layer_norm": "ffn_norm",
}


def block_pieces(config: Config, layer: int, name: str, shape: tuple[int, ...], place: Place) -> tuple[Piece, ...]:
    """Pieces of the block parameter called `name`, of local shape `shape`, in global layer `layer`."""
    model = config.model
    tensors = {t.name: t for t in _block_tensors(config, layer, expert_counts(config).get(layer, 0))}
    if name.startswith("mlp.") and layer in moe_layers(config):
        first = place.experts.index * num_moe_experts(config, layer) // place.experts.count
        return _moe_pieces(config, tensors, f"layers.{layer}.moe", name.removeprefix("mlp."), shape, place, first)
    module, kind = name.rsplit(".", 1)
    if kind.startswith("layer_norm_"):  # TELayerNormColumnParallelLinear: layer_norm_weight, layer_norm_bias
        module, kind = f"{module}.layer_norm", kind.removeprefix("layer_norm_")

    def tensor(short: str) -> LogicalTensor:
        return tensors[f"layers.{layer}.{short}.{kind}"]

    if module == "self_attention.linear_qkv":  # one block of rows per query group: its queries, one key, one value
        groups, width = num_kv_heads(model) // place.tensor.count, head_width(model)
        queries = model.num_attention_heads // num_kv_heads(model)
        view = (groups, queries + 2, width, *shape[1:])
        spans = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}
        return tuple(_part(tensor(f"attention.{part}"), place, view, 1, *span) for part, span in spans.items())
    if module == "mlp.linear_fc1":
        if model.activation is Activation.gelu:
            return (_all(tensor("ffn.up"), place, shape),)
        view = (2, shape[0] // 2, *shape[1:])
        return tuple(_part(tensor(f"ffn.{part}"), place, view, 0, at, 1) for at, part in enumerate(("gate", "up")))
    return (_all(tensor(_BLOCK_NAMES[module]), place, shape),)


# Of the stock layer each expert is a module of its own; ours holds them as stacks.
_WHOLE = {
    "routed.router": "router.weight",
    "routed.deepspeed_moe.gate.wg.weight": "router.weight",
    "shared_gate": "shared_gate.weight",
    "coefficient.weight": "coefficient.weight",
    "coefficient.bias": "coefficient.bias",
}
_STOCK_EXPERT = re.compile(r"routed\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(w1|w2)")


def _moe_pieces(
    config: Config,
    tensors: dict[str, LogicalTensor],
    prefix: str,
    name: str,
    shape: tuple[int, ...],
    place: Place,
    first: int,
) -> tuple[Piece, ...]:
    """Pieces of a parameter of recipes.moe.layer.MoeLayer; the rank's experts are those from `first` on."""
    if name in _WHOLE:
        return (_all(tensors[f"{prefix}.{_WHOLE[name]}"], place, shape),)
    names_w1 = ("gate", "up") if config.model.activation is Activation.swiglu else ("up",)

    def matrices(module: str, kind: str) -> list[LogicalTensor]:
        return [tensors[f"{prefix}.{module}.{part}.weight"] for part in (names_w1 if kind == "w1" else ("down",))]

    if name in ("shared.w1", "shared.w2"):
        kind = name.removeprefix("shared.")
        parts = matrices("shared", kind)
    elif match := _STOCK_EXPERT.fullmatch(name):
        kind = match[2]
        parts = matrices(f"experts.{first + int(match[1])}", kind)
    else:
        kind = {"routed.w1_LGH": "w1", "routed.w2_LHF": "w2"}[name]
        parts = [part for expert in range(shape[0]) for part in matrices(f"experts.{first + expert}", kind)]
    view = (len(parts), *place.expert_tensor.box(parts[0])[1])
    return tuple(_part(part, place, view, 0, at, 1) for at, part in enumerate(parts))


def vocabulary_pieces(tensor: LogicalTensor, shape: tuple[int, ...], place: Place) -> tuple[Piece, ...]:
    """The piece of a rank's rows `shape[0]` of an embedding or head, of which the last ones of all are padding."""
    offsets, kept = place.tensor.box(tensor, padded=shape[0] * place.tensor.count)
    return (Piece(tensor.name, tensor.shape, offsets, kept, shape, 0, 0, kept[0]),) if kept[0] else ()


def norm_pieces(tensor: LogicalTensor) -> tuple[Piece, ...]:
    """The piece of a norm that is no part of a block."""
    return (_all(tensor, Place(), tensor.shape),)


def initial_value(tensor: LogicalTensor, seed: int) -> torch.Tensor:
    """The fp32 start of a logical tensor: a function of (seed, name, shape) only, so that no layout changes it."""
    import torch

    if tensor.init is not None:
        return torch.full(tensor.shape, tensor.init)
    digest = hashlib.sha256(f"{seed}:{tensor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(tensor.shape).normal_(0.0, tensor.std, generator=generator)
