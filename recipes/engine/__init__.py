"""Training on DeepSpeed's engine: its configuration, one optimizer step, and the optimizer's state.

Two other modules import DeepSpeed: `recipes.groups` gives it the process groups of the experts, and `recipes.moe.layer` builds on
its MoE layer. A test of the imports holds it.
"""

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
