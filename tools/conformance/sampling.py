"""Which layouts are tried: all, or a sample in which every pair of options that can occur together does."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.config import RECOMPUTE_MODULES, Config, ModelConfig, MoeBackend, Recompute
from recipes.logical import moe_layers
from recipes.topology import Layout
from recipes.validation import problems
from recipes.validation.layouts import legal_layouts, with_layout

ACCUMULATIONS = (1, 2)
ZERO_STAGES = (0, 1, 2, 3)
AT_LEAST = {2: 12, 4: 40}  # layouts in a sample, by number of ranks
OTHERWISE = 30


@dataclass(frozen=True)
class Case:
    """A layout with all that is tried on it. `backend` is None for a dense model; `recompute` None is what the recipe says."""

    layout: Layout
    accumulation: int
    backend: MoeBackend | None
    recompute: Recompute | None = None
    offload: bool = False

    @property
    def plain(self) -> bool:
        """Whether it is no more than a layout."""
        return self.recompute is None and not self.offload

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
            "recompute": self.recompute,
            "offload": self.offload,
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
        words += [f"dp{layout.data_parallel_size}"]
        words += [] if self.recompute is None else [f"recompute-{self.recompute.name}"]
        return " ".join(words + ["offload"] * self.offload)

    def config(self, small: Config) -> Config:
        """The scaled recipe in this layout."""
        config = with_layout(small, self.layout)
        ranks = self.layout.data_parallel_size
        config.train.micro_batch_size = config.train.global_batch_size // (ranks * self.accumulation)
        config.zero.offload_optimizer = self.offload
        if self.backend is not None:
            config.moe.backend = self.backend
        if self.recompute is not None:
            config.model.recompute_granularity = self.recompute
            config.model.recompute_modules = ModelConfig().recompute_modules
        if self.recompute is Recompute.selective:
            config.model.recompute_modules = _parts(config)
        return config


def _parts(config: Config) -> list[str]:
    """All that can be computed again, moe_act apart, which is a part of moe."""
    experts = len(moe_layers(config))
    absent = {"moe_act", *({"mlp" if experts else "moe"} if experts in (0, config.model.num_layers) else ())}
    return [name for name in RECOMPUTE_MODULES if name not in absent]


def legal_cases(small: Config, world_size: int) -> tuple[list[Case], list[str]]:
    """All cases of the scaled recipe, those of one layout one after the other, and why a backend has none."""
    cases, notes = [], []
    for backend in MoeBackend if small.moe.has_experts else (None,):
        config = copy.deepcopy(small)
        if backend is not None:
            config.moe.backend = backend
        refused: list[str] = []
        possible = []
        layouts = legal_layouts(config, world_size, ZERO_STAGES)
        for options in itertools.product(layouts, ACCUMULATIONS, [backend], [None, *Recompute], [False, True]):
            case = Case(*options)
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
