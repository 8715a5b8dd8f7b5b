"""Which layouts are tried: all, or a sample in which every pair of options that can occur together does."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.config import Config, MoeBackend
from recipes.topology import Layout
from recipes.validation import problems
from recipes.validation.layouts import legal_layouts, with_layout

ACCUMULATIONS = (1, 2)
AT_LEAST = {2: 12, 4: 40}  # layouts in a sample, by number of ranks
OTHERWISE = 30


@dataclass(frozen=True)
class Case:
    """A layout with all that is tried on it. `backend` is None for a dense model."""

    layout: Layout
    accumulation: int
    backend: MoeBackend | None

    @property
    def options(self) -> tuple[tuple[str, object], ...]:
        """What a sample pairs with each other."""
        layout = self.layout
        found: dict[str, object] = {
            "pp": layout.pipeline_parallel_size,
            "tp": layout.tensor_parallel_size,
            "sp": layout.sequence_parallel,
            "zero": layout.zero_stage,
            "accumulation": self.accumulation,
        }
        if self.backend is not None:
            found |= {"ep": layout.expert_parallel_size, "etp": layout.expert_tensor_parallel_size}
            found["backend"] = self.backend.name
        return tuple(found.items())

    def __str__(self) -> str:
        layout = self.layout
        words = [f"pp{layout.pipeline_parallel_size}"] if layout.pipeline_parallel_size > 1 else []
        words += [f"tp{layout.tensor_parallel_size}"]
        words += ["sp"] if layout.sequence_parallel else []
        if self.backend is not None:
            words += [f"ep{layout.expert_parallel_size}", f"etp{layout.expert_tensor_parallel_size}"]
        return " ".join([*words, f"dp{layout.data_parallel_size}"])

    def config(self, small: Config) -> Config:
        """The scaled recipe in this layout."""
        config = with_layout(small, self.layout)
        ranks = self.layout.data_parallel_size
        config.train.micro_batch_size = config.train.global_batch_size // (ranks * self.accumulation)
        if self.backend is not None:
            config.moe.backend = self.backend
        return config


def legal_cases(small: Config, world_size: int) -> tuple[list[Case], list[str]]:
    """All cases of the scaled recipe, and why a backend has none."""
    cases, notes = [], []
    for backend in MoeBackend if small.moe.num_moe_experts is not None else (None,):
        config = copy.deepcopy(small)
        if backend is not None:
            config.moe.backend = backend
        refused: list[str] = []
        possible = []
        for layout, accumulation in itertools.product(legal_layouts(config, world_size), ACCUMULATIONS):
            case = Case(layout, accumulation, backend)
            found = problems(case.config(config), world_size, launch_dir=Path.cwd(), dry_run=True)
            refused += found
            possible += [] if found else [case]
        if not possible:
            assert backend is not None and refused, "a dense model can run on any number of ranks"
            notes.append(f"moe.backend={backend.name} is left out: {refused[0]}")
        cases += possible
    return cases, notes


def pairs(case: Case) -> set[tuple]:
    """All pairs of its options."""
    return set(itertools.combinations(case.options, 2))


def sample(cases: Sequence[Case], seed: int, at_least: int) -> list[Case]:
    """Cases, those with most new pairs of options first, until every pair is there and they are `at_least` (or all).

    Of equally good cases the seed decides.
    """
    left = list(cases)
    random.Random(seed).shuffle(left)
    of = {case: pairs(case) for case in left}
    missing = set().union(*of.values())
    chosen: list[Case] = []
    while left and (missing or len(chosen) < at_least):
        best = max(left, key=lambda case: len(of[case] & missing))
        missing -= of[best]
        left.remove(best)
        chosen.append(best)
    return chosen
