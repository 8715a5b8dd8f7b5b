"""Which layers a pipeline stage has."""

from __future__ import annotations

import pytest

from recipes.logical import stage_layers
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("layers", "stages", "ends", "expected"),
    [
        (4, 1, {}, [[0, 1, 2, 3]]),
        (4, 2, {}, [[0, 1], [2, 3]]),
        (4, 4, {}, [[0], [1], [2], [3]]),
        (4, 3, {}, [[0, 1], [2], [3]]),  # the first stages have more
        (4, 2, {"first": 1}, [[0], [1, 2, 3]]),
        (4, 2, {"last": 1}, [[0, 1, 2], [3]]),
        (4, 2, {"first": 3, "last": 1}, [[0, 1, 2], [3]]),
        (8, 4, {"first": 1, "last": 2}, [[0], [1, 2, 3], [4, 5], [6, 7]]),
    ],
)
def test_layers_of_each_stage(layers, stages, ends, expected):
    config = tiny_config(model__num_layers=layers)
    for end, count in ends.items():
        setattr(config.parallel, f"num_layers_in_{end}_pipeline_stage", count)
    assert stage_layers(config, stages) == expected
