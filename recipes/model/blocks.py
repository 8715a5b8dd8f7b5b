"""From the model description to megatron-core's TransformerConfig and layer specification.

Shapes: S sequence, B batch, H hidden, N query heads, G key/value heads, D channels per head.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from recipes import partial
from recipes.config import Activation, ModelConfig, Normalization, Precision, TransformerImpl
from recipes.data.packing import Documents
from recipes.logical import ffn_width, head_width, num_kv_heads
from recipes.topology import Layout

# It warns of every MLP that is not its own, such as our layer with experts.
logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)


def transformer_config(model: ModelConfig, precision: Precision, layout: Layout) -> TransformerConfig:
    """megatron-core's description of the same blocks. Weights are left empty: `GPT` fills them by logical name."""
    bf16 = precision is Precision.bf16
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=ffn_width(model),
        num_attention_heads=model.num_attention_heads,
        num_query_groups=num_kv_heads(model),
        kv_channels=head_width(model),
        normalization=model.normalization.name,
        layernorm_epsilon=model.layernorm_epsilon,
        gated_linear_unit=model.activation is Activation.swiglu,
        activation_func=F.silu if model.activation is Activation.swiglu else F.gelu,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_method_std,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        tensor_model_parallel_size=layout.tensor_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        # These fusions need CUDA kernels or change rounding between layouts.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )


def build_norm(config: TransformerConfig, hidden_size: int, eps: float) -> nn.Module:
    """RMSNorm or LayerNorm by megatron-core's arguments."""
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
    if config.sequence_parallel:
        partial.mark(norm.parameters())
    return norm


class Norm(nn.Module):
    """`build_norm` as the class that a layer specification asks for; what it makes is torch's own module."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):  # type: ignore[misc]
        return build_norm(config, hidden_size, eps)


class SdpaAttention(nn.Module):
    """Core attention through `scaled_dot_product_attention`: causal, over whole sequences or each document by itself.

    A document is a call of its own, so that time follows the squares of the documents' lengths, and memory the sequence's.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: object):
        super().__init__()
        self.dropout = config.attention_dropout
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        attention_mask: Documents | None,
        **_: object,
    ) -> torch.Tensor:
        """Attend: [S, B, N D]. megatron-core hands on as `attention_mask` what the block was given: the documents, or None."""
        whole = (query_SBND, key_SBGD, value_SBGD)
        with get_cuda_rng_tracker().fork() if self.training and self.dropout else contextlib.nullcontext():
            if attention_mask is None:
                return self._causal(*whole)
            sequences = zip(*(x.split(1, dim=1) for x in whole), strict=True)
            contexts = []
            for lengths, sequence in zip(attention_mask, sequences, strict=True):
                documents = zip(*(x.split(lengths) for x in sequence), strict=True)
                contexts.append(torch.cat([self._causal(*document) for document in documents]))
            return torch.cat(contexts, dim=1)

    def _causal(self, query_SBND: torch.Tensor, key_SBGD: torch.Tensor, value_SBGD: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBND, key_SBGD, value_SBGD))
        context_BNSD = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        context_SBND = context_BNSD.permute(2, 0, 1, 3)
        return context_SBND.reshape(*context_SBND.shape[:2], -1)


def own_dropout(divided: bool) -> contextlib.AbstractContextManager:
    """Around dropout of hidden states: when they are divided over tensor-parallel ranks by position, each rank draws its own.

    From the common generator all ranks would drop the same channels at positions a share of the sequence apart.
    """
    return get_cuda_rng_tracker().fork() if divided else contextlib.nullcontext()


def divided_bias_dropout_add(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """megatron-core's addition of bias and residual behind dropout, for divided hidden states. (It forks the generator around all
    its layers instead, which `TransformerLayer` by itself leaves to its caller.)"""
    add = get_bias_dropout_add(training, fused)

    def forward(x_with_bias: tuple, residual: torch.Tensor, probability: float) -> torch.Tensor:
        with own_dropout(training and probability > 0):
            return add(x_with_bias, residual, probability)

    return forward


def uses_transformer_engine(model: ModelConfig) -> bool:
    """Whether the blocks are Transformer Engine's: asked for, or wherever CUDA and the package are present."""
    possible = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    if model.transformer_impl is TransformerImpl.transformer_engine and not possible:
        raise ValueError(
            "model.transformer_impl=transformer_engine needs a CUDA device and the package transformer_engine; "
            "use model.transformer_impl=auto or local"
        )
    return possible and model.transformer_impl is not TransformerImpl.local


def layer_spec(
    model: ModelConfig, by_document: bool, sequence_parallel: bool, num_experts: int | None = None
) -> ModuleSpec:
    """Specification of one block. With `by_document` attention is told of documents, which our core attention reads.

    `num_experts`: of a block whose MLP the caller replaces by a layer with experts; its norm before that layer is a module of its
    own, while Transformer Engine's dense MLP contains it.
    """
    spec = _layer_spec(model, by_document, num_experts)
    if sequence_parallel:
        spec.submodules.self_attn_bda = spec.submodules.mlp_bda = divided_bias_dropout_add
    return spec


def _layer_spec(model: ModelConfig, by_document: bool, num_experts: int | None) -> ModuleSpec:
    if uses_transformer_engine(model):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        spec = get_gpt_layer_with_transformer_engine_spec(num_experts, qk_layernorm=model.qk_layernorm)
        if by_document:
            spec.submodules.self_attention.submodules.core_attention = SdpaAttention
        return spec
    rms = model.normalization is Normalization.RMSNorm
    spec = get_gpt_layer_local_spec(normalization="RMSNorm" if rms else None, qk_layernorm=model.qk_layernorm)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = SdpaAttention
    attention.q_layernorm = attention.k_layernorm = Norm if model.qk_layernorm else IdentityOp
    return spec


def rotary_angles(positions: torch.Tensor, width: int, base: float) -> torch.Tensor:
    """Rotation angles of RoPE (Su et al. 2021, arXiv 2104.09864, eq. 15), halves repeated as megatron-core expects.

    `positions` [S] or [B, S]; returns [S, 1 or B, 1, width] in fp32.
    """
    inverse = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width)
    angles = positions.to(torch.float32)[..., None] * inverse
    angles = torch.cat((angles, angles), dim=-1)
    return angles[:, None, None, :] if positions.dim() == 1 else angles.transpose(0, 1)[:, :, None, :]
