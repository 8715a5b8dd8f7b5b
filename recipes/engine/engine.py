"""One optimizer step on a DeepSpeed engine, in parts: backward, gradient norm, then step or skip.

DeepSpeed computes the norm, clips and updates in one call. To judge a gradient before it is applied, the norm is computed here
first, by the wrapper's own function, and a skipped step takes the wrapper's own way out after an overflow.
"""

from __future__ import annotations

import logging
import os

import torch
from torch import nn

from recipes import collectives
from recipes.config import Config
from recipes.engine.settings import deepspeed_settings, make_optimizer
from recipes.engine.state import Fragment, applied_steps, fragments, join, prepare_moments, set_applied_steps
from recipes.logical import LocalParameter, logical_tensors

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # silences the search for accelerators on import

import deepspeed
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import get_global_norm_of_tensors
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import logger, safe_get_full_grad


class Engine:
    """A model on a DeepSpeed engine. Call order per step: `backward` once per micro-batch, `gradient_norm`, `step` or `skip`."""

    def __init__(self, model: nn.Module, parameters: list[LocalParameter], config: Config, data_parallel_size: int):
        logger.setLevel(logging.ERROR)
        deepspeed.init_distributed(
            dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False
        )
        self.model = model
        self.parameters = parameters
        self.clip_grad = config.optimizer.clip_grad
        self.data_parallel_size = data_parallel_size
        decays = {name: tensor.weight_decay for name, tensor in logical_tensors(config.model).items()}
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
            self._zero_norm = self.wrapper.scaled_global_norm
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
        """Norm of the whole gradient over all logical tensors, equal on every rank; inf if anything is not finite."""
        if isinstance(self.wrapper, DeepSpeedZeroOptimizer):
            self._norm = self._zero_norm()
        elif isinstance(self.wrapper, BF16_Optimizer):
            self._norm = torch.as_tensor(get_global_norm_of_tensors(self.wrapper.get_grads_for_norm()[0]))
        else:
            grads = [entry.parameter.grad for entry in self.parameters if entry.parameter.grad is not None]
            self._norm = torch.nn.utils.get_total_norm([grad.float() for grad in grads])
        norm = float(self._norm)
        return norm if norm >= 0 and norm != float("inf") else float("inf")

    def step(self, lr: float) -> None:
        """Clip and update with learning rate `lr`."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.wrapper is self.optimizer and self.clip_grad:  # fp32 ZeRO-0: DeepSpeed's own clip would repeat the norm
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.clip_grad, self._norm)
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
