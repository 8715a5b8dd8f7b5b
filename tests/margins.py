"""How much of its bound each numeric check uses: errors / bounds of a whole run of the suite, largest first.

    TEST_MARGINS=margins.txt python -m pytest --assert=plain; python -m tests.margins margins.txt

A check that comes near its bound on one processor fails on another. Recorded are, in test modules and in the ranks that they
start, `assert error < bound` (numbers or tensors), `pytest.approx`, `torch.testing.assert_close` and numpy's `assert_allclose`.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import numbers
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ENVIRONMENT = "TEST_MARGINS"  # the file that margins are added to; unset: none are recorded
_LEAST = 0.01  # margins below are not worth a line
_LARGEST_BOUND = 0.05  # a comparison with a larger number is no tolerance
_COMPARE = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}


def install_if_asked() -> None:
    """Instrument test modules that are imported from now on, and the comparing functions of the libraries."""
    if _ENVIRONMENT in os.environ and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        _wrap_libraries()


def record(error: float, bound: float, where: str) -> None:
    """Add a line: how much of the bound was used, where."""
    if 0 < bound <= _LARGEST_BOUND and error >= _LEAST * bound:
        with open(os.environ[_ENVIRONMENT], "a") as file:
            file.write(f"{error / bound:.3f}\t{error:.2e}\t{bound:.2e}\t{where}\n")


def _compare(left: Any, right: Any, name: str, where: str) -> Any:
    small, large = (left, right) if name in ("lt", "le") else (right, left)
    for error, bound in _pairs(small, large):
        record(error, bound, where)
    return getattr(operator, name)(left, right)


def _pairs(error: Any, bound: Any) -> list[tuple[float, float]]:
    """Error and bound as numbers; of tensors those with the largest ratio."""
    import torch

    if isinstance(error, torch.Tensor) and error.numel() and error.is_floating_point():
        bounds = torch.as_tensor(bound, dtype=torch.float64).expand(error.shape).flatten()
        ratios = error.detach().double().flatten() / bounds.clamp(min=1e-300)
        worst = int(ratios.nan_to_num().argmax())
        return [(float(error.flatten()[worst]), float(bounds[worst]))]
    if isinstance(error, numbers.Real) and isinstance(bound, float) and not isinstance(error, int):
        return [(float(error), bound)]
    return []


class _Asserts(ast.NodeTransformer):
    """Comparisons of a test's assertions report their sides."""

    def __init__(self, path: str):
        self.path, self.inside = os.path.relpath(path), False

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        self.inside = True
        node.test = self.visit(node.test)
        self.inside = False
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        name = _COMPARE.get(type(node.ops[0]))
        if not self.inside or len(node.ops) > 1 or name is None:
            return node
        where = [ast.Constant(name), ast.Constant(f"{self.path}:{node.lineno}")]
        call = ast.Call(ast.Name("__compare__", ast.Load()), [node.left, node.comparators[0], *where], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        tree = _Asserts(self.path).visit(ast.parse(self.get_data(self.path)))
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: Any) -> None:
        module.__compare__ = _compare
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if not fullname.startswith("tests."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def _caller() -> str:
    """The line of a test or of a module of its that led here."""
    frame = sys._getframe(1)
    while frame.f_back and (
        f"{os.sep}tests{os.sep}" not in frame.f_code.co_filename or __file__ == frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"


def _wrap_libraries() -> None:
    import numpy as np
    import pytest
    import torch

    def recorded(function: Callable, rtol: float | None, atol: float | None) -> Callable:
        @functools.wraps(function)
        def wrapper(actual: Any, expected: Any, *args: Any, **options: Any) -> Any:
            given = dict(zip(("rtol", "atol"), args, strict=False)) | options
            _record_close(actual, expected, given.get("rtol", rtol), given.get("atol", atol))
            return function(actual, expected, *args, **options)

        return wrapper

    torch.testing.assert_close = recorded(torch.testing.assert_close, None, None)
    torch.allclose = recorded(torch.allclose, 1e-5, 1e-8)
    np.testing.assert_allclose = recorded(np.testing.assert_allclose, 1e-7, 0.0)
    np.allclose = recorded(np.allclose, 1e-5, 1e-8)
    scalar = type(pytest.approx(1.0))
    equal = scalar.__eq__

    def compare(self: Any, actual: Any) -> bool:
        if (
            isinstance(actual, numbers.Real)
            and isinstance(self.expected, numbers.Real)
            and self.expected == self.expected
        ):
            # Relative, so that tolerances of large numbers count as such.
            size = max(abs(float(self.expected)), 1.0)
            record(abs(float(actual) - float(self.expected)) / size, float(self.tolerance) / size, _caller())
        return equal(self, actual)

    scalar.__eq__ = compare  # type: ignore[method-assign]


def _record_close(actual: Any, expected: Any, rtol: float | None, atol: float | None) -> None:
    import numpy as np
    import torch

    if isinstance(expected, Mapping):
        for key in expected:
            _record_close(actual[key], expected[key], rtol, atol)
        return
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        if not all(isinstance(part, numbers.Real) for part in expected):
            for one, other in zip(actual, expected, strict=False):
                _record_close(one, other, rtol, atol)
            return
        actual, expected = np.asarray(actual), np.asarray(expected)
    actual, expected = torch.as_tensor(actual).detach(), torch.as_tensor(expected).detach()
    if not expected.numel() or not expected.is_floating_point() or actual.shape != expected.shape:
        return
    if rtol is None or atol is None:
        rtol, atol = torch.testing._comparison.default_tolerances(actual, expected)
    difference = (actual.double() - expected.double()).abs().flatten()
    allowed = atol + rtol * expected.double().abs().flatten()
    worst = int((difference / allowed.clamp(min=1e-300)).nan_to_num().argmax())
    size = max(float(expected.double().abs().flatten()[worst]), 1.0)
    record(float(difference[worst]) / size, float(allowed[worst]) / size, _caller())


def main(path: str) -> None:
    """Print the largest margin of each place, and how many places there are."""
    largest: dict[str, tuple[float, str]] = {}
    with open(path) as file:
        for line in file:
            ratio, error, bound, where = line.rstrip("\n").split("\t")
            if float(ratio) > 1:  # expected to fail: a planted fault
                continue
            largest[where] = max(largest.get(where, (0.0, "")), (float(ratio), f"{error} of {bound}"))
    for where, (ratio, text) in sorted(largest.items(), key=lambda entry: -entry[1][0]):
        print(f"{ratio:7.3f}  {text}  {where}")
    print(
        f"{sum(ratio > 0.5 for ratio, _ in largest.values())} of {len(largest)} places use more than half of their bound"
    )


if __name__ == "__main__":
    main(sys.argv[1])
