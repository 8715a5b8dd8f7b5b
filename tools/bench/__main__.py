"""`python -m tools.bench`: measured ratios against peers."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

EXAMPLES = """\
examples:
  python -m tools.bench train_step --json report/train_step.json
  python -m tools.bench train_step --rounds 12 model.num_layers=8 train.micro_batch_size=8 train.global_batch_size=8
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="Measure against peers in one run, in interleaved rounds; medians and interquartile ranges.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "benchmark",
        choices=["train_step", "moe_bookkeeping"],
        help="train_step: our step, bare mcore blocks, HF Llama; moe_bookkeeping: a step with and without expert metrics",
    )
    top.add_argument("overrides", nargs="*", help="settings as for recipes.pretrain; the default is experiment=dense")
    top.add_argument("--rounds", type=int, default=8, help="measured rounds (default 8)")
    top.add_argument("--repeats", type=int, default=3, help="calls per round and implementation (default 3)")
    top.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    top.add_argument("--json", type=Path, help="also write machine, settings and rows to this file")
    return top


def main() -> int:
    """Run one benchmark."""
    arguments = parser().parse_intermixed_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    from recipes.pretrain import compose

    try:
        experiment = "dense" if arguments.benchmark == "train_step" else "switch_8e"
        one_process = [f"experiment={experiment}", "train.micro_batch_size=16", "train.global_batch_size=16"]
        config = compose([*one_process, *arguments.overrides])
        from tools.bench import moe_bookkeeping, train_step

        if arguments.benchmark == "train_step":
            train_step.check(config)
            rows = train_step.measure(config, arguments.rounds, arguments.repeats)
        else:
            rows = moe_bookkeeping.measure(config, arguments.rounds, arguments.repeats)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _show(arguments.benchmark, rows)
    if arguments.json:
        from recipes.telemetry.environment import describe_environment

        report = {"benchmark": arguments.benchmark, "overrides": arguments.overrides, "rows": rows}
        report["environment"] = describe_environment([])
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


# Columns behind the speed: the key in the rows, its title, how a value and its range are written.
_COLUMNS = {
    "train_step": [
        ("ratio_to_hf", "ratio to HF", "{:.3f} ({:.3f})"),
        ("overhead", "overhead over bare mcore", "{:+.1%} ({:.1%})"),
    ],
    "moe_bookkeeping": [
        ("overhead", "overhead over without", "{:+.1%} ({:.1%})"),
        ("share_of_step", "recording's share of a step", "{:.2%} ({:.2%})"),
    ],
}


def _show(benchmark: str, rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="medians (interquartile ranges)", title_justify="left")
    table.add_column("implementation")
    table.add_column("tokens/s", justify="right")
    for _, title, _ in _COLUMNS[benchmark]:
        table.add_column(title, justify="right")
    for row in rows:
        cells = [text.format(row[key], row[f"{key}_iqr"]) for key, _, text in _COLUMNS[benchmark]]
        table.add_row(row["impl"], f"{row['tokens_per_second']:,.0f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
