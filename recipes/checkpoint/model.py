"""From a path to a model in one process, from the weights alone.

    run folder | its checkpoints/ | one step_*/ -> find -> Checkpoint -> stored_config -> GPT with its weights

Optimizer files are not needed and nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from megatron.core import tensor_parallel

from patches.registry import apply_all
from recipes import collectives
from recipes.checkpoint.format import MANIFEST, TRAINER, Checkpoint, open_checkpoint
from recipes.checkpoint.load import load_weights
from recipes.checkpoint.manifest import TRAINER_KIND
from recipes.checkpoint.rotate import find_checkpoint
from recipes.config import Config
from recipes.description import check_description
from recipes.groups import enter
from recipes.logical import logical_tensors
from recipes.model.gpt import GPT, registry
from recipes.topology import Layout


def open_model(path: Path, say: Callable[[str], None] = print) -> tuple[GPT, Config, Checkpoint]:
    """The model in evaluation mode on this process's device, the description it was trained by, and its checkpoint.

    `path`: a run folder or its `checkpoints` (the newest step whose weights are complete), or the folder of one step.
    `say` hears why newer steps were passed over. Starts a process group of one when there is none. Raises ValueError
    naming the file when there is no such checkpoint or when its parts do not fit each other.
    """
    checkpoint = find(path, say)
    config = stored_config(checkpoint)
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


def find(path: Path, say: Callable[[str], None]) -> Checkpoint:
    """The checkpoint that `path` means (see `open_model`), of which weights and trainer state are there."""
    kinds = ("model", TRAINER_KIND)
    if (path / MANIFEST).exists():
        checkpoint = open_checkpoint(path)
        checkpoint.require(*kinds)
        return checkpoint
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found, skipped = find_checkpoint(folder, kinds=kinds)
    for reason in skipped:
        say(f"passed over: {reason}")
    if found is None:
        raise ValueError(f"{path}: no checkpoint here; name a run folder, its checkpoints folder or one of its step_*")
    return open_checkpoint(found)


def description(checkpoint: Checkpoint) -> Config:
    """The description stored in a checkpoint. Raises ValueError when it keeps not every rule of the schema."""
    try:
        return check_description(checkpoint.trainer.get("config"))
    except ValueError as error:
        why = "it was written by another version, or damaged"
        raise ValueError(f"{checkpoint.path / TRAINER}: config: {error}; {why}") from error


def stored_config(checkpoint: Checkpoint) -> Config:
    """The description stored in a checkpoint, whose model has exactly the tensors of the checkpoint."""
    where, config = checkpoint.path / TRAINER, description(checkpoint)
    stored = {name: shape for name, (shape, _) in checkpoint.tensors("model").items()}
    model = config.model
    # The manifest has bounded the stored sizes by those of the files, so what fits them can be allocated.
    if model.vocab_size is None or model.num_layers > len(stored):
        raise ValueError(f"{where}: vocab_size={model.vocab_size}, num_layers={model.num_layers} cannot be its model's")
    described = {name: tensor.shape for name, tensor in logical_tensors(config).items()}
    if different := sorted(stored.items() ^ described.items()):
        name = different[0][0]
        shapes = f"{stored.get(name, 'absent')}, its config says {described.get(name, 'absent')}"
        raise ValueError(f"{checkpoint.path}: model tensor {name!r:.200} is {shapes}; take another step")
    return config


def run_folder(checkpoint: Checkpoint) -> Path:
    """The run folder that a checkpoint lies in: RUN/checkpoints/step_N."""
    return checkpoint.path.absolute().parents[1]


def _start_alone() -> None:
    """What megatron-core's blocks need in a process without others."""
    apply_all(say=lambda line: None)
    collectives.start()
    enter(Layout(1))
    tensor_parallel.model_parallel_cuda_manual_seed(0)
