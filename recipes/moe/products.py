"""out = a @ b, as experts need it: few rows, and matrices that are not in the cache.

In fp32 on x86 by `products.cpp`, which the machine's compiler makes ready when it is first needed, and which must agree with
torch on small products before it is used; otherwise, and where there is no compiler, by torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from recipes.moe.compiled import cache_folder, cached, loadable

SOURCE = Path(__file__).with_name("products.cpp")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
_COMPILE_S = 120  # it takes one to two


@dataclass(frozen=True)
class Product:
    """One way to multiply. `run` takes what the call takes, all of it and in its order."""

    run: Callable[..., None]

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        *,
        a_rows: torch.Tensor | None = None,
        b_rows: torch.Tensor | None = None,
        slope_at: torch.Tensor | None = None,
        gelu: torch.Tensor | None = None,
        streams: bool = False,
    ) -> None:
        """Write a @ b to `out`; each has its rows or its columns side by side in memory.

        `a_rows`, `b_rows`: a[a_rows] is meant, or b[b_rows]. `slope_at`: `out` is multiplied by the slope of GELU at these numbers.
        `gelu`: GELU of `out`, or of the numbers of `slope_at`, goes there. `streams`: `out` is read late, so that it need not enter
        the cache.
        """
        self.run(a, b, out, a_rows, b_rows, slope_at, gelu, streams)


def product_for(*factors: torch.Tensor) -> Product:
    """How matrices like these are multiplied."""
    ours = all(factor.dtype is torch.float32 and factor.device.type == "cpu" for factor in factors)
    return (ours and kernel()) or by_torch


def _run_torch(a, b, out, a_rows, b_rows, slope_at, gelu, streams) -> None:
    a, b = (x if rows is None else x.index_select(0, rows) for x, rows in ((a, a_rows), (b, b_rows)))
    torch.mm(a, b, out=out)
    if gelu is not None:
        torch.ops.aten.gelu.out(out if slope_at is None else slope_at, out=gelu)
    if slope_at is not None:
        torch.ops.aten.gelu_backward.grad_input(out, slope_at, grad_input=out)


by_torch = Product(_run_torch)


@functools.cache
def kernel() -> Product | None:
    """`products.cpp`, compiled unless it was before. None on other processors, and, with a warning, where that does not succeed."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        return _verified(*_compiled())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: nobody's home
        if os.environ.get("RANK", "0") == "0":
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            how = "cannot be used" if isinstance(error, UnusableError) else "was not compiled"
            warnings.warn(
                f"experts use torch's matrix products, which take up to half as long again: {SOURCE.name} {how} "
                f"({said[0] if said else error}); it needs g++ or clang, or one that CXX names, and a cache folder that can be "
                "written, ~/.cache or XDG_CACHE_HOME",
                stacklevel=2,
            )
        return None


def _verified(path: Path, library: bytes) -> Product:
    """The product of a library. Raises UnusableError, and removes the file, so that the next process compiles it again."""
    here = loadable(library)
    try:
        product = load(here)
        check(product)
    except (OSError, AttributeError, UnusableError, MemoryError) as error:  # no attribute: a library of something else
        path.unlink(missing_ok=True)
        raise UnusableError(f"{path}: {str(error).removeprefix(f'{here}: ')}") from error
    return product


class UnusableError(RuntimeError):
    """A library that was compiled, but does not multiply as it should."""


# Rows, columns, depth: odd ones; more than one panel; rows of `out` in step with the lines of the cache, and several threads.
_SHAPES = ((5, 37, 19), (17, 70, 530), (64, 96, 256))
_TOLERANCE = 1e-5  # of the sum of absolute terms; fp32 rounds to some 1e-7 of it


@torch.no_grad()
def check(product: Product) -> None:
    """Multiply small matrices in every way there is. Raises UnusableError for a result that is not torch's in fp64.

    Takes less than 0.1 s.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")

    def factor(rows: int, columns: int, transposed: bool, gathered: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is handed over, and which of its rows are meant."""
        if transposed:
            return draw(columns, rows + 3)[:, :rows].t(), None
        if not gathered:
            return draw(rows, columns + 3)[:, :columns], None
        return draw(rows + 4, columns), torch.randperm(rows + 4, generator=generator, device="cpu")[:rows]

    flags = (False, True)
    for (rows, columns, depth), a_first, b_first, streams in itertools.product(_SHAPES, flags, flags, flags):
        a, a_rows = factor(rows, depth, a_first, gathered=not streams)
        b, b_rows = factor(depth, columns, b_first, gathered=not streams)
        left, right = (x.double() if which is None else x[which].double() for x, which in ((a, a_rows), (b, b_rows)))
        expected, bound = left @ right, _TOLERANCE * (left.abs() @ right.abs() + 1)
        around = torch.full((4, rows + 2, columns + 32), 7.0, dtype=torch.float32, device="cpu")
        plain, times_slope, gelu, x = inside = around[:, 1:-1, 16:-16]
        x.copy_(draw(rows, columns))
        product(a, b, plain, a_rows=a_rows, b_rows=b_rows, streams=streams)
        product(a, b, times_slope, a_rows=a_rows, b_rows=b_rows, slope_at=x, gelu=gelu, streams=streams)
        wide = x.double()
        slope = torch.ops.aten.gelu_backward(torch.ones_like(wide), wide)
        off = [plain - expected, times_slope - expected * slope, gelu - torch.nn.functional.gelu(wide)]
        product(a, b, plain, a_rows=a_rows, b_rows=b_rows, gelu=gelu, streams=streams)
        off += [plain - expected, gelu - torch.nn.functional.gelu(expected)]
        inside.fill_(7.0)
        if not all((each.abs() <= 2 * bound).all() for each in off) or not (around == 7.0).all():
            raise UnusableError(f"its product {rows} x {depth} x {columns} is wrong")


def load(library: Path) -> Product:
    """The product of a compiled library. Raises OSError where it can't be loaded."""
    multiply = ctypes.CDLL(str(library)).multiply
    number, address, flag = ctypes.c_long, ctypes.c_void_p, ctypes.c_int
    factor = (address, number, flag, address)
    multiply.argtypes = (number, number, number, *factor, *factor, address, number, flag, address, address)

    def at(x: torch.Tensor | None) -> int | None:
        return None if x is None else x.data_ptr()

    def run(a, b, out, a_rows, b_rows, slope_at, gelu, streams) -> None:
        (a_row, a_column), (b_row, b_column), (stride, one) = a.stride(), b.stride(), out.stride()
        assert one == 1 and 1 in (a_row, a_column) and 1 in (b_row, b_column), "rows or columns must lie side by side"
        assert (a_rows is None or a_column == 1) and (b_rows is None or b_column == 1), "only whole rows are gathered"
        (rows, columns), depth = out.shape, a.shape[1]
        a_lines = (a.data_ptr(), a_row, True) if a_column == 1 else (a.data_ptr(), a_column, False)
        b_lines = (b.data_ptr(), b_row, False) if b_column == 1 else (b.data_ptr(), b_column, True)
        of_a = (*a_lines, at(a_rows))
        of_b = (*b_lines, at(b_rows))
        assert all(x is None or x.stride() == (stride, 1) for x in (slope_at, gelu)), "GELU goes by the layout of `out`"
        if multiply(rows, columns, depth, *of_a, *of_b, out.data_ptr(), stride, streams, at(slope_at), at(gelu)):
            raise MemoryError(f"no memory to pack the matrices of a product {rows} x {depth} x {columns}")

    return Product(run)


def compile_to(library: Path, flags: Sequence[str]) -> None:
    """Compile `products.cpp`. Raises OSError without a compiler, SubprocessError where it fails."""
    named = os.environ.get("CXX")
    commands = [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]
    compiler = next((command for command in commands if shutil.which(command[0])), None)
    if compiler is None:
        raise OSError(f"there is no {' or '.join(command[0] for command in commands)}")
    library.parent.mkdir(parents=True, exist_ok=True)
    # Elsewhere first: another process may compile the same, or load it, at this moment.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, library.name)
        command = [*compiler, *flags, str(SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        made.replace(library)


def _compiled() -> tuple[Path, bytes]:
    """The library and its place in the user's cache; a home may be shared by unlike machines."""
    made_of = (SOURCE.read_text(), *FLAGS, os.environ.get("CXX", ""), platform.machine(), _processor())
    key = f"products-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}"
    return cached(cache_folder(), key, lambda library: compile_to(library, FLAGS))


def _processor() -> str:
    """What the processor can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
