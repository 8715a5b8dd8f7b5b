"""The process groups of a layout under their role names.

    Layout -> megatron-core makes the groups -> checked against our rank lists -> DeepSpeed gets those of the experts

megatron-core and DeepSpeed keep their groups in module state, so a process is in one layout at a time: `enter` and `leave`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import deepspeed
import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups
from megatron.core import parallel_state

from recipes import collectives
from recipes.topology import Layout, Role

_GETTERS = {
    Role.tp: parallel_state.get_tensor_model_parallel_group,
    Role.dp: parallel_state.get_data_parallel_group,
    Role.pp: parallel_state.get_pipeline_model_parallel_group,
    Role.etp: parallel_state.get_expert_tensor_parallel_group,
    Role.ep: parallel_state.get_expert_model_parallel_group,
    Role.edp: parallel_state.get_expert_data_parallel_group,
}


@dataclass(frozen=True)
class Groups:
    """This rank's place in a layout. `handles` has the groups of the axes that are longer than one.

    `stage`: all ranks of this pipeline stage; `ends`: this rank's place in the first and the last stage, on ranks that are in
    either.
    """

    layout: Layout
    rank: int = 0
    handles: Mapping[Role, dist.ProcessGroup] = field(default_factory=dict)
    stage: dist.ProcessGroup | None = None
    ends: dist.ProcessGroup | None = None

    def handle(self, role: Role) -> dist.ProcessGroup | None:
        """The group of this role, or None when this rank is alone along that axis."""
        return self.handles.get(role)

    def size(self, role: Role) -> int:
        """Ranks in the group of this role."""
        return self.layout.size(role)

    def index(self, role: Role) -> int:
        """Place of this rank in the group of this role."""
        return self.layout.index(role, self.rank)

    @property
    def leads(self) -> bool:
        """Whether this rank, of those that see the same samples, is the one that adds their losses to a sum over all ranks."""
        return self.index(Role.tp) == 0 and self.index(Role.pp) == self.size(Role.pp) - 1

    @property
    def expert_key(self) -> str:
        """DeepSpeed's name for the groups of the experts, which is also the name of their optimizer groups."""
        return f"ep_size_{self.layout.expert_parallel_size}"


_entered: list[Groups] = []  # at most one: the layout that this process is in


def enter(layout: Layout) -> Groups:
    """The groups of `layout`, made unless this process is in it already (a collective of all ranks).

    A layout of one rank in a process group of several is a model that a rank has for itself; it needs no groups, but then
    megatron-core must be in a layout without tensor parallelism.
    """
    if layout.world_size == 1 < dist.get_world_size():
        assert parallel_state.get_tensor_model_parallel_world_size() == 1
        return Groups(layout)
    assert layout.world_size == dist.get_world_size()
    if _entered and _same_ranks(_entered[0].layout, layout):
        return replace(_entered[0], layout=layout)
    leave()
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_parallel_size,
        expert_model_parallel_size=layout.expert_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=collectives.TIMEOUT.total_seconds() / 60,  # type: ignore[arg-type]
    )
    rank = dist.get_rank()
    for role, group in ((role, getter()) for role, getter in _GETTERS.items()):
        assert dist.get_process_group_ranks(group) == layout.group_of(role, rank), f"megatron-core's {role} differs"
    handles = {role: getter() for role, getter in _GETTERS.items() if layout.size(role) > 1}
    stage = parallel_state.get_tensor_and_data_parallel_group()
    assert dist.get_process_group_ranks(stage) == layout.stages()[layout.index(Role.pp, rank)]
    ends = parallel_state.get_embedding_group(check_initialized=False)
    found = Groups(layout, rank, handles, stage, ends)
    deepspeed_groups.mpu = DataParallel(found)
    for role, handles, lists in (
        (Role.ep, deepspeed_groups._EXPERT_PARALLEL_GROUP, deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS),
        (Role.edp, deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP, deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS),
    ):
        handles[found.expert_key], lists[found.expert_key] = _GETTERS[role](), layout.group_of(role, rank)
    _entered.append(found)
    return found


def leave() -> None:
    """Forget the groups, so that another layout, or another process group, can be entered."""
    _entered.clear()
    parallel_state.destroy_model_parallel()
    deepspeed_groups._release_process_group_references()


def _same_ranks(one: Layout, other: Layout) -> bool:
    return one.world_size == other.world_size and all(one.size(role) == other.size(role) for role in Role)


class DataParallel:
    """What DeepSpeed is told of the layout, in its interface of Megatron's `mpu`: the data-parallel group alone.

    The rest is none of its business: megatron-core's layers communicate over tensor-parallel ranks, our hooks add up what is
    partial there, and Engine computes the norm.
    """

    def __init__(self, groups: Groups):
        self._layout, self._rank = groups.layout, groups.rank
        self._group = parallel_state.get_data_parallel_group()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self._layout.group_of(Role.dp, self._rank)

    def get_data_parallel_world_size(self) -> int:
        return self._layout.data_parallel_size

    def get_data_parallel_rank(self) -> int:
        return self._layout.index(Role.dp, self._rank)

    def get_model_parallel_group(self) -> None:
        return None

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
