"""Layout after layout: reference once, then each case on the pool, compared.

Plan (scaled recipe, cases) -> sweep -> Row of each case as soon as it is known
"""

from __future__ import annotations

import copy
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.config import Config, OptimizerName, Precision
from recipes.topology import Layout
from tools.conformance.compare import BOUNDS, Errors, Reference, Shelf, bf16_bounds, compare
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

    @property
    def precision(self) -> Precision:
        """Of the layouts."""
        return self.small.train.precision


@dataclass(frozen=True)
class Row:
    """A case and how it went; `problem` if it did not end. Without bounds: one process in bf16, by which layouts are judged."""

    case: Case
    seconds: float
    bounds: Mapping[str, float]
    errors: Errors | None
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.errors is not None and self.errors.within(self.bounds)

    def plain(self) -> dict[str, Any]:
        """As JSON; errors that are unknown are null."""
        names = [field.name for field in dataclasses.fields(Errors)]
        return {
            "layout": str(self.case),
            "backend": None if self.case.backend is None else self.case.backend.name,
            "zero": self.case.layout.zero_stage,
            "world_size": self.case.layout.world_size,
            "accumulation": self.case.accumulation,
            "recompute": None if self.case.recompute is None else self.case.recompute.name,
            "offload": self.case.offload,
            **{name: None if self.errors is None else getattr(self.errors, name) for name in names},
            "bounds": dict(self.bounds),
            "ok": self.ok,
            "seconds": round(self.seconds, 2),
            "problem": self.problem,
        }


def plan(
    config: Config,
    world_size: int,
    layouts: str = "sample",
    seed: int = 1234,
    precision: Precision = Precision.fp32,
) -> Plan:
    """The cases of a recipe. `layouts`: `sample`, `all`, or how many of the sample. Raises ValueError for a bad recipe."""
    valid = checked(config)
    valid.run.seed = seed
    small = shrink(valid, world_size)
    small.train.precision = precision
    cases, notes = legal_cases(small, world_size)
    plain = [case for case in cases if case.plain]
    legal = len(plain)
    if layouts == "all":
        cases = plain
    if layouts != "all":
        cases = sample(cases, seed, AT_LEAST.get(world_size, OTHERWISE))
    if layouts not in ("all", "sample"):
        cases = cases[: int(layouts)]
    return Plan(world_size, small, cases, legal, [*changes(config, small), *notes])


def sweep(plan: Plan, *, limit: float | None = None, plant: str | None = None) -> Iterator[Row]:
    """Measure and compare each case. A case that fails or takes longer than `limit` seconds is a row with a problem.

    By default 60 seconds, and longer in proportion when there are more than two ranks for each core.
    `plant` ("module:function"): called in each process before it builds a model, with its rank, to see a fault found.
    """
    limit = limit or LIMIT_SECONDS * max(1.0, plan.world_size / (2 * len(os.sched_getaffinity(0))))
    small, references = _references(plan, limit)
    bounds: dict[Case, Mapping[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="conformance") as folder:
        measure = _Measure(small, references, Shelf(Path(folder)))
        if small.train.precision is Precision.bf16:
            with Pool(1, None, limit) as pool:
                for alone in dict.fromkeys(_alone(case) for case in plan.cases):
                    row = measure(pool, alone, {})
                    if row.errors is None:
                        raise JobFailed(f"bf16 in one process: {row.problem}")
                    bounds[alone] = bf16_bounds(row.errors)
                    yield row
        with Pool(plan.world_size, plant, limit) as pool:
            for case in plan.cases:
                yield measure(pool, case, bounds.get(_alone(case), BOUNDS))


def _alone(case: Case) -> Case:
    """The same on one process."""
    return Case(Layout(1, zero_stage=1), case.accumulation, case.backend)


class _Measure:
    """Measures case after case; the ranks of each find the checkpoint of the one before."""

    def __init__(self, small: Config, references: Mapping[int, Reference], shelf: Shelf):
        self.small, self.references, self.shelf = small, references, shelf

    def __call__(self, pool: Pool, case: Case, bounds: Mapping[str, float]) -> Row:
        started, expected = time.monotonic(), self.references[case.accumulation]
        self.shelf = self.shelf._replace(step=self.shelf.step + 1)
        errors, problem = None, None
        try:
            measured = pool.run("measure", _settings(case.config(self.small), expected), self.shelf)
            errors = compare(measured, expected, bounds)
            self.shelf = self.shelf._replace(previous=measured[0].stored or self.shelf.previous)
        except JobFailed as failure:
            problem = str(failure)
        return Row(case, time.monotonic() - started, bounds, errors, problem)


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
