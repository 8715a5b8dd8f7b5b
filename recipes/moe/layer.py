"""The MoE layer in place of a block's MLP, in two implementations with the same logical weights.

x_SBH -> (out_SBH, None), as megatron-core's TransformerLayer expects of its MLP. DeepSpeed's engine recognises both by their
base class and treats the parameters marked `allreduce=False` as experts of the group `group_name`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from megatron.core.tensor_parallel import mappings
from torch import nn

from recipes import collectives, partial
from recipes.config import Activation, Config, MoeBackend, Recompute
from recipes.logical import expert_width, learns_routes, num_moe_experts
from recipes.moe.context import MoeContext
from recipes.moe.dispatch import Plan, make_plan, through_experts
from recipes.moe.expert_dropout import mlp_with_dropout
from recipes.moe.experts import GroupedMLP, activate
from recipes.moe.router import Routing, route, router_logits
from recipes.moe.routing import Router
from recipes.moe.rows import combine, gather


class ExpertMLP(nn.Module):
    """One feed-forward network: w1 [G, H] (gate rows, then up rows, when gated), w2 [H, F]; no biases."""

    def __init__(self, hidden: int, width: int, gated: bool, dtype: torch.dtype):
        super().__init__()
        self.gated = gated
        self.w1 = nn.Parameter(torch.empty((2 if gated else 1) * width, hidden, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(hidden, width, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, self.w1)
        return F.linear(activate(h, self.gated), self.w2)


class MoeLayer(nn.Module):
    """What both backends share: which tokens a rank routes, shared expert, auxiliary losses, statistics."""

    def __init__(self, config, run: Config, context: MoeContext, layer: int, **_: object):
        super().__init__()
        self.layer, self.context, self.moe = layer, context, run.moe
        self.layout = context.groups.layout
        gated, dtype, hidden = run.model.activation is Activation.swiglu, config.params_dtype, run.model.hidden_size
        if run.moe.backend is MoeBackend.grouped:
            self.routed: GroupedMoE | StockMoE = GroupedMoE(run, context, layer, gated, dtype)
        else:
            self.routed = StockMoE(run, context, layer, gated, dtype)
        shared = run.moe.moe_shared_expert_intermediate_size
        width = (shared or 0) // self.layout.expert_tensor_parallel_size
        self.shared = ExpertMLP(hidden, width, gated, dtype) if shared else None
        # Weights of the shared expert's output (Qwen1.5-MoE), or of both (PR-MoE; Rajbhandari et al. 2022, arXiv 2201.05596).
        gated_shared = run.moe.moe_shared_expert_gate
        self.shared_gate = nn.Parameter(torch.empty(1, hidden, dtype=dtype)) if gated_shared else None
        residual = run.moe.moe_use_residual
        self.coefficient = nn.utils.skip_init(nn.Linear, hidden, 2, dtype=dtype) if residual else None
        if self.layout.tensor_parallel_size > 1:
            partial.mark(weight for weight in (self.routed.router_weight, self.shared_gate) if weight is not None)
            partial.mark([] if self.coefficient is None else self.coefficient.parameters())
        if self.shared is not None and context.tokens_split:
            partial.mark(self.shared.parameters())

    def forward(self, x_SBH: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        x_SBH = self._enter(x_SBH)
        sequence, batch, hidden = x_SBH.shape
        x_TH = x_SBH.reshape(-1, hidden)
        out_TH, routing = self.routed(x_TH, (sequence, batch))
        if self.training and torch.is_grad_enabled():
            out_TH = self.context.auxiliary(out_TH, self.layer, routing, (sequence, batch))
        return self._leave(self._with_shared(x_SBH, out_TH.view(x_SBH.shape))), None

    def _with_shared(self, x_SBH: torch.Tensor, out_SBH: torch.Tensor) -> torch.Tensor:
        """The chosen experts' output and the shared one's together. Weights of tokens are fp32 as gates are."""
        if self.shared is None:
            return out_SBH
        shared_SBH = self.shared(x_SBH)
        if self.shared_gate is not None:
            gate_SB1 = torch.sigmoid(router_logits(x_SBH, self.shared_gate))
            shared_SBH = shared_SBH * gate_SB1.to(shared_SBH.dtype)
        if self.coefficient is None:
            return out_SBH + shared_SBH
        logits_SB2 = router_logits(x_SBH, self.coefficient.weight) + self.coefficient.bias.float()
        part_SB1, shared_part_SB1 = torch.softmax(logits_SB2, dim=-1).to(out_SBH.dtype).split(1, dim=-1)
        return out_SBH * part_SB1 + shared_SBH * shared_part_SB1

    def _enter(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """The tokens that this rank routes: its share of the positions, or all when it has a part of every expert."""
        if self.context.tokens_split:
            return x_SBH if self.layout.sequence_parallel else mappings.scatter_to_sequence_parallel_region(x_SBH)
        if self.layout.expert_tensor_parallel_size == 1:
            return x_SBH
        if self.layout.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(x_SBH)
        return mappings.copy_to_tensor_model_parallel_region(x_SBH)

    def _leave(self, out_SBH: torch.Tensor) -> torch.Tensor:
        """Back to the positions that the block works on; parts of experts are added up."""
        if self.context.tokens_split:
            if self.layout.sequence_parallel:
                return out_SBH
            return mappings.gather_from_sequence_parallel_region(out_SBH, tensor_parallel_output_grad=False)
        if self.layout.expert_tensor_parallel_size == 1:
            return out_SBH
        if self.layout.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(out_SBH)
        return mappings.reduce_from_tensor_model_parallel_region(out_SBH)


class GroupedMoE(MoE):
    """Our layer: experts as stacks, all-to-all with uneven splits, nothing padded."""

    def __init__(self, run: Config, context: MoeContext, layer: int, gated: bool, dtype: torch.dtype):
        nn.Module.__init__(self)  # not MoE's: it would build DeepSpeed's own layer
        layout, moe, hidden = context.groups.layout, run.moe, run.model.hidden_size
        width = expert_width(run) // layout.expert_tensor_parallel_size
        self.group, self.gated = context.group, gated
        self.choose, self.dropout = Router(run, context, layer), moe.moe_expert_dropout
        selective = run.model.recompute_granularity is Recompute.selective
        self.keep_activation = not (selective and "moe_act" in run.model.recompute_modules)
        self.num_experts, self.ep_size = num_moe_experts(run, layer), layout.expert_parallel_size
        self.num_local_experts = self.num_experts // self.ep_size
        self.expert_group_name = context.groups.expert_key
        learned = learns_routes(moe)
        self.router = nn.Parameter(torch.empty(self.num_experts, hidden, dtype=dtype)) if learned else None
        self.w1_LGH = nn.Parameter(
            torch.empty(self.num_local_experts, (2 if gated else 1) * width, hidden, dtype=dtype)
        )
        self.w2_LHF = nn.Parameter(torch.empty(self.num_local_experts, hidden, width, dtype=dtype))
        for experts in (self.w1_LGH, self.w2_LHF):
            experts.allreduce, experts.group_name = False, self.expert_group_name  # type: ignore[attr-defined]

    @property
    def router_weight(self) -> nn.Parameter | None:
        return self.router

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Called by the engine, which finds the groups under `expert_group_name`: `recipes.groups` has put them there."""
        assert not use_data_before_expert_parallel_

    def forward(self, x_TH: torch.Tensor, sequence_shape: tuple[int, int]) -> tuple[torch.Tensor, Routing]:
        routing, x_TH = self.choose(x_TH, self.router, sequence_shape, self.training)
        plan = make_plan(routing.ids_TK, routing.used_TK, self.num_experts, self.group)
        return through_experts(x_TH, routing.gates_TK, plan, self.group, self._experts), routing

    def _experts(self, x_NH: torch.Tensor, gates_R: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        if self.training and self.dropout:
            x_RH = gather(x_NH, plan.local)
            y_RH = mlp_with_dropout(x_RH, self.w1_LGH, self.w2_LHF, plan.sizes_L, self.gated, self.dropout)
            return combine(y_RH, gates_R, plan.local)
        keep = self.keep_activation and torch.is_grad_enabled()
        stacks = (self.w1_LGH, self.w2_LHF, plan.local, plan.sizes_L, self.gated, keep)
        return GroupedMLP.apply(x_NH, gates_R, *stacks)


class StockMoE(MoE):
    """DeepSpeed's drop-free layer, told not to choose at random, with auxiliary losses computed by us over the whole batch."""

    def __init__(self, run: Config, context: MoeContext, layer: int, gated: bool, dtype: torch.dtype):
        layout = context.groups.layout
        width = expert_width(run) // layout.expert_tensor_parallel_size
        super().__init__(
            run.model.hidden_size,
            ExpertMLP(run.model.hidden_size, width, gated, dtype),
            num_experts=num_moe_experts(run, layer),
            ep_size=layout.expert_parallel_size,
            k=run.moe.moe_router_topk,
            drop_tokens=False,
            min_capacity=0,  # its default of 4 refuses shorter batches, even without dropping
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        self.moe, self.group, self.context = run.moe, context.group, context
        self.deepspeed_moe.gate.wg.to(dtype)
        self.set_deepspeed_parallelism()

    @property
    def router_weight(self) -> nn.Parameter:
        return self.deepspeed_moe.gate.wg.weight

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """As upstream's, on the groups of `recipes.groups`, and callable again by the engine."""
        assert not use_data_before_expert_parallel_
        if self.deepspeed_moe.ep_group is None:
            self._create_process_groups()

    def forward(self, x_TH: torch.Tensor, sequence_shape: tuple[int, int]) -> tuple[torch.Tensor, Routing]:
        out_TH = self._experts(x_TH)
        self.deepspeed_moe.l_aux = None  # its graph would keep model and engine alive for ever
        return out_TH, route(router_logits(x_TH, self.router_weight), self.moe).only(self.context.real_T)

    def _experts(self, x_TH: torch.Tensor) -> torch.Tensor:
        if self.group is None or self.moe.moe_router_topk > 1:
            return super().forward(x_TH)[0]
        # Its top-1 gate bounds the slots of an expert, which all ranks must have alike, by the number of the rank's own
        # tokens: the shorter ranks are filled up with tokens that go to no expert.
        tokens = len(x_TH)
        mine_P = x_TH.new_full((collectives.group_size(self.group),), tokens, dtype=torch.int64)
        most = int(collectives.exchange_equal(mine_P, self.group).max())
        used_T = torch.arange(most, device=x_TH.device) < tokens
        return super().forward(F.pad(x_TH, (0, 0, 0, most - tokens)), used_T.long())[0][:tokens]
