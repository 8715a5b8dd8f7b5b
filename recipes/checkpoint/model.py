"""From a path to a model in one process, from the weights alone.

    run folder | its checkpoints/ | one step_*/ -> find -> Checkpoint -> check_trainer -> GPT with its weights

Optimizer files are not needed and nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from megatron.core import tensor_parallel

from patches.registry import apply_all
from recipes import collectives
from recipes.checkpoint.choose import WEIGHTS, places, sound
from recipes.checkpoint.format import TRAINER, Checkpoint
from recipes.checkpoint.load import load_weights
from recipes.checkpoint.trainer import check_trainer
from recipes.config import Config, TransformerImpl
from recipes.groups import enter
from recipes.launcher import Ranks
from recipes.model.gpt import GPT, registry
from recipes.topology import Layout


def open_model(path: Path, say: Callable[[str], None] = print) -> tuple[GPT, Config, Checkpoint]:
    """The model in evaluation mode on this process's device, the description it was trained by, and its checkpoint.

    `path`: a run folder or its `checkpoints` (the newest step whose weights are complete), or the folder of one step.
    `say` hears why newer steps were passed over. Starts a process group of one when there is none. Raises ValueError
    naming the file when there is no such checkpoint or when its parts do not fit each other.
    """
    checkpoint = find(path, say)
    config = check_trainer(checkpoint)
    config.model.transformer_impl = TransformerImpl.auto  # this machine's, not that of the training
    if not dist.is_initialized():
        _start_alone()
    model = GPT(config).to(collectives.device())
    load_weights(checkpoint, registry(model, config))
    load_biases(model, checkpoint)
    return model.eval(), config, checkpoint


def load_biases(model: GPT, checkpoint: Checkpoint) -> None:
    """Biases of the choice of experts, where a model has some: they are state of the trainer and no weights."""
    if not model.config.moe.moe_router_enable_expert_bias:
        return
    assert model.moe is not None
    try:
        model.moe.load({"bias": checkpoint.trainer["moe"]["bias"]})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{checkpoint.path / TRAINER}: moe.bias: {error!r:.200}; take another step") from error


def find(path: Path, say: Callable[[str], object]) -> Checkpoint:
    """The checkpoint that `path` means (see `open_model`), whose weights and trainer state are as they were written."""
    return sound(places(path), WEIGHTS, say)


def run_folder(checkpoint: Checkpoint) -> Path:
    """The run folder that a checkpoint lies in: RUN/checkpoints/step_N."""
    return checkpoint.path.absolute().parents[1]


def _start_alone() -> None:
    """What megatron-core's blocks need in a process without others."""
    apply_all(say=lambda line: None)
    collectives.start(Ranks())
    enter(Layout(1))
    tensor_parallel.model_parallel_cuda_manual_seed(0)
