"""Which rank is which and which ranks form which group: pure arithmetic on rank numbers.

Two grids lie over the same ranks, the last axis changing fastest (megatron-core's order tp-ep-dp-pp):

    dense weights    pipeline x data x tensor
    experts          pipeline x expert data x expert x expert tensor

Only the pipeline axis is common to both, so that experts may be spread over tensor-parallel ranks too (folding, Liu et al.
2025, arXiv 2504.14960). For example 8 ranks with tensor size 2, expert size 4 and expert tensor size 1:

    rank           0  1  2  3  4  5  6  7
    tensor         0  1  0  1  0  1  0  1      group of rank 2: 2 3
    data           0  0  1  1  2  2  3  3                       0 2 4 6
    expert         0  1  2  3  0  1  2  3                       0 1 2 3
    expert data    0  0  0  0  1  1  1  1                       2 6
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from recipes.config import Config, Precision


class Role(enum.Enum):
    """What the ranks of a group share: `tp` a layer's matrices, `dp` the batch, `pp` the layers; of experts `etp` the matrices
    of each, `ep` the experts of a layer, `edp` the tokens of the same experts."""

    tp = "tensor"
    dp = "data"
    pp = "pipeline"
    etp = "expert tensor"
    ep = "expert"
    edp = "expert data"


_DENSE_AXES = (Role.pp, Role.dp, Role.tp)
_EXPERT_AXES = (Role.pp, Role.edp, Role.ep, Role.etp)


@dataclass(frozen=True)
class Layout:
    """Sizes of all axes; the data sizes follow from the others. With `sequence_parallel` the tensor-parallel ranks also share
    the tokens between the matrices.

    Raises AssertionError for sizes that do not fit together; `recipes.validation` has explained them to the user before.
    """

    world_size: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 1

    def __post_init__(self) -> None:
        assert self.world_size % (self.tensor_parallel_size * self.pipeline_parallel_size) == 0
        experts_over = self.pipeline_parallel_size * self.expert_parallel_size * self.expert_tensor_parallel_size
        assert self.world_size % experts_over == 0
        assert self.expert_tensor_parallel_size in (1, self.tensor_parallel_size)
        assert self.tensor_parallel_size > 1 or not self.sequence_parallel

    @property
    def data_parallel_size(self) -> int:
        """Ranks (times their model-parallel ones) that share a batch."""
        return self.world_size // (self.tensor_parallel_size * self.pipeline_parallel_size)

    @property
    def expert_data_parallel_size(self) -> int:
        """Ranks that hold the same part of the same experts."""
        over = self.pipeline_parallel_size * self.expert_parallel_size * self.expert_tensor_parallel_size
        return self.world_size // over

    def size(self, role: Role) -> int:
        """Ranks in each group of this role."""
        return {
            Role.tp: self.tensor_parallel_size,
            Role.dp: self.data_parallel_size,
            Role.pp: self.pipeline_parallel_size,
            Role.etp: self.expert_tensor_parallel_size,
            Role.ep: self.expert_parallel_size,
            Role.edp: self.expert_data_parallel_size,
        }[role]

    def index(self, role: Role, rank: int) -> int:
        """Place of `rank` along an axis."""
        return self._coordinates(rank, _DENSE_AXES if role in _DENSE_AXES else _EXPERT_AXES)[role]

    def _coordinates(self, rank: int, axes: tuple[Role, ...]) -> dict[Role, int]:
        assert 0 <= rank < self.world_size
        found = {}
        for role in reversed(axes):
            rank, found[role] = divmod(rank, self.size(role))
        return found

    def rank_at(self, places: dict[Role, int]) -> int:
        """The rank at these places along all axes of one grid, dense or experts' (the inverse of `index`)."""
        axes = _DENSE_AXES if places.keys() == set(_DENSE_AXES) else _EXPERT_AXES
        assert places.keys() == set(axes)
        rank = 0
        for role in axes:
            assert 0 <= places[role] < self.size(role)
            rank = rank * self.size(role) + places[role]
        return rank

    def groups(self, role: Role) -> list[list[int]]:
        """Rank lists of all groups of this role, each in the order of its axis; every rank is in exactly one."""
        axes = _DENSE_AXES if role in _DENSE_AXES else _EXPERT_AXES
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            places = self._coordinates(rank, axes)
            members.setdefault(tuple(places[axis] for axis in axes if axis is not role), []).append(rank)
        return sorted(members.values())

    def stages(self) -> list[list[int]]:
        """All ranks of each pipeline stage."""
        size = self.tensor_parallel_size * self.data_parallel_size
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def group_of(self, role: Role, rank: int) -> list[int]:
        """The group of this role that `rank` is in."""
        places = self._coordinates(rank, _DENSE_AXES if role in _DENSE_AXES else _EXPERT_AXES)
        return [self.rank_at(places | {role: place}) for place in range(self.size(role))]


@dataclass(frozen=True)
class Cluster:
    """Nodes with equally many accelerators each; ranks fill one node after the other."""

    num_nodes: int
    accelerators_per_node: int

    def crosses_nodes(self, layout: Layout, role: Role) -> bool:
        """Whether some group of this role has ranks on several nodes, so that its messages leave them."""
        assert layout.world_size <= self.num_nodes * self.accelerators_per_node
        return any(len({rank // self.accelerators_per_node for rank in group}) > 1 for group in layout.groups(role))


def model_parallel_size(config: Config) -> int:
    """Ranks that hold the model between them, once."""
    return config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size


def expert_tensor_size(config: Config) -> int:
    """Ranks that share each expert's matrices: by default as many as share the layer's; 1 without experts."""
    parallel = config.parallel
    if not config.moe.has_experts:
        return 1
    given = parallel.expert_tensor_parallel_size
    return parallel.tensor_model_parallel_size if given is None else given


def layout_of(config: Config, world_size: int) -> Layout:
    """The layout that a valid description asks for on `world_size` ranks."""
    parallel = config.parallel
    return Layout(
        world_size,
        tensor_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_parallel_size=parallel.pipeline_model_parallel_size,
        expert_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_size(config),
        sequence_parallel=parallel.sequence_parallel,
        zero_stage=config.zero.stage,
    )


def used_zero_stage(config: Config, layout: Layout) -> int:
    """`zero.stage`, or 0 where stages 1 and 2 have nothing to divide and would only copy weights and gradients."""
    alone = layout.data_parallel_size == 1 and (not config.moe.has_experts or layout.expert_data_parallel_size == 1)
    plain = config.train.precision is Precision.fp32 and not config.zero.offload_optimizer
    return 0 if alone and plain and config.zero.stage < 3 else config.zero.stage
