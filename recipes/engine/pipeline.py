"""The engine of a pipeline stage: DeepSpeed schedules forward and backward passes over the stages (1F1B), we judge and step.

Only hidden states travel. Every rank reads the whole micro-batch by itself, so that each stage has positions and masks; on any
stage the n-th forward pass of a step is that of the n-th micro-batch.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine as Scheduler
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups

from recipes import collectives
from recipes.engine.engine import Engine
from recipes.groups import DataParallel
from recipes.model.gpt import GPT
from recipes.topology import Role


class Stage(PipelineModule):
    """A GPT stage as the one layer of its pipeline stage."""

    def __init__(self, model: GPT):
        layout = model.groups.layout
        sizes = {"num_pp": layout.pipeline_parallel_size, "num_mp": layout.tensor_parallel_size}
        topology = PipeModelDataParallelTopology(**sizes, num_dp=layout.data_parallel_size)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its topology
            super().__init__([model] * layout.pipeline_parallel_size, topology=topology, partition_method="uniform")
        for role, lists in ((Role.pp, self._grid.pipe_groups), (Role.dp, self._grid.dp_groups)):
            assert sorted(lists) == layout.groups(role), f"DeepSpeed's {role} groups differ"
        self.gpt = (model,)  # a tuple: it is registered as the layer already
        self.micro_batches: Iterator[dict[str, Any]] = iter(())
        self.loss_scale = 0.0
        self.nll = torch.zeros((), dtype=torch.float64, device=collectives.device())

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        """The next micro-batch through this stage: hidden states, or this rank's part of the loss."""
        (model,) = self.gpt
        out = model.stage(None if model.first else received, **next(self.micro_batches))
        if not model.last:
            return out
        self.nll += out.detach().double().sum()
        return out.sum() * self.loss_scale


class PipelineEngine(Engine):
    """`accumulate` runs the whole schedule; `backward` and calls have no meaning here."""

    def _initialize(self, settings: dict[str, Any]) -> Any:
        self.stage = Stage(self.model)
        inner = deepspeed.initialize(model=self.stage, optimizer=self.optimizer, config=settings)[0]
        inner._INSTRUCTION_MAP = {**Scheduler._INSTRUCTION_MAP, schedule.OptimizerStep: lambda engine: None}
        deepspeed_groups.mpu = DataParallel(
            self.groups
        )  # in place of its grid, whose tensor parallelism is not its business
        return inner

    def accumulate(self, micro_batches: list[dict[str, Any]], global_tokens: int) -> torch.Tensor:
        """See Engine.accumulate."""
        stage, inner = self.stage, self.inner
        # DeepSpeed averages over data-parallel ranks and micro-batches; the parts are to be summed.
        stage.loss_scale = self.data_parallel_size * self.accumulation_steps / global_tokens
        stage.micro_batches = iter(micro_batches)
        stage.nll.zero_()
        inner.set_dataiterator((inputs["tokens_BS"], inputs["labels_BS"]) for inputs in micro_batches)
        inner.reset_activation_shape()
        inner.module.train()
        inner._compute_loss, inner.total_loss, inner.total_additional_losses = True, None, None
        inner._exec_schedule(inner._train_schedule())
        self._await_host_gradients()
        self._sum_tied_gradients()
        return stage.nll.clone()

    def _sum_tied_gradients(self) -> None:
        """The embedding and the head's copy of it get the sum of both gradients, each summed over data-parallel ranks before.

        The other way round, DeepSpeed's, the two would be summed over data-parallel ranks in unlike buckets, hence in unlike
        order, and from three ranks on differ in their last bits.
        """
        for gradient in self._tied_gradients():  # in host memory when the optimizer is
            gradient.copy_(collectives.sum_over_ranks(gradient.to(collectives.device()), self.groups.ends))

    def _tied_gradients(self) -> list[torch.Tensor]:
        if not isinstance(self.wrapper, DeepSpeedZeroOptimizer):
            return [self._own_gradient(entry.parameter) for entry in self.parameters if entry.tied]
        groups = enumerate(self.optimizer.param_groups)
        return [part for number, group in groups if group["tied"] for part in self._partition(number)]

    def _take_step(self) -> None:
        self.inner._exec_optimizer_step()

    def close(self) -> None:
        """See Engine.close."""
        # The graphs of losses lead to the weights, on which the engine has hooks: a cycle that no garbage collection sees.
        self.inner.loss = self.inner.total_loss = None
        self.inner.pipe_buffers.clear()
        super().close()
