"""What all MoE layers of a model share on one rank: the layout, the weights of the auxiliary losses, the step's statistics, the
biases that balance without a loss.

Layers report into it during the forward pass of training; `finish_step` adds the reports up over ranks, once per step.
N layers with experts, E experts.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes import collectives
from recipes.config import AuxLossScope, Config
from recipes.groups import Groups
from recipes.logical import moe_layers, num_moe_experts
from recipes.moe.balance import AddLoss, balance_part, bias_change, coefficient, sequence_balance_part, z_part
from recipes.topology import Role

_SUMS = ("tokens", "dropped", "entropy", "balance", "z")  # columns behind the E counts


class MoeContext:
    """Made before the model and passed to its layers."""

    def __init__(self, config: Config, groups: Groups):
        self.moe, self.groups = config.moe, groups
        layout, train = groups.layout, config.train
        self.group = groups.handle(Role.ep)
        # Under tensor parallelism the ranks of a group route each its share of the sequence positions, unless each has a part
        # of every expert's matrices: then all of them route all the tokens, and a loss or count of a token must enter once.
        self.tokens_split = layout.tensor_parallel_size > layout.expert_tensor_parallel_size
        self.copies = 1 if self.tokens_split else layout.tensor_parallel_size
        self.recording = True  # not while activations are computed again
        self.reports = self.copies == 1 or groups.index(Role.tp) == 0
        self.num_micro_batches = max(1, train.global_batch_size // (train.micro_batch_size * layout.data_parallel_size))
        self.sequences_per_step = train.global_batch_size
        self.tokens_per_step = train.global_batch_size * config.model.seq_length
        self.layers = moe_layers(config)
        num_experts = num_moe_experts(config)
        self.first_expert = groups.index(Role.ep) * num_experts // layout.expert_parallel_size
        shape = (len(self.layers), num_experts + len(_SUMS))
        self.report = torch.zeros(shape, dtype=torch.float64, device=collectives.device())
        # Counts of the step before, for the scope global_batch; equal at first.
        self.previous_NE = torch.ones(len(self.layers), num_experts, dtype=torch.int64, device=self.report.device)
        # No part of the model, which may be cast to bf16: the rate would be lost in a bias of 0.5.
        self.bias_NE = torch.zeros(len(self.layers), num_experts, dtype=torch.float32, device=self.report.device)
        self.steps = 0  # finished ones, skipped ones too

    def bias(self, layer: int) -> torch.Tensor | None:
        """What is added to the scores of global layer `layer` for the choice: fp32 [E], or None without such biases."""
        return self.bias_NE[self.layers.index(layer)] if self.moe.moe_router_enable_expert_bias else None

    def auxiliary(
        self, out: torch.Tensor, layer: int, logits_TE: torch.Tensor, probs_TE: torch.Tensor, ids_TK: torch.Tensor,
        dropped: torch.Tensor | int, sequence_shape: tuple[int, int],
    ) -> torch.Tensor:  # fmt: skip
        """Record the routing of one micro-batch in global layer `layer` and attach its auxiliary losses to `out`.

        T = S B tokens in the order of `sequence_shape` (S, B), of which this rank routes all (see `tokens_split`).
        """
        row, moe = self.layers.index(layer), self.moe
        num_experts = probs_TE.shape[1]
        counts_E = torch.bincount(ids_TK.reshape(-1), minlength=num_experts)
        balance = self._balance(row, probs_TE, ids_TK, counts_E, sequence_shape)
        z = z_part(logits_TE, self.tokens_per_step)
        weights = [
            coefficient(start, end, moe.moe_loss_coeff_ramp, self.steps + 1)
            for start, end in (
                (moe.moe_aux_loss_coeff, moe.moe_aux_loss_coeff_end),
                (moe.moe_z_loss_coeff, moe.moe_z_loss_coeff_end),
            )
        ]
        loss = weights[0] * balance + weights[1] * z
        self._record(row, counts_E, probs_TE, dropped, balance, z)
        # The engine multiplies the language loss by the number of data-parallel ranks, over which DeepSpeed then averages.
        return AddLoss.apply(out, loss, self.groups.layout.data_parallel_size / self.copies)

    @torch.no_grad()
    def _record(self, row: int, counts_E, probs_TE, dropped: torch.Tensor | int, balance, z) -> None:
        if not self.reports or not self.recording:
            return
        entropy = torch.special.entr(probs_TE).sum()
        sums = [len(probs_TE), dropped, entropy, balance, z]
        columns = [torch.as_tensor(value, dtype=torch.float64, device=self.report.device) for value in sums]
        self.report[row] += torch.cat((counts_E.double(), torch.stack(columns)))

    def _balance(self, row: int, probs_TE, ids_TK, counts_E, sequence_shape: tuple[int, int]) -> torch.Tensor:
        match self.moe.aux_loss_scope:
            case AuxLossScope.sequence:
                shape = (*sequence_shape, -1)
                probs, ids = probs_TE.view(shape), ids_TK.view(shape)
                return sequence_balance_part(probs, ids, self.sequences_per_step, add_up=self._sum_over_positions)
            case AuxLossScope.micro_batch:
                all_E = self._sum_over_tokens(counts_E.clone())
                assignments = all_E.sum()
                tokens = assignments / ids_TK.shape[1]
                return balance_part(probs_TE, all_E / assignments, tokens) / self.num_micro_batches
            case AuxLossScope.global_batch:
                previous_E = self.previous_NE[row]
                return balance_part(probs_TE, previous_E / previous_E.sum(), self.tokens_per_step)

    def _sum_over_tokens(self, value: torch.Tensor) -> torch.Tensor:
        """Over ranks that route different tokens in the same layer."""
        group = self.groups.stage if self.copies == 1 else self.groups.handle(Role.dp)
        return value if group is None else collectives.sum_over_ranks(value, group)

    def _sum_over_positions(self, value: torch.Tensor) -> torch.Tensor:
        """Over ranks that route the other positions of the same sequences."""
        return collectives.sum_over_ranks(value, self.groups.handle(Role.tp)) if self.tokens_split else value

    def finish_step(self, applied: bool = True) -> dict[str, Any]:
        """Metrics of the step over all ranks; forgets it afterwards (a collective).

        Only steps whose update was `applied` change what later ones depend on: the counts of the step before, the biases.
        """
        # A model that one rank has for itself has nothing to add up, however many ranks there are.
        alone = self.groups.layout.world_size == 1
        report = self.report if alone else collectives.sum_over_ranks(self.report)
        num_experts = self.previous_NE.shape[1]
        counts_NE, sums = report[:, :num_experts], dict(zip(_SUMS, report[:, num_experts:].t(), strict=True))
        if applied:
            self._learn_from(counts_NE.round().long())
        self.steps += 1
        metrics = load_metrics(counts_NE, sums["tokens"], sums["dropped"], sums["entropy"])
        metrics["load_balancing_loss"] = float(sums["balance"].mean())
        metrics["z_loss"] = float(sums["z"].mean())
        self.report = torch.zeros_like(report)
        return metrics

    def _learn_from(self, counts_NE: torch.Tensor) -> None:
        self.previous_NE = counts_NE
        if self.moe.moe_router_enable_expert_bias:
            self.bias_NE += bias_change(counts_NE, self.moe.moe_router_bias_update_rate)

    def state(self) -> dict[str, Any]:
        """What a resumed run, or one that only computes, needs, as JSON (which holds fp32 exactly)."""
        return {"previous_counts": self.previous_NE.tolist(), "bias": self.bias_NE.tolist(), "steps": self.steps}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; what is not in it stays as it is."""
        for name, tensor in (("previous_counts", self.previous_NE), ("bias", self.bias_NE)):
            if name in state:
                value = torch.tensor(state[name], dtype=tensor.dtype)
                if value.shape != tensor.shape:
                    raise ValueError(f"{name} of shape {list(value.shape)}, the model has {list(tensor.shape)}")
                tensor.copy_(value)
        self.steps = state.get("steps", self.steps)


def load_metrics(counts_NE: torch.Tensor, tokens_N, dropped_N, entropy_N) -> dict[str, Any]:
    """Load per layer and expert.

    `max_vio` = (largest - mean) / mean load of a layer (Wang et al. 2024, arXiv 2408.15664, sec. 3.1), the worst layer's;
    `drop_rate`: dropped / all assignments; `router_entropy`: mean over tokens in nats; `dead_experts`: without any token.
    """
    mean_N = counts_NE.mean(dim=1).clamp(min=1e-9)
    max_vio_N = counts_NE.max(dim=1).values / mean_N - 1
    metrics: dict[str, Any] = {
        "moe/max_vio": float(max_vio_N.max()),
        "moe/drop_rate": float(dropped_N.sum() / counts_NE.sum().clamp(min=1)),
        "moe/router_entropy": float((entropy_N / tokens_N.clamp(min=1)).mean()),
        "moe/dead_experts": int((counts_NE == 0).sum()),
        "moe/tokens_per_expert": counts_NE.long().tolist(),
    }
    return metrics
