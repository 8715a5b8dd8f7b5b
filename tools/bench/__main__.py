"""`python -m tools.bench`: measured ratios against peers."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  python -m tools.bench train_step --json report/train_step.json
  python -m tools.bench train_step --rounds 12 model.num_layers=8 train.micro_batch_size=8 train.global_batch_size=8
  python -m tools.bench moe_layer --json report/moe_layer.json
  python -m tools.bench moe_layer experts=32 tokens=4096 topk=2 --device cuda
"""

_ROUNDS = {"train_step": 8, "moe_bookkeeping": 8, "moe_layer": 30}
_REPEATS = {"train_step": 3, "moe_bookkeeping": 3, "moe_layer": 1}


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
        choices=list(_ROUNDS),
        help="train_step: our step, bare mcore blocks, HF Llama; moe_bookkeeping: a step with and without expert metrics; "
        "moe_layer: our layer with experts, DeepSpeed's, mcore's, HF's",
    )
    top.add_argument(
        "overrides",
        nargs="*",
        help="settings as for recipes.pretrain; of moe_layer: experts=, tokens=, topk=, hidden=, ffn= (default: five shapes)",
    )
    top.add_argument("--rounds", type=int, help="measured rounds (default 8; moe_layer 30)")
    top.add_argument("--repeats", type=int, help="calls per round and implementation (default 3; moe_layer 1)")
    top.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    top.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of moe_layer; cuda is measured in bf16")
    top.add_argument("--json", type=Path, help="also write machine, settings and rows to this file")
    return top


def main() -> int:
    """Run one benchmark."""
    arguments = parser().parse_intermixed_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    try:
        rows = _measure(arguments)
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


def _measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rounds = _ROUNDS[arguments.benchmark] if arguments.rounds is None else arguments.rounds
    repeats = _REPEATS[arguments.benchmark] if arguments.repeats is None else arguments.repeats
    if min(rounds, repeats) < 1:
        raise ValueError(f"--rounds {rounds}, --repeats {repeats}: must be at least 1")
    if arguments.benchmark == "moe_layer":
        from tools.bench import moe_layer

        return moe_layer.measure(moe_layer.parse(arguments.overrides, arguments.device), rounds, repeats)
    from recipes.pretrain import compose
    from tools.bench import moe_bookkeeping, train_step

    experiment = "dense" if arguments.benchmark == "train_step" else "switch_8e"
    one_process = [f"experiment={experiment}", "train.micro_batch_size=16", "train.global_batch_size=16"]
    config = compose([*one_process, *arguments.overrides])
    if arguments.benchmark == "train_step":
        train_step.check(config)
        return train_step.measure(config, rounds, repeats)
    return moe_bookkeeping.measure(config, rounds, repeats)


# Columns: the title, and what is written into it, made from the keys of a row.
_SPEED = ("tokens/s", "{tokens_per_second:,.0f}")
_COLUMNS = {
    "train_step": [
        _SPEED,
        ("ratio to HF", "{ratio_to_hf:.3f} ({ratio_to_hf_iqr:.3f})"),
        ("overhead over bare mcore", "{overhead:+.1%} ({overhead_iqr:.1%})"),
    ],
    "moe_bookkeeping": [
        _SPEED,
        ("overhead over without", "{overhead:+.1%} ({overhead_iqr:.1%})"),
        ("recording's share of a step", "{share_of_step:.2%} ({share_of_step_iqr:.2%})"),
    ],
    "moe_layer": [
        ("experts", "{experts}"),
        ("top-k", "{topk}"),
        ("tokens", "{tokens}"),
        ("time over dense", "{time_over_dense:.3f} ({iqr:.3f})"),
        _SPEED,
        ("saved MB", "{saved_megabytes:.1f}"),
    ],
}


def _show(benchmark: str, rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = list(_COLUMNS[benchmark])
    if any(row.get("mfu") is not None for row in rows):
        columns.append(("MFU", "{mfu:.1%}"))
    table = Table(title="medians (interquartile ranges)", title_justify="left")
    table.add_column("implementation")
    for title, _ in columns:
        table.add_column(title, justify="right")
    shape = None
    for row in rows:
        if shape is not None and shape != _shape(row):
            table.add_section()
        shape = _shape(row)
        values = row | {"saved_megabytes": row.get("saved_bytes", 0) / 1e6}
        table.add_row(row["impl"], *(text.format(**values) for _, text in columns))
    Console().print(table)


def _shape(row: dict) -> tuple:
    return tuple(row.get(key) for key in ("experts", "topk", "tokens"))


if __name__ == "__main__":
    sys.exit(main())
