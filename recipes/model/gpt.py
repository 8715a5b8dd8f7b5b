"""A decoder-only Transformer: embedding, megatron-core blocks, final norm, head, loss.

    tokens_BS -> Embedding -> x_SBH -> Block x L -> FinalNorm -> Head -> logits_SBV -> token losses [S, B] in fp32

V is the true vocabulary: rows that pad the matrices to a round size never enter a logit. Each module tells which logical
tensors its parameters hold (`logical_pieces`), from which weights are drawn, compared and stored.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import nn
from torch.autograd.function import once_differentiable

from recipes.config import Config
from recipes.logical import (
    LocalParameter,
    Piece,
    block_pieces,
    head_width,
    initial_value,
    logical_tensors,
    vocabulary_piece,
)
from recipes.model.blocks import build_norm, layer_spec, rotary_angles, transformer_config
from recipes.moe.context import MoeContext
from recipes.moe.layer import MoeLayer
from recipes.topology import Layout


class Embedding(nn.Module):
    """Token embedding: tokens [B, S] -> [S, B, H]."""

    def __init__(self, config: Config, mcore_config, rows: int):
        super().__init__()
        self.table = VocabParallelEmbedding(
            rows, config.model.hidden_size, init_method=mcore_config.init_method, config=mcore_config
        )
        self.dropout = config.model.hidden_dropout

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_SBH = self.table(tokens_BS).transpose(0, 1).contiguous()
        return F.dropout(x_SBH, self.dropout, self.training) if self.dropout else x_SBH

    def logical_pieces(self, config: Config, name: str, parameter: nn.Parameter) -> tuple[Piece, ...]:
        return vocabulary_piece(logical_tensors(config)["embedding.weight"], tuple(parameter.shape))


class Block(nn.Module):
    """One megatron-core TransformerLayer with its global number."""

    def __init__(self, config: Config, mcore_config, layer: int, moe: MoeContext | None):
        super().__init__()
        self.layer, self.first_expert = layer, 0 if moe is None else moe.first_expert
        spec = layer_spec(config.model, document_mask=config.data.reset_attention_mask)
        if moe is not None and layer in moe.layers:
            spec.submodules.mlp = ModuleSpec(module=MoeLayer, params={"run": config, "context": moe, "layer": layer})
        self.inner = build_module(spec, config=mcore_config, layer_number=layer + 1)

    def forward(self, x_SBH: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self.inner(x_SBH, attention_mask=mask, rotary_pos_emb=angles)[0]

    def logical_pieces(self, config: Config, name: str, parameter: nn.Parameter) -> tuple[Piece, ...]:
        return block_pieces(config, self.layer, name.removeprefix("inner."), tuple(parameter.shape), self.first_expert)


class FinalNorm(nn.Module):
    """The norm before the head."""

    def __init__(self, config: Config, mcore_config):
        super().__init__()
        self.inner = build_norm(mcore_config, config.model.hidden_size, eps=config.model.layernorm_epsilon)

    def forward(self, x_SBH: torch.Tensor) -> torch.Tensor:
        return self.inner(x_SBH)

    def logical_pieces(self, config: Config, name: str, parameter: nn.Parameter) -> tuple[Piece, ...]:
        return vocabulary_piece(logical_tensors(config)[name.replace("inner", "final_norm")], tuple(parameter.shape))


class Head(nn.Module):
    """Logits of the true vocabulary: [S, B, H] -> [S, B, V]; with tied embeddings it owns no weight."""

    def __init__(self, config: Config, mcore_config, rows: int):
        super().__init__()
        self.vocab_size = config.model.vocab_size
        self.inner = ColumnParallelLinear(
            config.model.hidden_size,
            rows,
            config=mcore_config,
            init_method=mcore_config.init_method,
            bias=False,
            gather_output=False,
            skip_weight_param_allocation=config.model.share_embeddings_and_output_weights,
        )

    def forward(self, x_SBH: torch.Tensor, tied_weight: torch.Tensor | None) -> torch.Tensor:
        return self.inner(x_SBH, weight=tied_weight)[0][..., : self.vocab_size]

    def logical_pieces(self, config: Config, name: str, parameter: nn.Parameter) -> tuple[Piece, ...]:
        return vocabulary_piece(logical_tensors(config)["head.weight"], tuple(parameter.shape))


class GPT(nn.Module):
    """The whole model on one rank of a layout, its weights already drawn from (seed, logical name)."""

    def __init__(self, config: Config, layout: Layout | None = None):
        super().__init__()
        assert config.model.vocab_size is not None
        model = config.model
        mcore_config = transformer_config(model, config.train.precision)
        multiple = model.make_vocab_size_divisible_by
        rows = -(-config.model.vocab_size // multiple) * multiple
        self.config = config
        self.moe = MoeContext(config, layout or Layout(1)) if config.moe.num_moe_experts else None
        self.rotary_width = int(head_width(model) * model.rotary_percent)
        self.embedding = Embedding(config, mcore_config, rows)
        self.blocks = nn.ModuleList(Block(config, mcore_config, layer, self.moe) for layer in range(model.num_layers))
        self.final_norm = FinalNorm(config, mcore_config)
        self.head = Head(config, mcore_config, rows)
        initialise(self, config.run.seed)

    def logits(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [S, B, V]. Positions default to 0..S-1; `attention_mask` [B, 1, S, S] is True where not to look, None: causal."""
        positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) if positions_BS is None else positions_BS
        angles = rotary_angles(positions, self.rotary_width, self.config.model.rotary_base)
        x_SBH = self.embedding(tokens_BS)
        for block in self.blocks:
            x_SBH = block(x_SBH, angles, attention_mask)
        tied = self.embedding.table.weight if self.config.model.share_embeddings_and_output_weights else None
        return self.head(self.final_norm(x_SBH), tied)

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor,
        loss_mask_BS: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Negative log likelihood in nats: the fp32 sum over sequences and valid positions, per sequence: [B]."""
        logits_SBV = self.logits(tokens_BS, positions_BS, attention_mask)
        losses_BS = token_losses(logits_SBV, labels_BS)
        return (losses_BS if loss_mask_BS is None else losses_BS * loss_mask_BS).sum(dim=1)


def token_losses(logits_SBV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each position in fp32: [B, S]."""
    sequence, batch, vocab = logits_SBV.shape
    labels_T = labels_BS.transpose(0, 1).reshape(-1)
    return _CrossEntropy.apply(logits_SBV.reshape(-1, vocab), labels_T).view(sequence, batch).transpose(0, 1)


class _CrossEntropy(torch.autograd.Function):
    """F.cross_entropy(reduction="none") whose gradient overwrites the saved log-probabilities: a third less time on CPU."""

    @staticmethod
    def forward(ctx, logits_TV: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        log_probs_TV = torch.log_softmax(logits_TV.float(), dim=-1)
        ctx.save_for_backward(log_probs_TV, labels_T)
        ctx.dtype = logits_TV.dtype
        return -log_probs_TV.gather(1, labels_T[:, None]).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_T: torch.Tensor):
        log_probs_TV, labels_T = ctx.saved_tensors
        grad_TV = log_probs_TV.exp_()
        grad_TV.scatter_add_(1, labels_T[:, None], grad_TV.new_full((len(labels_T), 1), -1.0))
        return grad_TV.mul_(grad_T[:, None]).to(ctx.dtype), None


def registry(model: GPT, config: Config) -> list[LocalParameter]:
    """Every parameter of `model` with the logical pieces that it holds, in forward order, each parameter once."""
    found: list[LocalParameter] = []
    stages: dict[str, Any] = {"embedding": model.embedding}
    stages |= {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    stages |= {"final_norm": model.final_norm, "head": model.head}
    for prefix, module in stages.items():
        for name, parameter in module.named_parameters():
            pieces = module.logical_pieces(config, name, parameter)
            found.append(LocalParameter(f"{prefix}.{name}", parameter, pieces))
    assert {id(entry.parameter) for entry in found} == {id(parameter) for parameter in model.parameters()}
    return found


@torch.no_grad()
def initialise(model: GPT, seed: int) -> None:
    """Draw all weights by logical name; rows that pad the vocabulary are zero."""
    tensors = logical_tensors(model.config)
    for entry in registry(model, model.config):
        entry.parameter.zero_()
        for piece in entry.pieces:
            piece.write(entry.parameter, initial_value(tensors[piece.name], seed))
