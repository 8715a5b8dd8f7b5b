"""Layout after layout: reference once, then each case on the pool, compared.

Plan (scaled recipe, cases) -> sweep -> Row of each case as soon as it is known
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.config import Config, OptimizerName
from tools.conformance.compare import Errors, Reference, compare
from tools.conformance.pool import LIMIT_SECONDS, JobFailed, Pool
from tools.conformance.sampling import AT_LEAST, OTHERWISE, Case, legal_cases, sample
from tools.conformance.shrink import changes, checked, shrink

TRIES = 20  # seeds whose samples may have a token between two experts


@dataclass(frozen=True)
class Plan:
    """What will be tried. `notes`: what was scaled or left out."""

    world_size: int
    small: Config
    cases: list[Case]
    legal: int
    notes: list[str]


@dataclass(frozen=True)
class Row:
    """A case and how it went; `problem` if it did not end."""

    case: Case
    seconds: float
    errors: Errors | None
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.errors is not None and self.errors.ok

    def plain(self) -> dict[str, Any]:
        """As JSON; errors that are unknown are null."""
        names = [field.name for field in dataclasses.fields(Errors)]
        return {
            "layout": str(self.case),
            "backend": None if self.case.backend is None else self.case.backend.name,
            "zero": self.case.layout.zero_stage,
            "world_size": self.case.layout.world_size,
            "accumulation": self.case.accumulation,
            **{name: None if self.errors is None else getattr(self.errors, name) for name in names},
            "ok": self.ok,
            "seconds": round(self.seconds, 2),
            "problem": self.problem,
        }


def plan(config: Config, world_size: int, layouts: str = "sample", seed: int = 1234) -> Plan:
    """The cases of a recipe. `layouts`: `sample`, `all`, or how many of the sample. Raises ValueError for a bad recipe."""
    config = checked(config)
    config.run.seed = seed
    small = shrink(config, world_size)
    cases, notes = legal_cases(small, world_size)
    legal = len(cases)
    if layouts != "all":
        cases = sample(cases, seed, AT_LEAST.get(world_size, OTHERWISE))
    if layouts not in ("all", "sample"):
        cases = cases[: int(layouts)]
    return Plan(world_size, small, cases, legal, [*changes(config, small), *notes])


def sweep(plan: Plan, *, limit: float = LIMIT_SECONDS, plant: str | None = None) -> Iterator[Row]:
    """Measure and compare each case. A case that fails or takes longer than `limit` seconds is a row with a problem.

    `plant` ("module:function"): called in each process before it builds a model, with its rank, to see a fault found.
    """
    small, references = _references(plan, limit)
    with Pool(plan.world_size, plant, limit) as pool:
        for case in plan.cases:
            started = time.monotonic()
            expected = references[case.accumulation]
            try:
                ranks = pool.run("measure", _settings(case.config(small), expected))
                errors, problem = compare(ranks, expected), None
            except JobFailed as failure:
                errors, problem = None, str(failure)
            yield Row(case, time.monotonic() - started, errors, problem)


def _references(plan: Plan, limit: float) -> tuple[Config, dict[int, Reference]]:
    """The reference for each number of micro steps, and the recipe with a seed whose samples are routed clearly."""
    small = copy.deepcopy(plan.small)
    accumulations: Sequence[int] = sorted({case.accumulation for case in plan.cases})
    with Pool(1, None, limit) as alone:
        for _ in range(TRIES):
            found = {accumulation: alone.run("reference", small, accumulation)[0] for accumulation in accumulations}
            if all(reference.decided for reference in found.values()):
                break
            small.run.seed += 1
    return small, found


def _settings(config: Config, expected: Reference) -> dict[OptimizerName, Config]:
    """The recipe with each optimizer, set as for the reference."""
    found = {}
    for name in OptimizerName:
        found[name] = copy.deepcopy(config)
        optimizer = found[name].optimizer
        optimizer.name, optimizer.lr, optimizer.clip_grad = name, expected.lr[name], expected.clip_grad
        optimizer.adam_eps = expected.adam_eps
    return found
