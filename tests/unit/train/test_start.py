"""The order in which a process is prepared."""

from __future__ import annotations

import os

import pytest
import torch

from tests.ranks import forked
from tests.tiny import tiny_config


class DeviceUsedError(Exception):
    """Here CUDA would start."""


@forked
def test_what_cuda_reads_is_set_before_it_starts():
    from recipes.launcher import rank_environment
    from recipes.train.job import start_process

    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    seen = []

    def first_use(*_):
        seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        raise DeviceUsedError

    torch.cuda.is_available, torch.cuda.device_count, torch.cuda.set_device = lambda: True, lambda: 8, first_use
    with pytest.raises(DeviceUsedError):
        start_process(tiny_config(), rank_environment(os.environ))
    assert seen == ["1"]
