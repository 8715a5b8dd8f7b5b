"""Which ranks form which group: pure arithmetic on rank numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """`world_size` data-parallel ranks, of which each run of `expert_parallel_size` neighbours shares the experts out."""

    world_size: int
    expert_parallel_size: int = 1

    def __post_init__(self) -> None:
        assert self.world_size % self.expert_parallel_size == 0

    def expert_parallel_rank(self, rank: int) -> int:
        """Place of `rank` among those that hold different experts; it holds the experts [place x L, (place + 1) x L)."""
        return rank % self.expert_parallel_size

    def expert_parallel_groups(self) -> list[list[int]]:
        """Ranks that together hold every expert once."""
        size = self.expert_parallel_size
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def expert_data_parallel_groups(self) -> list[list[int]]:
        """Ranks that hold the same experts."""
        return [
            list(range(place, self.world_size, self.expert_parallel_size)) for place in range(self.expert_parallel_size)
        ]
