"""One layer of experts as ours, DeepSpeed, megatron-core and Hugging Face have it, and the dense network of equal FLOPs.

T tokens, H hidden, F expert width, E experts. All have the same router, and those with GELU experts of two matrices the same
experts, so that they send the same tokens to the same experts. Hugging Face's experts are gated, of three matrices: they are
2/3 as wide, rounded down to a multiple of 8.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from patches.megatron_core.torch_view import torch_view
from recipes.config import Activation, Config
from recipes.topology import Layout


@dataclass(frozen=True)
class Shape:
    """What a layer is asked to do: `tokens` per call, `topk` experts per token, experts of GELU and `ffn` width."""

    experts: int
    tokens: int
    topk: int = 1
    hidden: int = 256
    ffn: int = 1024
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32

    @property
    def gated_ffn(self) -> int:
        """Width of experts of three matrices with as many FLOPs, or up to 1 % fewer."""
        return 2 * self.ffn // 3 // 8 * 8

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and the gradient of the output, [T, H]."""
        generator = torch.Generator().manual_seed(1)
        x_TH, grad_TH = (torch.randn(self.tokens, self.hidden, generator=generator) for _ in range(2))
        return self.place(x_TH), self.place(grad_TH)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Router [E, H], first and second matrices of the experts [E, F, H] and [E, H, F]."""
        generator = torch.Generator().manual_seed(2)
        shapes = (
            (self.experts, self.hidden),
            (self.experts, self.ffn, self.hidden),
            (self.experts, self.hidden, self.ffn),
        )
        return tuple(self.place(0.02 * torch.randn(shape, generator=generator)) for shape in shapes)  # type: ignore[return-value]

    def place(self, value: torch.Tensor) -> torch.Tensor:
        """`value` on the device and of the type that is measured."""
        return value.to(self.device, self.dtype)


@dataclass
class Peer:
    """`call`: x_TH -> out_TH. Parameters of `module` are trained; `ffn`: width of one expert."""

    module: nn.Module
    call: Callable[[torch.Tensor], torch.Tensor]
    ffn: int


@torch.no_grad()
def _fill(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, value in pairs:
        target.copy_(value)


def dense(shape: Shape) -> Peer:
    """One feed-forward network as wide as the experts that a token passes."""
    width = shape.topk * shape.ffn
    up, down = nn.Linear(shape.hidden, width, bias=False), nn.Linear(width, shape.hidden, bias=False)
    module = nn.Sequential(up, nn.GELU(), down).to(shape.device, shape.dtype)
    return Peer(module, module, width)


def ours(shape: Shape) -> Peer:
    """The layer of recipes.moe as a block has it in training, the balance loss with weight 0."""
    from recipes.groups import enter
    from recipes.moe.context import MoeContext
    from recipes.moe.layer import MoeLayer

    config = Config()
    config.model.hidden_size, config.model.activation = shape.hidden, Activation.gelu
    config.model.num_layers, config.model.seq_length = 1, shape.tokens
    config.train.global_batch_size = config.train.micro_batch_size = 1
    moe = config.moe
    moe.num_moe_experts, moe.moe_ffn_hidden_size, moe.moe_router_topk = shape.experts, shape.ffn, shape.topk
    moe.moe_router_pre_softmax, moe.moe_aux_loss_coeff = shape.topk == 1, 0.0
    context = MoeContext(config, enter(Layout(1)))
    layer = MoeLayer(SimpleNamespace(params_dtype=shape.dtype), config, context, 0).to(shape.device)
    router, w1_EFH, w2_EHF = shape.weights()
    _fill([(layer.routed.router_weight, router), (layer.routed.w1_LGH, w1_EFH), (layer.routed.w2_LHF, w2_EHF)])  # type: ignore[list-item]
    return Peer(layer, lambda x_TH: layer(x_TH[:, None])[0].squeeze(1), shape.ffn)


def deepspeed(shape: Shape, drop_free: bool) -> Peer:
    """DeepSpeed's layer, deterministic: drop-free, or with capacity factor 1."""
    from deepspeed.moe.layer import MoE

    from recipes.moe.layer import ExpertMLP

    layer = MoE(
        shape.hidden,
        ExpertMLP(shape.hidden, shape.ffn, False, shape.dtype),
        num_experts=shape.experts,
        k=shape.topk,
        capacity_factor=1.0,
        drop_tokens=not drop_free,
        min_capacity=0,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    layer.set_deepspeed_parallelism()
    layer.to(shape.device)
    router, w1_EFH, w2_EHF = shape.weights()
    _fill([(layer.deepspeed_moe.gate.wg.weight, router)])
    for expert, w1_FH, w2_HF in zip(layer.deepspeed_moe.experts.deepspeed_experts, w1_EFH, w2_EHF, strict=True):
        _fill([(expert.w1, w1_FH), (expert.w2, w2_HF)])
    return Peer(layer, lambda x_TH: layer(x_TH)[0], shape.ffn)


def _let_mcore_run_without_cuda() -> None:
    """Its layer is not ours to correct, so what it needs on a CPU is no patch of the library but done here."""
    from megatron.core.transformer.moe import moe_utils, router

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 reads the name that only Transformer Engine would define
        moe_utils.te_general_gemm = None
    if not torch.cuda.is_available():  # the router moves its weights to the current device
        router.torch = torch_view(torch, cuda={"current_device": lambda: torch.device("cpu")})


def mcore(shape: Shape) -> Peer:
    """megatron-core's MoELayer: experts of Transformer Engine where it is installed, else one after another (SequentialMLP)."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    engine = shape.device.type == "cuda" and moe_utils.HAVE_TE
    _let_mcore_run_without_cuda()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=1,
        ffn_hidden_size=shape.ffn,
        moe_ffn_hidden_size=shape.ffn,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.topk,
        moe_router_pre_softmax=shape.topk == 1,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_grouped_gemm=engine,
        moe_token_dispatcher_type="alltoall" if engine else "allgather",  # the other one wants CUDA streams
        activation_func=F.gelu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        params_dtype=shape.dtype,
        bf16=shape.dtype is torch.bfloat16,
        use_cpu_initialization=shape.device.type == "cpu",
        perform_initialization=False,
    )
    spec = get_moe_module_spec(use_te=engine, num_experts=shape.experts, moe_grouped_gemm=engine)
    layer = build_module(spec, config=config).to(shape.device)
    router, w1_EFH, w2_EHF = shape.weights()
    _fill([(layer.router.weight, router)])
    if engine:  # weight0, weight1, ...
        for e in range(shape.experts):
            _fill([(getattr(layer.experts.linear_fc1, f"weight{e}"), w1_EFH[e])])
            _fill([(getattr(layer.experts.linear_fc2, f"weight{e}"), w2_EHF[e])])
    else:
        for expert, w1_FH, w2_HF in zip(layer.experts.local_experts, w1_EFH, w2_EHF, strict=True):
            _fill([(expert.linear_fc1.weight, w1_FH), (expert.linear_fc2.weight, w2_HF)])
    return Peer(layer, lambda x_TH: layer(x_TH[:, None])[0].squeeze(1), shape.ffn)


def hugging_face(shape: Shape, kind: str) -> Peer:
    """Mixtral's or Qwen3's block of experts, with the grouped matrix products that their models use by default."""
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    common: dict[str, Any] = {"hidden_size": shape.hidden, "num_experts_per_tok": shape.topk}
    if kind == "mixtral":
        config = MixtralConfig(num_local_experts=shape.experts, intermediate_size=shape.gated_ffn, **common)
        block: type[nn.Module] = MixtralSparseMoeBlock
    else:
        config = Qwen3MoeConfig(num_experts=shape.experts, moe_intermediate_size=shape.gated_ffn, **common)  # type: ignore[assignment]
        block = Qwen3MoeSparseMoeBlock
    config._experts_implementation = "grouped_mm"
    layer: Any = block(config).to(shape.device, shape.dtype)
    _fill([(layer.gate.weight, shape.weights()[0])])
    for weight in (layer.experts.gate_up_proj, layer.experts.down_proj):
        nn.init.normal_(weight, std=0.02)
    return Peer(layer, lambda x_TH: layer(x_TH[:, None]).squeeze(1), shape.gated_ffn)


IMPLEMENTATIONS: dict[str, Callable[[Shape], Peer]] = {
    "dense": dense,
    "ours_grouped": ours,
    "deepspeed_drop_free": lambda shape: deepspeed(shape, drop_free=True),
    "deepspeed_cf1": lambda shape: deepspeed(shape, drop_free=False),
    "mcore": mcore,
    "hf_mixtral": lambda shape: hugging_face(shape, "mixtral"),
    "hf_qwen3_moe": lambda shape: hugging_face(shape, "qwen3_moe"),
}


def build(name: str, shape: Shape) -> Peer:
    """An implementation by its name in `IMPLEMENTATIONS`, without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return IMPLEMENTATIONS[name](shape)
