"""Is every layout of a recipe the same training run?

The recipe is scaled down to CPU size with the same structure. For each layout of N ranks, fp32 training on the engine is compared
with plain autograd in one process on the same samples: language loss, auxiliary losses, the raw gradient of every logical
tensor, the gradient norm on every rank, the weights after 3 steps of SGD and of AdamW, the bits of all replicas, and the
experts that the router chose. The state is saved, and what the layout before has saved is loaded, bit for bit. In bf16 a layout
may err as much against fp32 as one process in bf16 does: by at most 2.5 times its median over tensors, and four times its worst.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from recipes.text import shown
from tools.arguments import Parser, file_path, integer, refuse

if TYPE_CHECKING:
    from rich.table import Table

    from recipes.config import Precision
    from tools.conformance.sweep import Plan, Row

_EPILOG = """exit code: 0 all layouts are equal to one process; 1 one is not; 2 bad input

The recipe's own parallel.*, zero.stage, zero.offload_optimizer and moe.backend do not matter: they are what is tried. A sample
also tries recomputation; all layouts have the recipe's.

examples:
  python -m tools.conformance experiment=switch_8e --world-size 2
  python -m tools.conformance experiment=dense model.share_embeddings_and_output_weights=false --world-size 4 --layouts all
  python -m tools.conformance experiment=top2_8e --world-size 4 --precision bf16
  python -m tools.conformance experiment=qwen3_30b_a3b_64gpu_h100_bf16 --world-size 4 --json report/qwen3.json
"""
_COLUMNS = {
    "loss_err": "loss",
    "aux_err": "aux loss",
    "grad_median": "median gradient",
    "grad_err": "gradient",
    "norm_err": "norm",
    "sgd_err": "SGD",
    "adamw_err": "AdamW",
    "replica_err": "replicas",
    "checkpoint_err": "checkpoint",
    "route_flips": "flips",
}


def _layouts(text: str) -> str:
    if text not in ("sample", "all") and not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{shown(text)}: must be sample, all, or a number of layouts from 1 up")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "python -m tools.conformance",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="the recipe, as for recipes.pretrain")
    parser.add_argument(
        "--world-size", type=integer(1, 4096), required=True, metavar="N", help="ranks: processes on this machine"
    )
    parser.add_argument(
        "--layouts",
        type=_layouts,
        default="sample",
        metavar="sample|all|NUMBER",
        help="sample: every pair of options that can occur together; NUMBER: so many of the sample (default: sample)",
    )
    parser.add_argument(
        "--seed",
        type=integer(0),
        default=1234,
        metavar="N",
        help="of weights, samples, choice of layouts (default: 1234)",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of the layouts (default: fp32, whatever the recipe says)",
    )
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write the results here")
    return parser


def _run(arguments: argparse.Namespace) -> list[Row]:
    from rich.console import Console

    from recipes.config import Precision
    from recipes.pretrain import compose
    from recipes.telemetry.environment import describe_environment
    from recipes.telemetry.summary import write_json
    from tools.conformance.sweep import plan

    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)  # now: a sweep takes minutes
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    recipe, precision = compose(arguments.overrides), Precision[arguments.precision]
    planned = plan(recipe, arguments.world_size, arguments.layouts, arguments.seed, precision)
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    console.print("scaled:", *planned.notes, sep="\n  ")
    rows = _swept(planned, console)
    out = Console()
    (out if out.is_terminal else Console(width=230)).print(table(planned, rows))
    if arguments.json:
        report = {"overrides": arguments.overrides, "seed": arguments.seed, "precision": precision.name}
        report |= {"scaled": planned.notes, "legal": planned.legal, "rows": [row.plain() for row in rows]}
        write_json(arguments.json, report | {"environment": describe_environment([])})
    return rows


def _swept(planned: Plan, console) -> list[Row]:
    """All rows, with a bar on a terminal, else a line for each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tools.conformance.sweep import sweep

    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("reference", total=len(planned.cases))
        for row in sweep(planned):
            rows.append(row)
            progress.update(task, advance=1, description=str(row.case))
            if not row.ok or not console.is_terminal:
                console.print(f"{len(rows)} of {len(planned.cases)}: {_words(row)}")
    return rows


def _words(row: Row) -> str:
    """A row in a line."""
    backend = "" if row.case.backend is None else f", {row.case.backend.name}"
    where = f"{row.case}{backend}, zero {row.case.layout.zero_stage}, {row.case.accumulation} micro steps"
    if row.errors is None:
        return f"{where}: {row.problem}"
    return f"{where}: {'equal' if row.ok else f'OFF, worst is {row.errors.worst_tensor}'} ({row.seconds:.1f} s)"


def table(planned: Plan, rows: Sequence[Row]) -> Table:
    """All rows; an error beyond its bound has an exclamation mark."""
    from rich.table import Table
    from rich.text import Text

    judged = [row for row in rows if row.bounds]
    equal = sum(row.ok for row in judged)
    claim = "equal one process" if planned.precision.name == "fp32" else "err as one process in bf16 does"
    title = f"{equal} of {len(judged)} layouts {claim} ({planned.legal} are legal on {planned.world_size} ranks)"
    shown = Table("layout", "backend", "zero", "micro steps", title=title, title_justify="left")
    columns = _columns(planned.precision)
    for header in columns.values():
        shown.add_column(header, justify="right")
    shown.add_column("worst tensor", overflow="fold")
    shown.add_column("s", justify="right")
    for row in rows:
        errors = row.errors
        values = ["" if errors is None else _value(getattr(errors, name), row.bounds.get(name)) for name in columns]
        last = row.problem if errors is None else errors.worst_tensor
        backend = "" if row.case.backend is None else row.case.backend.name
        first = [str(row.case), backend, str(row.case.layout.zero_stage), str(row.case.accumulation)]
        cells = [Text(cell or "") for cell in [*first, *values, last, f"{row.seconds:.1f}"]]
        shown.add_row(*cells, style=None if row.ok else "red")
    return shown


def _columns(precision: Precision) -> dict[str, str]:
    """Errors and their headers."""
    from recipes.config import Precision
    from tools.conformance.compare import BOUNDS, MEDIAN_FACTOR, WORST_FACTOR

    if precision is Precision.fp32:
        return {name: f"{_COLUMNS[name]}\n{f'<= {bound:.0e}' if bound else '0'}" for name, bound in BOUNDS.items()}
    limits = dict.fromkeys(_COLUMNS, f"<= {WORST_FACTOR} x alone")
    limits |= {
        "grad_median": f"<= {MEDIAN_FACTOR} x alone",
        "replica_err": "0",
        "checkpoint_err": "0",
        "route_flips": "",
    }
    return {name: f"{header}\n{limits[name]}" for name, header in _COLUMNS.items()}


def _value(error: float, bound: float | None) -> str:
    shown = str(error) if isinstance(error, int) or not error else f"{error:.1e}"
    return shown.removesuffix(".0") + ("" if bound is None or error <= bound else " !")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when a layout is not equal to one process; 2 on bad input."""
    arguments = _parser().parse_intermixed_args(argv)
    from tools.arms import stoppable
    from tools.conformance.pool import JobFailed

    try:
        with stoppable():
            rows = _run(arguments)
    except (ValueError, OSError) as error:
        return refuse(error)
    except JobFailed as failure:
        print(f"error: the reference: {failure}", file=sys.stderr)
        return 1
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
