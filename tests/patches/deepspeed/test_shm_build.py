"""A process group on CPU starts no compiler."""

import tempfile
from datetime import timedelta
from unittest import mock

PATCH = "deepspeed.shm_build"


def reproduce() -> None:
    """Start DeepSpeed's torch backend with a compiler that refuses."""
    import importlib

    from deepspeed import ops
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    backend = importlib.import_module("deepspeed.comm.torch")  # the attribute deepspeed.comm.torch is torch itself
    refuse = mock.Mock(side_effect=AssertionError("the compiler was started"))
    compatible = {ShareMemCommBuilder.NAME: True}  # as on a machine with a compiler
    with (
        mock.patch.object(ShareMemCommBuilder, "load", refuse),
        mock.patch.object(ops, "__compatible_ops__", compatible, create=True),
    ):
        store = f"file://{tempfile.mkdtemp()}/store"
        backend.TorchBackend("gloo", timedelta(seconds=10), store, rank=0, world_size=1)


def test_fails_only_without_the_patch(outcomes) -> None:
    unpatched, patched, undone = outcomes
    assert "the compiler was started" in unpatched
    assert patched is None
    assert undone == unpatched
