"""A checkpoint that lacks a tensor is not committed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from recipes.checkpoint.manifest import FileEntry, ShardRecord, StoredBox, TensorEntry
from recipes.checkpoint.save import _check_complete
from recipes.logical import logical_tensors
from tests.tiny import tiny_config

STATES = ("master", "exp_avg", "exp_avg_sq")


def records(config, leave_out=None):
    """What ranks would report of a whole checkpoint, but for one tensor."""
    model = {name: tensor.shape for name, tensor in logical_tensors(config).items()}
    optimizer = {f"{moment}/{name}": shape for moment in STATES[1:] for name, shape in model.items()}
    found = []
    for kind, shapes in (("model", model), ("optimizer", optimizer)):
        entries = {
            name: TensorEntry("F32", shape, (StoredBox(kind, name, (0,) * len(shape), shape),))
            for name, shape in shapes.items()
            if (kind, name) != leave_out
        }
        found.append(ShardRecord(kind, FileEntry(kind, 1, "0" * 64), entries))
    return found


def engine(config, states):
    return SimpleNamespace(model=SimpleNamespace(config=config), state_names=lambda: states)


def test_all_tensors_and_moments_are_there():
    config = tiny_config()
    _check_complete(records(config), engine(config, STATES))
    _check_complete(records(config)[:1], engine(config, STATES[:1]))  # SGD has no moments


@pytest.mark.parametrize(
    ("kind", "name"),
    [("model", "final_norm.weight"), ("optimizer", "exp_avg_sq/layers.1.attention.k.weight")],
)
def test_a_tensor_that_no_rank_wrote_is_named(kind, name):
    config = tiny_config()
    with pytest.raises(ValueError, match=f"{kind} tensor '{name}' was written by no rank"):
        _check_complete(records(config, leave_out=(kind, name)), engine(config, STATES))
