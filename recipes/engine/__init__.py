"""The only package that talks to DeepSpeed: its configuration, one optimizer step, and the optimizer's state."""

from recipes.engine.engine import Engine

__all__ = ["Engine"]
