"""The only package that talks to DeepSpeed: its configuration, one optimizer step, and the optimizer's state."""

from recipes.config import Config
from recipes.engine.engine import Engine
from recipes.logical import LocalParameter
from recipes.model.gpt import GPT

__all__ = ["Engine", "make_engine"]


def make_engine(model: GPT, parameters: list[LocalParameter], config: Config) -> Engine:
    """The engine of a model in one stage, or of a pipeline stage."""
    if model.groups.layout.pipeline_parallel_size == 1:
        return Engine(model, parameters, config)
    from recipes.engine.pipeline import PipelineEngine

    return PipelineEngine(model, parameters, config)
