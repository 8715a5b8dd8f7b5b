from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recipes.config import OptimizerName
from tools.conformance import compare
from tools.conformance.compare import Box, Measured, Reference, Routed, Worst


def box(name, offsets, values):
    return Box(name, tuple(offsets), np.asarray(values, dtype=np.float32))


EXPECTED = {"a": np.array([[3.0, 0.0], [0.0, 4.0]]), "small": np.full(4, 1e-9), "b": np.array([1.0])}


class TestErrors:
    def test_relative_error_with_a_floor_for_tensors_near_zero(self):
        found = [
            box("a", (0, 0), [[3, 0.5]]),
            box("a", (1, 0), [[0, 4]]),
            box("b", (0,), [1]),
            box("small", (0,), [1e-4] * 4),
        ]
        errors = compare.tensor_errors(found, EXPECTED)
        assert errors["a"] == pytest.approx(0.5 / 5) and errors["b"] == 0
        rms = math.sqrt((25 + 1) / 9)
        assert errors["small"] == pytest.approx(2e-4 / (1e-3 * 2 * rms), rel=1e-3)
        assert compare.worst_of(errors) == (errors["a"], "a")

    def test_the_worst_copy_of_a_part_counts(self):
        parts = [box("a", (1, 0), [[0, 4]]), box("b", (0,), [1]), box("small", (0,), [0] * 4)]
        right, wrong = box("a", (0, 0), [[3, 0]]), box("a", (0, 0), [[3, 5]])
        for copies in ([right, wrong], [wrong, right], [wrong, wrong]):
            assert compare.tensor_errors([*parts, *copies], EXPECTED)["a"] == pytest.approx(1.0)

    def test_a_tensor_that_is_not_covered_or_not_finite_is_infinitely_wrong(self):
        errors = compare.tensor_errors([box("a", (0, 0), [[3, 0]]), box("b", (0,), [np.nan])], EXPECTED)
        assert errors == {"a": math.inf, "b": math.inf, "small": math.inf}

    def test_replicas_are_compared_bit_by_bit(self):
        same = [box("a", (0,), [1, 2]), box("a", (0,), [1, 2]), box("a", (2,), [5, 6]), box("b", (0,), [1, 2])]
        assert compare.replica_error(same) == (0.0, "")
        error, name = compare.replica_error([*same, box("a", (2,), [5, 6.001])])
        assert name == "a" and error == pytest.approx(0.001 / math.hypot(5, 6), rel=1e-3)
        next_up = np.nextafter(np.float32(1), np.float32(2))
        assert 0 < compare.replica_error([*same, box("b", (0,), [next_up, 2])]).error < 1e-7
        assert compare.replica_error([box("a", (0,), [0.0]), box("a", (0,), [-0.0])]).error > 0
        assert compare.replica_error([box("a", (0,), [0.0]), box("a", (0,), [np.nan])]) == (math.inf, "a")

    def test_numbers_of_ranks(self):
        assert compare.relative([2.0, 2.002], 2.0) == pytest.approx(1e-3)
        assert compare.relative([2.0, math.nan], 2.0) == math.inf

    def test_a_wrong_norm_is_explained_by_what_it_misses(self):
        random = np.random.default_rng(1)
        names = [f"layers.1.moe.experts.{expert}.{part}.weight" for expert in range(4) for part in ("up", "down")]
        gradients = {name: random.normal(size=(5, 7)) for name in ["embedding.weight", *names]}
        squares = {name: np.square(gradient).sum() for name, gradient in gradients.items()}
        total = sum(squares.values())

        def without(*names):
            return math.sqrt(total - sum(squares[name] for name in names))

        assert compare.explain_norm(without(names[3]), gradients) == names[3]
        assert compare.explain_norm(without(names[4], names[5]), gradients) == "layers.1.moe.experts.2"
        assert compare.explain_norm(without(*names), gradients) == "layers.1.moe.experts"
        assert compare.explain_norm(math.sqrt(total + squares[names[0]]), gradients) == names[0]
        assert compare.explain_norm(math.sqrt(total), gradients) == ""
        assert compare.explain_norm(math.inf, gradients) == ""

    def test_flips_count_tokens_with_other_experts_or_none(self):
        expected = {
            1: np.sort(np.random.default_rng(1).permuted(np.tile(np.arange(8), (4, 6, 1)), axis=2)[..., :2], axis=2)
        }

        def seen(samples, first, last):
            ids = expected[1][samples][:, first:last].transpose(1, 0, 2).copy()
            return Routed(1, first, np.array(samples), ids)

        parts = [seen([0, 2], 0, 3), seen([0, 2], 3, 6), seen([1, 3], 0, 6), seen([1, 3], 0, 6)]
        assert compare.route_flips(parts, expected) == 0
        assert compare.route_flips(parts[1:], expected) == 6
        parts[3].chosen_SBE[4, 1, 0] ^= True  # one of two that saw it
        assert compare.route_flips(parts, expected) == 1


def measured(reference, **changes):
    """One rank that holds everything and agrees with the reference."""

    def whole(tensors):
        return [Box(name, (0,) * tensor.ndim, tensor.astype(np.float32)) for name, tensor in tensors.items()]

    updated = {
        name: whole({key: reference.start[key] + update for key, update in updates.items()})
        for name, updates in reference.updates.items()
    }
    right = Measured(
        3.0,
        {"z_loss": 2.0},
        reference.norm,
        whole(reference.start),
        whole(reference.gradients),
        updated,
        updated,
        [],
        reference.experts,
    )
    return right._replace(**changes)


@pytest.fixture
def reference():
    random = np.random.default_rng(1)
    tensors = [{name: random.normal(size=(8, 8)) for name in ("x", "y")} for _ in range(4)]
    start, gradients = tensors[:2]
    norm = math.sqrt(sum(np.square(tensor).sum() for tensor in gradients.values()))
    updates = dict(zip(OptimizerName, tensors[2:], strict=True))
    settings = {"clip_grad": 0.0, "adam_eps": 1.0, "lr": dict.fromkeys(OptimizerName, 1.0)}
    experts = {"bias": [[0.5, 0.25], [0.0, 0.0]], "steps": 3}
    return Reference(3.0, {"z_loss": 2.0}, norm, start, gradients, {}, updates=updates, experts=experts, **settings)


class TestCompare:
    def test_a_layout_that_agrees(self, reference):
        errors = compare.compare([measured(reference)] * 2, reference)
        assert errors.within(compare.BOUNDS) and errors.replica_err == 0 and errors.worst_tensor in ("x", "y")

    @pytest.mark.parametrize(
        ("column", "changes"),
        [
            ("loss_err", {"lm_loss": 3.00001}),
            ("aux_err", {"aux": {"z_loss": 2.00001}}),
            ("route_flips", {"experts": {"bias": [[0.5, 0.25], [0.0, 1e-9]], "steps": 3}}),
            ("norm_err", {"norm": 1.0}),
            ("checkpoint_err", {"checkpoint": Worst(1e-9, "exp_avg/x")}),
        ],
    )
    def test_a_number_of_one_rank_that_is_off(self, reference, column, changes):
        errors = compare.compare([measured(reference), measured(reference, **changes)], reference)
        assert not errors.within(compare.BOUNDS)
        beyond = [name for name, bound in compare.BOUNDS.items() if getattr(errors, name) > bound]
        assert beyond == [column]

    def test_where_the_trouble_begins_is_named(self, reference):
        def scaled(boxes, name, factor):
            return [box._replace(values=box.values * np.float32(factor)) if box.name == name else box for box in boxes]

        right = measured(reference)
        off = right.updated | {OptimizerName.sgd: scaled(right.updated[OptimizerName.sgd], "y", 3)}
        wrong_update = right._replace(updated=off, held=off)
        errors = compare.compare([wrong_update], reference)
        assert (
            errors.worst_tensor == "y" and errors.sgd_err > 0.1 and errors.adamw_err < 1e-6 and errors.grad_err < 1e-6
        )
        wrong = wrong_update._replace(gradients=scaled(right.gradients, "x", 1.001))
        errors = compare.compare([wrong], reference)
        assert (
            errors.worst_tensor == "x" and errors.grad_err == pytest.approx(1e-3, rel=1e-2) and errors.replica_err == 0
        )
        errors = compare.compare([wrong, wrong._replace(start=scaled(right.start, "y", 1.00001))], reference)
        assert errors.worst_tensor == "y" and errors.replica_err == pytest.approx(1e-5, rel=0.1)
        errors = compare.compare([right._replace(held=off)], reference)
        assert errors.worst_tensor == "y" and errors.replica_err > 0.1, "a weight that is not its master"

    def test_bf16_is_judged_by_one_process_in_bf16(self, reference):
        def rounded(boxes):
            return [box._replace(values=torch.from_numpy(box.values).bfloat16().float().numpy()) for box in boxes]

        def moved(boxes, begin):
            """Final weights of the same updates from rounded weights."""
            pairs = zip(boxes, begin, strict=True)
            return [box._replace(values=one.values + box.values - reference.start[box.name]) for box, one in pairs]

        exact = measured(reference)
        start, gradients = rounded(exact.start), rounded(exact.gradients)
        masters = {name: moved(boxes, start) for name, boxes in exact.updated.items()}
        held = {name: rounded(boxes) for name, boxes in masters.items()}
        right = exact._replace(start=start, gradients=gradients, updated=masters, held=held)
        alone = compare.compare([right], reference, {})
        assert 1e-3 < alone.grad_median <= alone.grad_err < 4e-3 and alone.sgd_err < 1e-6
        bounds = compare.bf16_bounds(alone)
        assert compare.compare([right, right], reference, bounds).within(bounds)
        twice = [box._replace(values=box.values * np.float32(2)) for box in gradients]
        other = [box._replace(values=box.values + np.float32(1e-6)) for box in held[OptimizerName.sgd]]
        for wrong, column in (
            (right._replace(gradients=twice), "grad_err"),
            (right._replace(norm=2 * reference.norm), "norm_err"),
            (right._replace(updated=exact.updated | {OptimizerName.sgd: exact.start}), "sgd_err"),
        ):
            errors = compare.compare([wrong, wrong], reference, bounds)
            assert getattr(errors, column) > bounds[column] and not errors.within(bounds)
        unlike = right._replace(held=held | {OptimizerName.sgd: other})
        assert not compare.compare([right, unlike], reference, bounds).within(bounds)
