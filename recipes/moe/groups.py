"""Process groups of expert parallelism, made from our own rank lists and handed to DeepSpeed under its key."""

from __future__ import annotations

import deepspeed
import torch.distributed as dist
from deepspeed.utils import groups

from recipes.topology import Layout


def group_key(layout: Layout) -> str:
    """DeepSpeed's name for the groups, which is also the name of the experts' parameter groups."""
    return f"ep_size_{layout.expert_parallel_size}"


def ensure_groups(layout: Layout) -> None:
    """Create the groups of `layout` once (all ranks must call it) and enter them into DeepSpeed's dictionaries."""
    if not deepspeed.comm.is_initialized():  # its layer asks about groups through it, also in a model without an engine
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    key, rank = group_key(layout), dist.get_rank()
    if key in groups._EXPERT_PARALLEL_GROUP:
        return
    for handles, ranks_of, lists in (
        (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_PARALLEL_GROUP_RANKS, layout.expert_parallel_groups()),
        (
            groups._EXPERT_DATA_PARALLEL_GROUP,
            groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
            layout.expert_data_parallel_groups(),
        ),
    ):
        for ranks in lists:
            handle = dist.new_group(ranks)
            if rank in ranks:
                handles[key], ranks_of[key] = handle, ranks


def expert_parallel_group(layout: Layout) -> dist.ProcessGroup | None:
    """The group over which this rank's tokens travel, or None when it holds all experts itself."""
    return groups._EXPERT_PARALLEL_GROUP[group_key(layout)] if layout.expert_parallel_size > 1 else None
