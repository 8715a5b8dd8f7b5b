"""Errors of a layout against the reference: pure arithmetic on arrays.

    [Measured of each rank], Reference -> compare -> Errors -> which of them are beyond BOUNDS, and where

A rank holds boxes of logical tensors; together the ranks of a layout hold each tensor, some parts of it several times.
Relative error of a tensor: ||found - expected|| / scale, where scale is the largest of ||expected||, 1e-3 sqrt(numel) RMS (over all
tensors expected), and the norm that would make its rounding an ordinary one (`rounding.term_norms`; at most sqrt(numel) RMS).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recipes.config import OptimizerName

Tensors = Mapping[str, np.ndarray]
BOUNDS = {
    "loss_err": 1e-6,
    "aux_err": 1e-6,
    "grad_err": 2e-5,
    "norm_err": 2e-5,
    "sgd_err": 1e-4,
    "adamw_err": 1e-3,
    "replica_err": 0.0,
    "checkpoint_err": 0.0,
    "route_flips": 0,
}
# In bf16 a layout may err several times as much as one process does in bf16 (see bf16_bounds).
MEDIAN_FACTOR, WORST_FACTOR = 2.5, 4
ROUNDING = 2**-8  # of a number to bf16, relative
TINY = float(np.finfo(np.float32).tiny)
NO_TERMS: Mapping[str, float] = {}
FLOOR = 1e-3  # of the RMS of all tensors: below it a tensor's own norm says nothing


class Box(NamedTuple):
    """A part of a logical tensor: its name, where it begins, and what it holds."""

    name: str
    offsets: tuple[int, ...]
    values: np.ndarray

    @property
    def window(self) -> tuple[slice, ...]:
        """Where it lies in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.values.shape, strict=True))

    @property
    def key(self) -> tuple:
        """The same of all copies."""
        return self.name, self.offsets, self.values.shape


class Worst(NamedTuple):
    """The largest of several errors and the tensor that has it."""

    error: float
    tensor: str

    def or_worse(self, error: float, tensor: str) -> Worst:
        """Another error in place of this one if it is larger."""
        return Worst(error, tensor) if error > self.error else self


NOTHING = Worst(0.0, "")


class Routed(NamedTuple):
    """Experts chosen in one layer: bool [positions, samples, E], of consecutive positions."""

    layer: int
    first_position: int
    samples: np.ndarray
    chosen_SBE: np.ndarray


class Measured(NamedTuple):
    """Of one rank: losses, gradient norm and routing of the first step, its parts of all tensors, its experts' state at last.

    `start` and `updated` are fp32 masters before and after the steps, `held` the weights that the model computes with;
    `stored`: the checkpoint that was made, if it could be; `checkpoint`: how far checkpoints are from what this rank holds.
    """

    lm_loss: float
    aux: Mapping[str, float]
    norm: float
    start: list[Box]
    gradients: list[Box]
    updated: Mapping[OptimizerName, list[Box]]
    held: Mapping[OptimizerName, list[Box]]
    routes: list[Routed]
    experts: Mapping[str, Any]
    checkpoint: Worst = NOTHING
    stored: Path | None = None


class Shelf(NamedTuple):
    """Where ranks put the checkpoint of a layout, as which step, and that of the layout before, if there is one."""

    folder: Path
    step: int = 0
    previous: Path | None = None


@dataclass
class Reference:
    """The same of one process, whole, with the settings that follow from its gradient."""

    lm_loss: float
    aux: Mapping[str, float]
    norm: float
    start: Tensors
    gradients: Tensors
    routes: Mapping[int, np.ndarray]  # layer -> bool [sample, position, expert]
    clip_grad: float
    adam_eps: float
    lr: Mapping[OptimizerName, float]
    updates: dict[OptimizerName, Tensors] = field(default_factory=dict)  # final weights - start
    # Of gradients and updates, see `scales`.
    gradient_terms: Mapping[str, float] = field(default_factory=dict)
    update_terms: dict[OptimizerName, Mapping[str, float]] = field(default_factory=dict)
    experts: Mapping[str, Any] = field(default_factory=dict)  # counts and biases after the SGD steps
    decided: bool = True  # whether routing withstands rounding


@dataclass(frozen=True)
class Errors:
    """What is bounded, and the tensor that is worst in relation to its bound. `grad_median`: over tensors; others are the worst."""

    loss_err: float
    aux_err: float
    grad_err: float
    norm_err: float
    sgd_err: float
    adamw_err: float
    replica_err: float
    route_flips: int
    grad_median: float
    worst_tensor: str
    checkpoint_err: float = 0.0

    def within(self, bounds: Mapping[str, float]) -> bool:
        """Whether none is beyond its bound."""
        return all(getattr(self, name) <= bound for name, bound in bounds.items())


def bf16_bounds(alone: Errors) -> dict[str, float]:
    """What a layout may err in bf16 if one process errs like this against fp32, numbers by a rounding at least.

    Tokens between two experts go elsewhere, alone as in a layout: gradients of experts are far off, and flips have no bound.
    """
    bounds = {name: WORST_FACTOR * getattr(alone, name) for name in ("grad_err", "sgd_err", "adamw_err")}
    bounds |= {name: WORST_FACTOR * max(getattr(alone, name), ROUNDING) for name in ("loss_err", "aux_err", "norm_err")}
    return bounds | {"grad_median": MEDIAN_FACTOR * alone.grad_median, "replica_err": 0.0, "checkpoint_err": 0.0}


def compare(ranks: Sequence[Measured], expected: Reference, bounds: Mapping[str, float] = BOUNDS) -> Errors:
    """All errors of a layout from what its ranks measured; `bounds` say which is the worst. Those of bf16: see bf16_bounds."""
    exact = bounds is BOUNDS
    start, gradients = _boxes(rank.start for rank in ranks), _boxes(rank.gradients for rank in ranks)
    of_gradients = tensor_errors(gradients, expected.gradients, expected.gradient_terms)
    found, copies = {"grad_err": worst_of(of_gradients)}, [start, gradients]
    begins = {box.key: box.values for box in start}  # of bf16 they are rounded
    for name in OptimizerName:
        masters, held = _boxes(rank.updated[name] for rank in ranks), _boxes(rank.held[name] for rank in ranks)
        if exact:  # a master is one more copy of a weight
            masters, held = masters + held, []
        copies += [masters, held]
        updates = [
            box._replace(
                values=box.values - (expected.start[box.name][box.window] if exact else begins[box.key]).astype(float)
            )
            for box in masters
        ]
        terms = expected.update_terms.get(name, {})
        found[f"{name.name}_err"] = worst_of(tensor_errors(updates, expected.updates[name], terms))
    norm = relative((rank.norm for rank in ranks), expected.norm)
    furthest = max((rank.norm for rank in ranks), key=lambda norm: abs(norm - expected.norm))
    found["norm_err"] = Worst(norm, explain_norm(furthest, expected.gradients))
    found["replica_err"] = max(replica_error(boxes) for boxes in copies)
    found["checkpoint_err"] = max(rank.checkpoint for rank in ranks)
    flips = route_flips((part for rank in ranks for part in rank.routes), expected.routes)
    aux = [relative((rank.aux[key] for rank in ranks), value) for key, value in expected.aux.items()]
    return Errors(
        loss_err=relative((rank.lm_loss for rank in ranks), expected.lm_loss),
        aux_err=max(aux, default=0.0),
        route_flips=flips + max(unlike(rank.experts, expected.experts) for rank in ranks),
        grad_median=statistics.median(of_gradients.values()),
        worst_tensor=_worst_tensor(found, bounds),
        **{name: worst.error for name, worst in found.items()},
    )


def _boxes(parts: Iterable[list[Box]]) -> list[Box]:
    return [box for part in parts for box in part]


def _worst_tensor(found: Mapping[str, Worst], bounds: Mapping[str, float]) -> str:
    """Where the trouble begins: a gradient that is absent or not finite, then what is furthest beyond its bound of unlike copies,
    gradients, updates, checkpoints."""
    if found["grad_err"].error == math.inf:
        return found["grad_err"].tensor
    off = {name: (worst.error / max(bounds.get(name, math.inf), TINY), worst.tensor) for name, worst in found.items()}
    for names in (("replica_err",), ("grad_err", "norm_err"), ("sgd_err", "adamw_err"), ("checkpoint_err",)):
        ratio, tensor = max((off[name] for name in names if off[name][1]), default=(0.0, ""))
        if ratio > 1:
            return tensor
    return max(off[name] for name in ("grad_err", "sgd_err", "adamw_err"))[1]


def rms(tensors: Iterable[np.ndarray]) -> float:
    """Root mean square of all elements of all tensors."""
    squares, count = 0.0, 0
    for tensor in tensors:
        squares += float(np.square(tensor, dtype=np.float64).sum())
        count += tensor.size
    return math.sqrt(squares / count)


def scales(expected: Tensors, terms: Mapping[str, float] = NO_TERMS) -> dict[str, float]:
    """What the error of each tensor is divided by. `terms`: see rounding.term_norms."""
    all_rms = rms(expected.values())
    found = {}
    for name, tensor in expected.items():
        typical = math.sqrt(tensor.size) * all_rms
        found[name] = max(float(np.linalg.norm(tensor)), FLOOR * typical, min(terms.get(name, 0.0), typical))
    return found


def tensor_errors(boxes: Iterable[Box], expected: Tensors, terms: Mapping[str, float] = NO_TERMS) -> dict[str, float]:
    """The relative error of each expected tensor; infinite if boxes do not cover it or a value is not finite.

    Of several copies of a box the worst counts. `terms`: see scales.
    """
    squares: dict[str, dict[tuple, float]] = {name: {} for name in expected}
    covered = {name: np.zeros(tensor.shape, dtype=bool) for name, tensor in expected.items()}
    for box in boxes:
        difference = box.values.astype(np.float64) - expected[box.name][box.window]
        key = (box.offsets, box.values.shape)
        square = float(np.square(difference).sum())
        worst = squares[box.name].get(key, 0.0)
        squares[box.name][key] = max(worst, square) if math.isfinite(square) else math.inf
        covered[box.name][box.window] = True
    errors = {}
    for name, scale in scales(expected, terms).items():
        error = math.sqrt(sum(squares[name].values())) / scale
        errors[name] = error if covered[name].all() and math.isfinite(error) else math.inf
    return errors


def worst_of(errors: Mapping[str, float]) -> Worst:
    """The largest error and its tensor."""
    name = max(errors, key=errors.__getitem__)
    return Worst(errors[name], name)


def replica_error(boxes: Iterable[Box]) -> Worst:
    """0 if all copies of each box have the same bits, else the largest relative difference between a copy and the first."""
    first: dict[tuple, np.ndarray] = {}
    worst = NOTHING
    for box in boxes:
        worst = worst.or_worse(difference(box.values, first.setdefault(box.key, box.values)), box.name)
    return worst


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """0 if both have the same bits, else the difference relative to the larger one, which is not 0."""
    if found.tobytes() == expected.tobytes():
        return 0.0
    distance = float(np.linalg.norm(found.astype(np.float64) - expected))
    error = distance / max(float(np.linalg.norm(found)), float(np.linalg.norm(expected)), TINY)
    # Signed zeros, and NaNs, may differ in their bits only.
    return max(error, TINY) if math.isfinite(error) else math.inf


def relative(found: Iterable[float], expected: float) -> float:
    """The largest relative difference of a number that several ranks have."""
    errors = [abs(value - expected) / max(abs(expected), 1e-30) for value in found]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def explain_norm(norm: float, gradients: Tensors) -> str:
    """The tensor, or the module with all its tensors, whose absence (or double count) explains a wrong gradient norm best.

    Modules are those that a name contains: layers.1.moe.experts.7, layers.1.moe.experts, ... Empty if none explains it.
    """
    squares: dict[str, float] = {}
    for name, tensor in gradients.items():
        words = name.split(".")
        square = float(np.square(tensor, dtype=np.float64).sum())
        for length in range(1, len(words) + 1):
            prefix = ".".join(words[:length])
            squares[prefix] = squares.get(prefix, 0.0) + square
    total = sum(float(np.square(tensor, dtype=np.float64).sum()) for tensor in gradients.values())
    difference = abs(total - norm**2)
    if not math.isfinite(difference) or difference <= 1e-6 * total:
        return ""
    name = min(squares, key=lambda name: (abs(squares[name] - difference), -len(name)))
    return name if abs(squares[name] - difference) <= 1e-2 * difference else ""


def route_flips(found: Iterable[Routed], expected: Mapping[int, np.ndarray]) -> int:
    """Tokens that went to other experts than in `expected` (layer -> bool [sample, position, expert]), or nowhere."""
    right = {layer: np.zeros(chosen.shape[:2], dtype=bool) for layer, chosen in expected.items()}
    wrong = {layer: np.zeros(chosen.shape[:2], dtype=bool) for layer, chosen in expected.items()}
    for part in found:
        positions = np.arange(part.first_position, part.first_position + len(part.chosen_SBE))
        where = np.ix_(part.samples, positions)
        same_BS = (expected[part.layer][where] == part.chosen_SBE.transpose(1, 0, 2)).all(axis=2)
        right[part.layer][where] |= same_BS
        wrong[part.layer][where] |= ~same_BS
    return sum(int((wrong[layer] | ~right[layer]).sum()) for layer in expected)


def unlike(found: Mapping[str, Any], expected: Mapping[str, Any]) -> int:
    """Counts and biases of experts that are not exactly those expected."""
    return sum(int(np.not_equal(_flat(found[key]), _flat(value)).sum()) for key, value in expected.items())


def _flat(value: Any) -> np.ndarray:
    """A number, or those of all layers, which may have unlike numbers of experts."""
    return np.hstack(value) if isinstance(value, list) else np.asarray(value)
