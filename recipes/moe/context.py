"""What all MoE layers of a model share on one rank: the layout, the weights of the auxiliary losses, the step's statistics, the
biases that balance without a loss.

Layers report into it during the forward pass of training; `finish_step` adds the reports up over ranks, once per step.
N layers with experts, E experts; where layers have unlike numbers of them E is the largest, and what is behind a layer's own is 0.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from recipes import collectives
from recipes.config import AuxLossScope, Config, RouterType
from recipes.data.packing import Documents
from recipes.groups import Groups
from recipes.logical import expert_counts
from recipes.moe.balance import AddLoss, balance_part, coefficient, moved_biases, sequence_balance_part, z_part
from recipes.moe.controls import prefix_keys
from recipes.moe.router import Routing
from recipes.topology import Role

_SUMS = ("tokens", "dropped", "entropy", "balance", "z")  # columns behind counts and gates of the E experts


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
        self.layers, self.num_experts = list(expert_counts(config)), list(expert_counts(config).values())
        most, device = max(self.num_experts), collectives.device()
        self.report = torch.zeros(len(self.layers), 2 * most + len(_SUMS), dtype=torch.float64, device=device)
        # Counts of the step before, for the scope global_batch; equal at first.
        self.previous_NE = torch.zeros(len(self.layers), most, dtype=torch.int64, device=device)
        for previous_E in self._of_layers(self.previous_NE):
            previous_E.fill_(1)
        # No part of the model, which may be cast to bf16: the rate would be lost in a bias of 0.5. In fp32 it would be rounded.
        self.bias_NE = torch.zeros(len(self.layers), most, dtype=torch.float64, device=device)
        self.steps = 0  # finished ones, skipped ones too
        self.keys_T: torch.Tensor | None = None  # what routers that learn nothing go by, of this rank's tokens
        self.real_T: torch.Tensor | None = None  # which of these tokens are data; None: all

    def _of_layers(self, values_NE: torch.Tensor) -> list[torch.Tensor]:
        """A view of each layer's own experts."""
        return [values_E[:count] for values_E, count in zip(values_NE, self.num_experts, strict=True)]

    def begin(
        self, tokens_BS: torch.Tensor, documents: Documents | None = None, real_B: torch.Tensor | None = None
    ) -> None:
        """Hear of the next forward pass: token ids, int64 [B, S], whole sequences on every rank; the documents in them, if it
        tells them apart; which sequences are data, where the others only fill up a batch of evaluation."""
        assert real_B is None or not torch.is_grad_enabled(), "in training all sequences are data"
        self.real_T = None if real_B is None else self._own_positions(real_B[:, None].expand(tokens_BS.shape))
        match self.moe.moe_router_type:
            case RouterType.hash:
                self.keys_T = self._own_positions(tokens_BS)
            case RouterType.random:
                self.keys_T = self._own_positions(prefix_keys(tokens_BS, documents))

    def _own_positions(self, values_BS: torch.Tensor) -> torch.Tensor:
        """Of the tokens that this rank routes, in their order: [T]."""
        positions = slice(None)
        if self.tokens_split:
            share = values_BS.shape[1] // self.groups.size(Role.tp)
            positions = slice(self.groups.index(Role.tp) * share, (self.groups.index(Role.tp) + 1) * share)
        return values_BS[:, positions].t().reshape(-1)

    @contextlib.contextmanager
    def again(self, keys_T: torch.Tensor | None) -> Iterator[None]:
        """Around a forward pass that is computed again: no statistics, and the keys of then."""
        now = self.keys_T
        self.recording, self.keys_T = False, keys_T
        try:
            yield
        finally:
            self.recording, self.keys_T = True, now

    def bias(self, layer: int) -> torch.Tensor | None:
        """What is added to the scores of global layer `layer` for the choice: fp32 [E], or None without such biases."""
        if not self.moe.moe_router_enable_expert_bias:
            return None
        row = self.layers.index(layer)
        return self.bias_NE[row, : self.num_experts[row]].float()

    def auxiliary(
        self, out: torch.Tensor, layer: int, routing: Routing, sequence_shape: tuple[int, int]
    ) -> torch.Tensor:
        """Record the routing of one micro-batch in global layer `layer` and attach its auxiliary losses to `out`.

        T = S B tokens in the order of `sequence_shape` (S, B), of which this rank routes all (see `tokens_split`).
        """
        row, moe = self.layers.index(layer), self.moe
        counts_E = routing.counts_E
        weights = [
            coefficient(start, end, moe.moe_loss_coeff_ramp, self.steps + 1)
            for start, end in (
                (moe.moe_aux_loss_coeff, moe.moe_aux_loss_coeff_end),
                (moe.moe_z_loss_coeff, moe.moe_z_loss_coeff_end),
            )
        ]
        with torch.set_grad_enabled(weights[0] != 0):  # a loss that is only recorded needs no backward pass
            balance = self._balance(row, routing, counts_E, sequence_shape)
        with torch.set_grad_enabled(weights[1] != 0):
            z = z_part(routing.logits_TE, self.tokens_per_step)
        self._record(row, counts_E, routing, balance, z)
        if not any(weights):
            return out
        # The engine multiplies the language loss by the number of data-parallel ranks, over which DeepSpeed then averages.
        loss = weights[0] * balance + weights[1] * z
        return AddLoss.apply(out, loss, self.groups.layout.data_parallel_size / self.copies)

    @torch.no_grad()
    def _record(self, row: int, counts_E: torch.Tensor, routing: Routing, balance, z) -> None:
        if not self.reports or not self.recording:
            return
        probs_TE = routing.probs_TE
        sums = [len(probs_TE), routing.dropped, torch.special.entr(probs_TE).sum(), balance, z]
        # Plain numbers are filled in on the device: copying them there would wait for all that it has to do.
        columns = [self.report.new_zeros(()) + value for value in sums]
        by_expert_2E = torch.stack((counts_E.double(), routing.gates_E))
        by_expert_2E = F.pad(by_expert_2E, (0, self.bias_NE.shape[1] - len(counts_E)))
        self.report[row] += torch.cat((by_expert_2E.flatten(), torch.stack(columns)))

    def _balance(
        self, row: int, routing: Routing, counts_E: torch.Tensor, sequence_shape: tuple[int, int]
    ) -> torch.Tensor:
        probs_TE = routing.probs_TE
        match self.moe.aux_loss_scope:
            case AuxLossScope.sequence:
                shape, made = (*sequence_shape, -1), routing.made_TK
                return sequence_balance_part(
                    probs_TE.view(shape),
                    routing.ids_TK.view(shape),
                    self.sequences_per_step,
                    made_SBK=None if made is None else made.view(shape),
                    add_up=self._sum_over_positions,
                )
            case AuxLossScope.micro_batch:
                own = torch.cat((counts_E, counts_E.new_full((1,), len(probs_TE))))
                all_E, tokens = self._sum_over_tokens(own).split((len(counts_E), 1))
                return balance_part(probs_TE, all_E / all_E.sum(), tokens[0]) / self.num_micro_batches
            case AuxLossScope.global_batch:
                previous_E = self.previous_NE[row, : self.num_experts[row]]
                return balance_part(probs_TE, previous_E / previous_E.sum(), self.tokens_per_step)

    def pool(self, values_TE: torch.Tensor, sequence_shape: tuple[int, int]) -> torch.Tensor:
        """The rows of all ranks that route different tokens of a micro-batch, by sample, then position (a collective)."""
        (data, part), (positions, batch) = self._grid(), sequence_shape
        whole = values_TE.new_zeros(data[1], part[1], positions, batch, values_TE.shape[1])
        whole[data[0], part[0]] = values_TE.view(positions, batch, -1)
        return self._sum_over_tokens(whole).permute(0, 3, 1, 2, 4).reshape(-1, values_TE.shape[1])

    def own(self, pool_TE: torch.Tensor, sequence_shape: tuple[int, int]) -> torch.Tensor:
        """This rank's rows of a pool, in the order of `sequence_shape`."""
        (data, part), (positions, batch) = self._grid(), sequence_shape
        whole = pool_TE.view(data[1], batch, part[1], positions, -1)
        return whole[data[0], :, part[0]].transpose(0, 1).reshape(positions * batch, -1)

    def _grid(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Which of how many parts of the samples, and of their positions, this rank routes."""
        groups = self.groups
        part = (groups.index(Role.tp), groups.size(Role.tp)) if self.tokens_split else (0, 1)
        return (groups.index(Role.dp), groups.size(Role.dp)), part

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
        most = self.previous_NE.shape[1]
        counts_NE, gates_NE, sums_NS = report.split((most, most, len(_SUMS)), dim=1)
        sums = dict(zip(_SUMS, sums_NS.t(), strict=True))
        metrics = load_metrics(counts_NE, gates_NE, sums, self.previous_NE, self.num_experts)
        if applied:
            self._learn_from(counts_NE.round().long())
        self.steps += 1
        metrics["load_balancing_loss"] = float(sums["balance"].mean())
        metrics["z_loss"] = float(sums["z"].mean())
        self.report = torch.zeros_like(report)
        return metrics

    def _learn_from(self, counts_NE: torch.Tensor) -> None:
        self.previous_NE = counts_NE
        if self.moe.moe_router_enable_expert_bias:
            for bias_E, counts_E in zip(self._of_layers(self.bias_NE), self._of_layers(counts_NE), strict=True):
                bias_E.copy_(moved_biases(bias_E, counts_E, self.moe.moe_router_bias_update_rate))

    def state(self) -> dict[str, Any]:
        """What a resumed run, or one that only computes, needs, as JSON (which holds fp64 exactly)."""
        kept = {"previous_counts": self.previous_NE, "bias": self.bias_NE}
        by_layer = {name: [row_E.tolist() for row_E in self._of_layers(rows)] for name, rows in kept.items()}
        return by_layer | {"steps": self.steps}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; what is not in it stays as it is."""
        for name, tensor in (("previous_counts", self.previous_NE), ("bias", self.bias_NE)):
            if name in state:
                found = [len(row) for row in state[name]]
                if found != self.num_experts:
                    raise ValueError(f"{name} of {found} experts by layer, the model has {self.num_experts}")
                for row_E, values in zip(self._of_layers(tensor), state[name], strict=True):
                    row_E.copy_(torch.tensor(values, dtype=tensor.dtype))
        self.steps = state.get("steps", self.steps)


def load_metrics(
    counts_NE: torch.Tensor,
    gates_NE: torch.Tensor,
    sums: dict[str, torch.Tensor],
    previous_NE: torch.Tensor,
    num_experts: list[int],
) -> dict[str, Any]:
    """Load per layer and expert. `gates_NE`: sums of gates; `sums` [N]: number of tokens, dropped choices, entropies;
    `num_experts`: how many a layer has, behind which its row is 0.

    `max_vio` = (largest - mean) / mean load of a layer (Wang et al. 2024, arXiv 2408.15664, sec. 3.1), the worst layer's;
    `drop_rate`: dropped / all choices; `router_entropy`: mean over tokens in nats; `gate_mean`: mean over choices, of each expert
    null when nothing chose it or when it is not finite; `routing_change`: part of the choices that would have to go elsewhere for
    the load of the step before, mean over layers; `dead_experts`: without any token.
    """
    experts_N = torch.tensor(num_experts, device=counts_NE.device)
    mean_N = (counts_NE.sum(dim=1) / experts_N).clamp(min=1e-9)
    choices_N = counts_NE.sum(dim=1).clamp(min=1)
    max_vio_N = counts_NE.max(dim=1).values / mean_N - 1
    before_NE = previous_NE / previous_NE.sum(dim=1, keepdim=True).clamp(min=1)
    change_N = 0.5 * (counts_NE / choices_N[:, None] - before_NE).abs().sum(dim=1)
    tokens_per_expert = [row[:count] for row, count in zip(counts_NE.long().tolist(), num_experts, strict=True)]
    gate_mean_per_expert = [
        [round(mean, 6) if math.isfinite(mean) else None for mean in row[:count]]
        for row, count in zip((gates_NE / counts_NE).tolist(), num_experts, strict=True)
    ]
    return {
        "moe/max_vio": float(max_vio_N.max()),
        "moe/drop_rate": float(sums["dropped"].sum() / counts_NE.sum().clamp(min=1)),
        "moe/router_entropy": float((sums["entropy"] / sums["tokens"].clamp(min=1)).mean()),
        "moe/gate_mean": float((gates_NE.sum(dim=1) / choices_N).mean()),
        "moe/routing_change": float(change_N.mean()),
        "moe/dead_experts": sum(row.count(0) for row in tokens_per_expert),
        "moe/tokens_per_expert": tokens_per_expert,
        "moe/gate_mean_per_expert": gate_mean_per_expert,
    }
