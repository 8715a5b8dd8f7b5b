"""One optimizer step on a DeepSpeed engine, in parts: backward, gradient norm, then step or skip.

DeepSpeed computes the norm, clips and updates in one call. To judge a gradient before it is applied, the norm is computed here
first, by the wrapper's own function, and a skipped step takes the wrapper's own way out after an overflow.
"""

from __future__ import annotations

import logging
import math

import deepspeed
import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import logger, safe_get_full_grad
from torch import nn

from recipes import collectives
from recipes.config import Config
from recipes.engine.settings import deepspeed_settings, make_optimizer
from recipes.engine.state import Fragment, applied_steps, fragments, join, prepare_moments, set_applied_steps
from recipes.logical import LocalParameter, logical_tensors
from recipes.model.gpt import GPT
from recipes.topology import Layout


class Engine:
    """A model on a DeepSpeed engine. Call order per step: `backward` once per micro-batch, `gradient_norm`, `step` or `skip`."""

    def __init__(self, model: GPT, parameters: list[LocalParameter], config: Config, data_parallel_size: int):
        logger.setLevel(logging.ERROR)
        deepspeed.init_distributed(
            dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False
        )
        self.model = model
        self.parameters = parameters
        self.clip_grad = config.optimizer.clip_grad
        self.data_parallel_size = data_parallel_size
        self.layout = Layout(data_parallel_size) if model.moe is None else model.moe.layout
        self.expert_group = None if model.moe is None else model.moe.group
        decays = {name: tensor.weight_decay for name, tensor in logical_tensors(config).items()}
        self.optimizer = make_optimizer(config, parameters, decays)
        settings = deepspeed_settings(config, data_parallel_size)
        self.inner, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=settings)
        self.accumulation_steps: int = settings["gradient_accumulation_steps"]
        self.wrapper = self.inner.optimizer
        prepare_moments(self.optimizer)
        self._norm = torch.zeros(())
        self._skipping = False
        self._install_gate()

    def _install_gate(self) -> None:
        """Let `step` use the norm that was already computed, and let `skip` drop the gradients."""
        if isinstance(self.wrapper, DeepSpeedZeroOptimizer):
            self.wrapper.scaled_global_norm = lambda norm_type=2: self._norm
            self.wrapper.check_grad_overflow = True
            self.wrapper.check_overflow = lambda partition_gradients=True: setattr(
                self.wrapper, "overflow", self._skipping
            )
            return
        update = self.wrapper.step

        def gated_step(closure=None):
            if not self._skipping:
                update()
            elif isinstance(self.wrapper, BF16_Optimizer):
                self.wrapper.clear_hp_grads()
                self.wrapper.clear_lp_grads()

        self.wrapper.step = gated_step

    def __call__(self, *args, **kwargs):
        """Forward pass through the engine."""
        return self.inner(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of `loss`: this rank's part of the global loss of the step (parts add up over ranks)."""
        # DeepSpeed averages over data-parallel ranks; the parts are to be summed.
        self.inner.backward(loss * self.data_parallel_size, scale_wrt_gas=False)
        if not self.inner.is_gradient_accumulation_boundary():
            self.inner.step()  # only counts the micro-batch

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Norm of the whole gradient, every logical tensor once, equal on every rank; inf if anything is not finite.

        ZeRO-1/2 give each rank disjoint parts, so one sum over all ranks counts everything once. Without partitions every
        rank has the gradients of its experts and of everything else; only the experts' are summed, over those who share them.
        """
        wrapper = self.wrapper
        if isinstance(wrapper, DeepSpeedZeroOptimizer):
            squares = collectives.sum_over_ranks(_square_sum(self._partitioned_gradients()))
        else:
            squares = _square_sum(self._own_gradients(experts=False))
            if self.expert_group is not None:
                squares += collectives.sum_over_ranks(_square_sum(self._own_gradients(experts=True)), self.expert_group)
            else:
                squares += _square_sum(self._own_gradients(experts=True))
        self._norm = squares.sqrt().float()
        norm = float(self._norm)
        return norm if math.isfinite(norm) else math.inf

    def _partitioned_gradients(self) -> list[torch.Tensor]:
        """This rank's parts of the averaged gradient under ZeRO-1/2; what pads the partitions is zero."""
        if self.wrapper.cpu_offload:
            return [flat.grad for flat in self.wrapper.single_partition_of_fp32_groups]
        return [part for group in self.wrapper.averaged_gradients.values() for part in group]

    def _own_gradients(self, experts: bool) -> list[torch.Tensor]:
        """Whole averaged gradients of this rank's experts, or of all other parameters."""
        members = [e.parameter for e in self.parameters if is_moe_param(e.parameter) is experts]
        if isinstance(self.wrapper, BF16_Optimizer):
            return [parameter._hp_grad for parameter in members]  # type: ignore[attr-defined]
        grads = [parameter.grad for parameter in members]
        assert all(grad is not None for grad in grads), "an idle expert has a zero gradient, not none"
        return grads  # type: ignore[return-value]

    def step(self, lr: float) -> None:
        """Clip and update with learning rate `lr`."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.clip_grad and not isinstance(
            self.wrapper, DeepSpeedZeroOptimizer
        ):  # which clips by the norm given to it
            scale = torch.clamp(self.clip_grad / (self._norm + 1e-6), max=1.0)
            torch._foreach_mul_([*self._own_gradients(experts=False), *self._own_gradients(experts=True)], scale)
        self.inner.step()

    def skip(self) -> None:
        """Drop the accumulated gradients; weights and moments stay as they are."""
        self._skipping = True
        self.inner.step()
        self._skipping = False

    def gradients(self) -> dict[str, torch.Tensor]:
        """The raw fp32 gradient of every logical tensor, between the last `backward` and `step` (a collective)."""
        found = {}
        for entry in self.parameters:
            grad = safe_get_full_grad(entry.parameter).view(entry.parameter.shape).float()
            found.update({piece.name: piece.read(grad).clone() for piece in entry.pieces})
        return found

    def replica_groups(self, entry: LocalParameter) -> list[list[int]]:
        """Ranks that hold the same values of this parameter; of an expert parameter there are several such groups."""
        if is_moe_param(entry.parameter):
            return self.layout.expert_data_parallel_groups()
        return [list(range(self.layout.world_size))]

    def fragment(self, parameter: nn.Parameter) -> Fragment | None:
        """This rank's part of a parameter's master and moments."""
        return fragments(self.optimizer, self.wrapper, parameter)

    def state_names(self) -> tuple[str, ...]:
        """What is kept per parameter: `master`, and the moments of AdamW."""
        group = self.optimizer.param_groups[0]["params"][0]
        return ("master", *(name for name in self.optimizer.state.get(group, {}) if name != "step"))

    def joined_state(self, entry: LocalParameter) -> dict[str, torch.Tensor]:
        """Master and moments of one parameter, whole (a collective: call it for all parameters in the same order)."""
        return join(self.fragment(entry.parameter), entry.parameter, self.state_names())

    @torch.no_grad()
    def load_state(self, entry: LocalParameter, states: dict[str, torch.Tensor]) -> None:
        """Overwrite this rank's part of master and moments from whole fp32 tensors shaped like the parameter."""
        fragment = self.fragment(entry.parameter)
        if fragment is not None:
            for name, target in fragment.states.items():
                target.copy_(states[name].reshape(-1).narrow(0, fragment.start, target.numel()))
        entry.parameter.copy_(states["master"])

    def master_weights(self) -> dict[str, torch.Tensor]:
        """The fp32 master of every logical tensor (a collective)."""
        found = {}
        for entry in self.parameters:
            master = join(self.fragment(entry.parameter), entry.parameter, ("master",))["master"]
            found.update({piece.name: piece.read(master).clone() for piece in entry.pieces})
        return found

    @property
    def applied_steps(self) -> int:
        """Updates made so far."""
        return applied_steps(self.optimizer)

    def set_applied_steps(self, steps: int) -> None:
        """Restore the number of updates made."""
        set_applied_steps(self.optimizer, steps)

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers."""
        self.inner.destroy()
        collectives.barrier()


def _square_sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of all elements, in fp32 per tensor and fp64 over tensors."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=collectives.device())
    norms = torch._foreach_norm([tensor.float() for tensor in tensors])
    return torch.stack(norms).double().square().sum().to(collectives.device())
