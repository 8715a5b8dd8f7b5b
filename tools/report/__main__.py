"""Pictures and one HTML page from run folders: losses against steps and time, load of the experts, learning rate.

Reads config.yaml, metrics.jsonl and summary.json of each folder; runs that are not finished are shown as far as they
are. For runs with experts the newest checkpoint is opened to see which held-out text goes to which expert; data.path of
the run must then be found from here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tools.arguments import Parser, file_path, refuse, unicode_text

if TYPE_CHECKING:
    from rich.console import Console

    from tools.report.domains import DomainUse
    from tools.report.runs import Run

_EPILOG = """examples:
  python -m tools.report outputs/dense outputs/switch_8e --out report/
  python -m tools.report outputs/* --out report/ --no-domains
  python -m tools.report outputs/a outputs/b --names "lr 1e-3" "lr 3e-3" --json report/runs.json
"""


def report(runs: Sequence[Run], out: Path, console: Console, by_domain: bool = True) -> Path:
    """Write pictures and page of the runs to the folder `out`; returns the page. Notes and progress go to `console`."""
    from rich.progress import Progress

    from tools.report import page

    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("reading", total=None)
        uses, notes = _domain_uses(runs, console) if by_domain else ({}, [])
        of_experts = sum((run.counts_TNE is not None) + (run.gates_TNE is not None) for run in runs)
        progress.update(task, description="drawing", total=4 + (of_experts > 0) + of_experts + len(uses))
        path = page.write(runs, uses, notes, out, lambda: progress.advance(task))
    console.print(f"page {path}")
    return path


def _domain_uses(runs: Sequence[Run], console: Console) -> tuple[dict[int, DomainUse], list[str]]:
    """By number of the run, and for each run without it the reason."""
    from tools.report.domains import domain_use

    uses, notes = {}, []
    for number, run in enumerate(runs):
        if run.counts_TNE is None:
            continue
        try:
            uses[number] = domain_use(run.folder, console.print)
        except ValueError as error:
            notes.append(f"{run.name}: experts by domain are left out: {error}")
            console.print(notes[-1])
    return uses, notes


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "python -m tools.report",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", type=file_path, nargs="+", metavar="RUN_DIR", help="folder of a run")
    parser.add_argument("--out", type=file_path, default=Path("report"), metavar="FOLDER", help="(default: report)")
    parser.add_argument(
        "--names",
        nargs="+",
        type=unicode_text,
        metavar="NAME",
        help="one for each run (default: run.name, or its folder)",
    )
    parser.add_argument("--no-domains", action="store_true", help="open no checkpoint, leave out experts by domain")
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write the table of the runs here")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 on bad input."""
    arguments = _parser().parse_args(argv)
    from rich.console import Console

    from recipes.telemetry.summary import write_json
    from tools.report.compare import row
    from tools.report.runs import read_runs

    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    try:
        runs = read_runs(arguments.runs, arguments.names)
        report(runs, arguments.out, console, by_domain=not arguments.no_domains)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(arguments.json, {"rows": [row(run) for run in runs]})
    except (ValueError, OSError) as error:
        return refuse(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
