"""One optimizer step on a DeepSpeed engine, in parts: backward, gradient norm, then step or skip.

DeepSpeed computes the norm, clips and updates in one call. To judge a gradient before it is applied, the norm is computed here
first, by the wrapper's own function, and a skipped step takes the wrapper's own way out after an overflow.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import logger, safe_get_full_grad
from torch import nn

from recipes import collectives
from recipes.config import Config
from recipes.engine.settings import deepspeed_settings, make_optimizer
from recipes.engine.state import (
    MOMENTS,
    Fragment,
    applied_steps,
    fragments,
    full_shape,
    join,
    prepare_moments,
    set_applied_steps,
)
from recipes.groups import DataParallel
from recipes.logical import LocalParameter, Piece
from recipes.model.gpt import GPT


class Engine:
    """A model on a DeepSpeed engine. Call order per step: `backward` once per micro-batch, `gradient_norm`, `step` or `skip`."""

    def __init__(self, model: GPT, parameters: list[LocalParameter], config: Config):
        logger.setLevel(logging.ERROR)
        self.model = model
        self.parameters = parameters
        self.clip_grad = config.optimizer.clip_grad
        self.groups, self.layout = model.groups, model.groups.layout
        self._copies = {entry.name: self._num_copies(entry) for entry in parameters}
        self.data_parallel_size = self.layout.data_parallel_size
        self.optimizer = make_optimizer(config, parameters, self.layout)
        settings = deepspeed_settings(config, self.layout)
        self.accumulation_steps: int = settings["gradient_accumulation_steps"]
        self.offloaded = "offload_optimizer" in settings["zero_optimization"]
        self.inner = self._initialize(settings)
        self.wrapper = self.inner.optimizer
        prepare_moments(self.optimizer, self.wrapper)
        self._norm = torch.zeros(())
        self._skipping = False
        self._install_gate()

    def _initialize(self, settings: dict[str, Any]) -> Any:
        model, mpu = self.model, DataParallel(self.groups)
        inner = deepspeed.initialize(model=model, optimizer=self.optimizer, config=settings, mpu=mpu)[0]
        tied = model.config.model.share_embeddings_and_output_weights
        if self.layout.zero_stage == 3 and tied and model.embedding is not None and model.head is not None:
            deepspeed.zero.register_external_parameter(model.head.inner, model.embedding.table.weight)
        return inner

    def _install_gate(self) -> None:
        """Let `step` use the norm that was already computed, and let `skip` drop the gradients."""
        if isinstance(self.wrapper, DeepSpeedZeroOptimizer_Stage3):
            self.wrapper._get_norm_groups = lambda: [self._norm]
            self.wrapper._overflow_check_and_loss_scale_update = lambda update_scale=True: setattr(
                self.wrapper, "overflow", self._skipping
            )
            return
        if isinstance(self.wrapper, DeepSpeedZeroOptimizer):
            self.wrapper.scaled_global_norm = lambda norm_type=2: self._norm
            self.wrapper.check_grad_overflow = True
            self.wrapper.check_overflow = lambda partition_gradients=True: setattr(
                self.wrapper, "overflow", self._skipping
            )
            return
        update = self.wrapper.step
        if isinstance(self.wrapper, BF16_Optimizer):
            update = self._step_with_our_norm(self.wrapper)

        def gated_step(closure=None):
            if not self._skipping:
                update()
            elif isinstance(self.wrapper, BF16_Optimizer):
                self.wrapper.clear_hp_grads()
                self.wrapper.clear_lp_grads()

        self.wrapper.step = gated_step

    def _step_with_our_norm(self, wrapper: BF16_Optimizer) -> Callable[[], None]:
        """Its step, without its own norm: that takes a sum per optimizer group, and pipeline stages have not the same groups."""
        update, experts = wrapper.step, wrapper.has_moe_layers
        wrapper.mpu = None
        wrapper.get_grads_for_norm = lambda for_clipping=False: ([self._norm], {})

        def step() -> None:
            wrapper.has_moe_layers = False  # here it only asks for the norm of experts; their reduction needs the truth
            update()
            wrapper.has_moe_layers = experts

        return step

    def accumulate(self, micro_batches: list[dict[str, torch.Tensor]], global_tokens: int) -> torch.Tensor:
        """Accumulate the gradients of this rank's micro-batches (see GPT.stage), `accumulation_steps` of them.

        The loss is the sum over their tokens divided by `global_tokens`, those of all ranks, so that parts add up. Returns the
        sum of the negative log likelihood (fp64; zero on ranks that do not compute it).
        """
        nll = torch.zeros((), dtype=torch.float64, device=collectives.device())
        for inputs in micro_batches:
            nll_B = self(**inputs)
            self.backward(nll_B.sum() / global_tokens)
            nll += nll_B.detach().double().sum()
        return nll

    def __call__(self, *args, **kwargs):
        """Forward pass through the engine."""
        return self.inner(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of `loss`: this rank's part of the global loss of the step (parts add up over ranks)."""
        # DeepSpeed averages over data-parallel ranks; the parts are to be summed.
        self.inner.backward(loss * self.data_parallel_size, scale_wrt_gas=False)
        if not self.inner.is_gradient_accumulation_boundary():
            self.inner.step()  # only counts the micro-batch
        else:
            self._await_host_gradients()

    def _await_host_gradients(self) -> None:
        """Wait until offloaded gradients are in host memory: DeepSpeed copies them there on its own streams and goes on."""
        if self.offloaded:
            get_accelerator().synchronize()

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Norm of the whole gradient, every logical tensor once, equal on every rank; inf if anything is not finite.

        One sum over all ranks, to which each adds what it has, divided by the number of ranks that have the same.
        """
        squares = torch.zeros((), dtype=torch.float64, device=collectives.device())
        for copies, tensors in self._gradient_parts():
            squares += _square_sum(tensors) / copies
        norm_on_device = collectives.sum_over_ranks(squares).sqrt().float()
        norm = float(norm_on_device)
        # Where the gradients are: host tensors cannot be scaled by a number that lies on a device.
        self._norm = norm_on_device.cpu() if self.offloaded else norm_on_device
        return norm if math.isfinite(norm) else math.inf

    def _gradient_parts(self) -> list[tuple[int, list[torch.Tensor]]]:
        """This rank's gradients after the last `backward`, and how many ranks have the same ones."""
        wrapper = self.wrapper
        if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
            groups = self.optimizer.param_groups
            return [
                (groups[wrapper.sub_group_to_group_id[number]]["copies"], self._third_stage_parts(number))
                for number in range(len(wrapper.fp16_groups))
            ]
        if not isinstance(wrapper, DeepSpeedZeroOptimizer):
            own: dict[int, list[torch.Tensor]] = {}
            for entry in self.parameters:
                own.setdefault(self._copies[entry.name], []).append(self._own_gradient(entry.parameter))
            return list(own.items())
        # ZeRO-1/2 divide each parameter group over the ranks that have the same weights; what pads the parts is zero.
        return [(group["copies"], self._partition(number)) for number, group in enumerate(self.optimizer.param_groups)]

    def _partition(self, number: int) -> list[torch.Tensor]:
        """This rank's part of the gradients of a parameter group, with ZeRO-1 or 2."""
        if self.wrapper.cpu_offload:
            return [self.wrapper.single_partition_of_fp32_groups[number].grad]
        return list(self.wrapper.averaged_gradients[number])

    def _third_stage_parts(self, number: int) -> list[torch.Tensor]:
        if self.wrapper.offload_optimizer:
            return [self.wrapper.fp32_partitioned_groups_flat[number].grad]
        return list(self.wrapper.averaged_gradients[number])

    def _own_gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """The whole averaged gradient of a parameter without ZeRO's partitions."""
        grad = parameter._hp_grad if isinstance(self.wrapper, BF16_Optimizer) else parameter.grad  # type: ignore[attr-defined]
        assert grad is not None, "an idle expert has a zero gradient, not none"
        return grad

    def step(self, lr: float) -> None:
        """Clip and update with learning rate `lr`."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        clips = isinstance(self.wrapper, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3)
        if self.clip_grad and not clips:  # those clip by the norm given to them
            scale = torch.clamp(self.clip_grad / (self._norm + 1e-6), max=1.0)
            torch._foreach_mul_([self._own_gradient(entry.parameter) for entry in self.parameters], scale)
        self._take_step()

    def skip(self) -> None:
        """Drop the accumulated gradients; weights and moments stay as they are."""
        self._skipping = True
        self._take_step()
        self._skipping = False

    def _take_step(self) -> None:
        self.inner.step()

    def gradients(self) -> list[tuple[Piece, torch.Tensor]]:
        """The raw fp32 gradient of every piece of this rank, between the last `backward` and `step` (a collective)."""
        found = []
        for entry in self.parameters:
            grad = safe_get_full_grad(entry.parameter).view(full_shape(entry.parameter)).float()
            found += [(piece, piece.read(grad).clone()) for piece in entry.pieces]
        return found

    def _num_copies(self, entry: LocalParameter) -> int:
        """Ranks that hold the same values of this parameter."""
        if is_moe_param(entry.parameter):
            return self.layout.expert_data_parallel_size
        over_tensor = 1 if entry.sharded else self.layout.tensor_parallel_size
        return self.layout.data_parallel_size * over_tensor * (2 if entry.tied else 1)

    def fragment(self, parameter: nn.Parameter) -> Fragment | None:
        """This rank's part of a parameter's master and moments."""
        return fragments(self.optimizer, self.wrapper, parameter)

    def state_names(self) -> tuple[str, ...]:
        """What is kept per parameter: `master`, and the moments of AdamW."""
        return ("master", *(MOMENTS if isinstance(self.optimizer, torch.optim.AdamW) else ()))

    def joined_state(self, entry: LocalParameter) -> dict[str, torch.Tensor]:
        """Master and moments of one parameter, whole (a collective: call it for all parameters in the same order)."""
        return join(self.fragment(entry.parameter), entry.parameter, self.state_names())

    @torch.no_grad()
    def load_state(self, entry: LocalParameter, states: dict[str, torch.Tensor]) -> None:
        """Overwrite this rank's part of the states given from whole fp32 tensors shaped like the parameter; `master` is one."""
        fragment = self.fragment(entry.parameter)
        if fragment is not None:
            for name, state in states.items():
                target = fragment.states[name]
                target.copy_(state.reshape(-1).narrow(0, fragment.start, target.numel()))
        if isinstance(self.wrapper, DeepSpeedZeroOptimizer_Stage3):
            with deepspeed.zero.GatheredParameters([entry.parameter], modifier_rank=0):
                entry.parameter.copy_(states["master"])
        else:
            entry.parameter.copy_(states["master"])

    def master_weights(self) -> list[tuple[Piece, torch.Tensor]]:
        """The fp32 master of every piece of this rank (a collective)."""
        found = []
        for entry in self.parameters:
            master = join(self.fragment(entry.parameter), entry.parameter, ("master",))["master"]
            found += [(piece, piece.read(master).clone()) for piece in entry.pieces]
        return found

    def weights(self) -> list[tuple[Piece, torch.Tensor]]:
        """Every piece of this rank as the model computes with it (a collective)."""
        found = []
        for entry in self.parameters:
            absent = isinstance(self.wrapper, DeepSpeedZeroOptimizer_Stage3)  # while it is not used
            with deepspeed.zero.GatheredParameters([entry.parameter], enabled=absent):
                found += [(piece, piece.read(entry.parameter.detach()).clone()) for piece in entry.pieces]
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
