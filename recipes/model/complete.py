"""Does a built model hold every logical tensor of its description, and nothing else?

A block that was put together without one of its modules still computes something: it just trains another model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from recipes.config import Config
from recipes.groups import Groups
from recipes.logical import LocalParameter, expert_counts, logical_tensors, stage_layers
from recipes.plan.shapes import local_shape
from recipes.topology import Role

_SHOWN = 4  # names in a message


def expected_elements(config: Config, groups: Groups) -> dict[str, int]:
    """Elements of each logical tensor on this rank, vocabulary padding left out, worked out from the description alone."""
    layout, model = groups.layout, config.model
    stage, last = groups.index(Role.pp), layout.pipeline_parallel_size - 1
    layers, counts = set(stage_layers(config, last + 1)[stage]), expert_counts(config)
    tied_copy = model.share_embeddings_and_output_weights and stage == last
    found = {}
    for name, tensor in logical_tensors(config).items():
        module, *rest = name.split(".")
        if module == "layers":
            layer = int(rest[0])
            here = layer in layers
            if rest[1:3] == ["moe", "experts"]:
                mine = counts[layer] // layout.expert_parallel_size
                here &= int(rest[3]) // mine == groups.index(Role.ep)
        else:
            here = stage == 0 or tied_copy if module == "embedding" else stage == last
        rows, *columns = local_shape(tensor, config, layout)
        if module in ("embedding", "head"):
            rows = min(rows, tensor.shape[0] - rows * groups.index(Role.tp))
        if here and rows > 0:
            found[name] = math.prod((rows, *columns))
    return found


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
