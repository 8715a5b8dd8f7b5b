"""A decoder-only Transformer: embedding, megatron-core blocks, final norm, head, loss.

    tokens_BS -> Embedding -> x_SBH -> Block x L -> FinalNorm -> Head -> logits_SBV -> token losses [S, B] in fp32

V is the true vocabulary: rows that pad the matrices to a round size never enter a logit. Tensor-parallel ranks hold parts of
the matrices (and of V), and with sequence parallelism each its share of S between them. Each module tells which logical tensors
its parameters hold (`logical_pieces`), from which weights are drawn, compared and stored.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding, mappings
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import nn

from recipes import collectives, partial
from recipes.config import Config, Recompute
from recipes.data.packing import Documents
from recipes.groups import enter
from recipes.logical import (
    LocalParameter,
    Piece,
    Place,
    Shard,
    block_pieces,
    expert_counts,
    head_width,
    initial_value,
    logical_tensors,
    norm_pieces,
    padded_vocab_size,
    stage_layers,
    vocabulary_pieces,
)
from recipes.model.blocks import build_norm, layer_spec, own_dropout, rotary_angles, transformer_config
from recipes.model.complete import check_complete
from recipes.model.loss import token_losses
from recipes.model.recompute import NormOutputs, recompute_module, recomputed
from recipes.moe.context import MoeContext
from recipes.moe.layer import MoeLayer
from recipes.topology import Layout, Role


class Embedding(nn.Module):
    """Token embedding: tokens [B, S] -> [S, B, H]."""

    def __init__(self, config: Config, mcore_config, rows: int):
        super().__init__()
        self.sequence_parallel = mcore_config.sequence_parallel
        self.table = VocabParallelEmbedding(
            rows,
            config.model.hidden_size,
            init_method=mcore_config.init_method,
            reduce_scatter_embeddings=self.sequence_parallel,
            config=mcore_config,
        )
        self.dropout = config.model.hidden_dropout

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens_BS)
        x_SBH = x if self.sequence_parallel else x.transpose(0, 1).contiguous()
        if not self.dropout:
            return x_SBH
        with own_dropout(self.sequence_parallel and self.training):
            return F.dropout(x_SBH, self.dropout, self.training)

    def logical_pieces(self, config: Config, name: str, parameter: nn.Parameter, place: Place) -> tuple[Piece, ...]:
        return vocabulary_pieces(logical_tensors(config)["embedding.weight"], tuple(parameter.shape), place)


class Block(nn.Module):
    """One megatron-core TransformerLayer with its global number."""

    def __init__(self, config: Config, mcore_config, layer: int, moe: MoeContext | None):
        super().__init__()
        self.layer = layer
        num_experts = expert_counts(config).get(layer)
        spec = layer_spec(config.model, config.data.reset_attention_mask, mcore_config.sequence_parallel, num_experts)
        if num_experts is not None:
            assert moe is not None
            spec.submodules.mlp = ModuleSpec(module=MoeLayer, params={"run": config, "context": moe, "layer": layer})
        self.inner = build_module(spec, config=mcore_config, layer_number=layer + 1)
        self.moe = (moe,)  # a tuple: it is no module of the block
        self._choose_recomputation(config)
        if config.model.qk_layernorm and mcore_config.tensor_model_parallel_size > 1:  # fed with this rank's heads
            partial.mark(self.inner.self_attention.q_layernorm.parameters())
            partial.mark(self.inner.self_attention.k_layernorm.parameters())

    def _choose_recomputation(self, config: Config) -> None:
        granularity, modules = config.model.recompute_granularity, config.model.recompute_modules
        selective = granularity is Recompute.selective
        self.recomputes = granularity is Recompute.full
        self.norm_outputs = None
        if selective and "core_attn" in modules:
            recompute_module(self.inner.self_attention.core_attention, *self.moe)
        if selective and ("moe" if isinstance(self.inner.mlp, MoeLayer) else "mlp") in modules:
            recompute_module(self.inner.mlp, *self.moe)
        if selective and "layernorm" in modules:
            self.norm_outputs = NormOutputs([self.inner.input_layernorm, self.inner.pre_mlp_layernorm])

    def forward(self, x_SBH: torch.Tensor, angles: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        if self.recomputes:
            return recomputed(self._layer, *self.moe, x_SBH, angles, documents)
        if self.norm_outputs is None:
            return self._layer(x_SBH, angles, documents)
        with self.norm_outputs():
            return self._layer(x_SBH, angles, documents)

    def _layer(self, x_SBH: torch.Tensor, angles: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        return self.inner(x_SBH, attention_mask=documents, rotary_pos_emb=angles)[0]

    def logical_pieces(self, config: Config, name: str, parameter: nn.Parameter, place: Place) -> tuple[Piece, ...]:
        return block_pieces(config, self.layer, name.removeprefix("inner."), tuple(parameter.shape), place)


class FinalNorm(nn.Module):
    """The norm before the head."""

    def __init__(self, config: Config, mcore_config):
        super().__init__()
        self.inner = build_norm(mcore_config, config.model.hidden_size, eps=config.model.layernorm_epsilon)

    def forward(self, x_SBH: torch.Tensor) -> torch.Tensor:
        return self.inner(x_SBH)

    def logical_pieces(self, config: Config, name: str, parameter: nn.Parameter, place: Place) -> tuple[Piece, ...]:
        return norm_pieces(logical_tensors(config)[name.replace("inner", "final_norm")])


class VocabularyLinear(ColumnParallelLinear):
    """[S, B, H] -> logits [S, B, V of this rank], or with labels [B, S] losses [B, S], without all logits at once.

    Only of `rows` rows; what the weights have beyond is padding.
    """

    def forward(self, x_SBH, weight_VH, rows: int, labels_BS=None, first_row: int = 0, group=None):  # type: ignore[override]
        weight_VH = self.weight if weight_VH is None else weight_VH
        if labels_BS is None:
            return super().forward(x_SBH, weight=weight_VH)[0][..., :rows]
        if self.sequence_parallel:
            x_SBH = mappings.gather_from_sequence_parallel_region(x_SBH)
        else:
            x_SBH = mappings.copy_to_tensor_model_parallel_region(x_SBH)
        used_VH = weight_VH if rows == len(weight_VH) else weight_VH[:rows]
        return token_losses(x_SBH, used_VH, labels_BS, first_row, group)


class Head(nn.Module):
    """Logits of the true vocabulary or, with labels, losses: see VocabularyLinear; beside the embedding that it is tied to it owns
    no weight.

    A tensor-parallel rank has the logits of its rows, which may be fewer on the last ranks, even none.
    """

    def __init__(self, config: Config, mcore_config, rows: int, owns_weight: bool):
        super().__init__()
        self.config = config
        self.inner = VocabularyLinear(
            config.model.hidden_size,
            rows,
            config=mcore_config,
            init_method=mcore_config.init_method,
            bias=False,
            gather_output=False,
            skip_weight_param_allocation=not owns_weight,
        )

    def forward(
        self,
        x_SBH: torch.Tensor,
        tied_weight: torch.Tensor | None,
        first_row: int,
        labels_BS: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        assert self.config.model.vocab_size is not None
        rows = min(max(0, self.config.model.vocab_size - first_row), self.inner.output_size_per_partition)
        return self.inner(x_SBH, tied_weight, rows, labels_BS, first_row, group)

    def logical_pieces(self, config: Config, name: str, parameter: nn.Parameter, place: Place) -> tuple[Piece, ...]:
        tied = config.model.share_embeddings_and_output_weights
        tensor = logical_tensors(config)["embedding.weight" if tied else "head.weight"]
        return vocabulary_pieces(tensor, tuple(parameter.shape), place)


class GPT(nn.Module):
    """What a rank of a layout holds of the model, its weights already drawn from (seed, logical name).

    Without pipeline parallelism that is every layer. A stage has some of them, the first also the embedding, the last the norm
    and the head; a head tied to the embedding of another stage has a copy of its weights.
    """

    def __init__(self, config: Config, layout: Layout | None = None):
        super().__init__()
        assert config.model.vocab_size is not None
        model = config.model
        self.groups = enter(layout or Layout(1))
        layout = self.groups.layout
        mcore_config = transformer_config(model, config.train.precision, layout)
        rows = padded_vocab_size(model, layout.tensor_parallel_size)
        self.config = config
        self.first_row = rows // layout.tensor_parallel_size * self.groups.index(Role.tp)
        self.moe = MoeContext(config, self.groups) if config.moe.has_experts else None
        self.rotary_width = int(head_width(model) * model.rotary_percent)
        stage, stages = self.groups.index(Role.pp), layout.pipeline_parallel_size
        self.first, self.last = stage == 0, stage == stages - 1
        layers = stage_layers(config, stages)[stage]
        self.embedding = Embedding(config, mcore_config, rows) if self.first else None
        self.blocks = nn.ModuleList(Block(config, mcore_config, layer, self.moe) for layer in layers)
        self.final_norm = FinalNorm(config, mcore_config) if self.last else None
        owns_weight = not (model.share_embeddings_and_output_weights and self.first)
        self.head = Head(config, mcore_config, rows, owns_weight) if self.last else None
        partial.add_up(self, self.groups)
        check_complete(config, self.groups, registry(self, config))
        initialise(self, config.run.seed)

    def hidden(
        self,
        x_SBH: torch.Tensor | None,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor | None = None,
        documents: Documents | None = None,
        real_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states after this stage's blocks, from those of the stage before; the first stage needs none.

        Positions default to 0..S-1. `documents`: the lengths of those in each sequence, within which tokens attend and are
        routed by chance; None: one each. `real_B`: which sequences are data, which no other may touch (without gradients);
        None: all.
        """
        positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) if positions_BS is None else positions_BS
        angles = rotary_angles(positions, self.rotary_width, self.config.model.rotary_base)
        if self.moe is not None:
            self.moe.begin(tokens_BS, documents, real_B)
        if self.embedding is not None:
            x_SBH = self.embedding(tokens_BS)
        for block in self.blocks:
            x_SBH = block(x_SBH, angles, documents)
        assert x_SBH is not None
        return x_SBH

    def project(self, x_SBH: torch.Tensor, labels_BS: torch.Tensor | None = None) -> torch.Tensor:
        """From the hidden states after the last block: logits [S, B, V of this rank], or with labels losses [B, S]."""
        assert self.final_norm is not None and self.head is not None
        tied = self.embedding is not None and self.config.model.share_embeddings_and_output_weights
        weight = self.embedding.table.weight if tied else None  # type: ignore[union-attr]
        return self.head(self.final_norm(x_SBH), weight, self.first_row, labels_BS, self.groups.handle(Role.tp))

    def logits(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor | None = None,
        documents: Documents | None = None,
        real_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [S, B, V of this rank] of a model in one stage; see `hidden` for the inputs."""
        return self.project(self.hidden(None, tokens_BS, positions_BS, documents, real_B))

    def stage(
        self,
        x_SBH: torch.Tensor | None,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor,
        loss_mask_BS: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        documents: Documents | None = None,
        real_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states for the next stage; of the last stage the negative log likelihood in nats: the fp32 sum over valid
        positions, per sequence: [B], 0 of one that is no data."""
        x_SBH = self.hidden(x_SBH, tokens_BS, positions_BS, documents, real_B)
        if not self.last:
            return x_SBH
        losses_BS = self.project(x_SBH, labels_BS)
        losses_B = (losses_BS if loss_mask_BS is None else losses_BS * loss_mask_BS).sum(dim=1)
        return losses_B if real_B is None else losses_B.where(real_B, 0.0)

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor,
        loss_mask_BS: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        documents: Documents | None = None,
        real_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The negative log likelihood per sequence, [B]; see `stage` for the inputs.

        Through a pipeline without gradients only (training is scheduled by the engine); all but the last stage return zeros.
        """
        inputs = (tokens_BS, labels_BS, loss_mask_BS, positions_BS, documents, real_B)
        if self.first and self.last:
            return self.stage(None, *inputs)
        assert not torch.is_grad_enabled()
        ranks, place = self.groups.layout.group_of(Role.pp, self.groups.rank), self.groups.index(Role.pp)
        batch, sequence = tokens_BS.shape
        if self.groups.layout.sequence_parallel:
            sequence //= self.groups.size(Role.tp)
        x_SBH = None
        if not self.first:
            shape = (sequence, batch, self.config.model.hidden_size)
            x_SBH = collectives.receive(shape, next(self.parameters()).dtype, ranks[place - 1])
        out = self.stage(x_SBH, *inputs)
        if self.last:
            return out
        collectives.send(out, ranks[place + 1])
        return torch.zeros(batch, device=tokens_BS.device)


def registry(model: GPT, config: Config) -> list[LocalParameter]:
    """Every parameter of `model` with the logical pieces that it holds, in forward order, each parameter once."""
    found: list[LocalParameter] = []
    layout, groups = model.groups.layout, model.groups
    place = Place(
        Shard(groups.index(Role.tp), layout.tensor_parallel_size),
        Shard(groups.index(Role.etp), layout.expert_tensor_parallel_size),
        Shard(groups.index(Role.ep), layout.expert_parallel_size),
    )
    modules: dict[str, Any] = {"embedding": model.embedding}
    modules |= {f"blocks.{block.layer}": block for block in model.blocks}
    modules |= {"final_norm": model.final_norm, "head": model.head}
    ends = (model.embedding, model.head)
    tied = config.model.share_embeddings_and_output_weights and layout.pipeline_parallel_size > 1
    for prefix, module in ((prefix, module) for prefix, module in modules.items() if module is not None):
        for name, parameter in module.named_parameters():
            pieces = module.logical_pieces(config, name, parameter, place)
            # Of a small vocabulary one rank may have all true rows, and others padding.
            parts = module in ends or any(p.shape != p.global_shape for p in pieces)
            sharded = parts and place.tensor.count > 1
            found.append(LocalParameter(f"{prefix}.{name}", parameter, pieces, sharded, tied and module in ends))
    assert {id(entry.parameter) for entry in found} == {id(parameter) for parameter in model.parameters()}
    return found


@torch.no_grad()
def initialise(model: GPT, seed: int) -> None:
    """Draw all weights by logical name; rows that pad the vocabulary are zero."""
    tensors = logical_tensors(model.config)
    for entry in registry(model, model.config):
        entry.parameter.zero_()
        for piece in entry.pieces:
            piece.write(entry.parameter, initial_value(tensors[piece.name], seed)[piece.box])
