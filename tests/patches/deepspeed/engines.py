"""One-rank DeepSpeed engines for reproducers."""

import functools
import importlib
import os
import tempfile
from unittest import mock


@functools.cache
def _start_group() -> None:
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", "0")  # deepspeed.initialize insists on it
    backend = importlib.import_module("deepspeed.comm.torch")
    store = f"file://{tempfile.mkdtemp()}/store"
    with mock.patch.object(backend, "build_shm_op", lambda: None):
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method=store, rank=0, world_size=1)


def engine(model, optimizer, **config):
    """A DeepSpeed engine for `model` in a group of one rank; the group's start runs no compiler."""
    import deepspeed

    _start_group()
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0} | config
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
