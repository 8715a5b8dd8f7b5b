"""Does a built model hold every logical tensor of its description, and nothing else?

A block that was put together without one of its modules still computes something: it just trains another model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from recipes.config import Config
from recipes.groups import Groups
from recipes.logical import LocalParameter
from recipes.placement import held_boxes

_SHOWN = 4  # names in a message


def expected_elements(config: Config, groups: Groups) -> dict[str, int]:
    """Elements of each logical tensor on this rank, vocabulary padding left out, worked out from the description alone."""
    return {box.name: math.prod(box.shape) for box in held_boxes(config, groups.layout) if groups.rank in box.ranks}


def check_complete(config: Config, groups: Groups, parameters: Iterable[LocalParameter]) -> None:
    """Raise RuntimeError naming the logical tensors that this rank should hold and does not, or holds and should not."""
    expected, held = expected_elements(config, groups), Counter[str]()
    for entry in parameters:
        for piece in entry.pieces:
            held[piece.name] += math.prod(piece.shape)
    wrong = [name for name in {**expected, **held} if expected.get(name, 0) != held[name]]
    if wrong:
        told = [f"{name} ({held[name]} of {expected.get(name, 0)} elements)" for name in wrong[:_SHOWN]]
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise RuntimeError(
            f"rank {groups.rank}: the modules of the model do not hold what model.* and moe.* describe: {', '.join(told)}{more}; "
            "this is a defect of the layer specification (model.transformer_impl=local uses another one)"
        )
