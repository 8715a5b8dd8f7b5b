"""`python -m tools.bench`: measured ratios against peers."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from typing import Any

from tools.arguments import Parser, file_path, integer, refuse

EXAMPLES = """\
examples:
  python -m tools.bench train_step --json report/train_step.json
  python -m tools.bench train_step --rounds 12 model.num_layers=8 train.micro_batch_size=8 train.global_batch_size=8
  python -m tools.bench moe_layer --json report/moe_layer.json
  python -m tools.bench moe_layer --only ours_grouped
  python -m tools.bench moe_layer experts=32 tokens=4096 topk=2 --device cuda
"""

# Rounds, and calls per round and implementation.
_DEFAULTS = {"train_step": (8, 3), "moe_bookkeeping": (8, 3), "moe_layer": (30, 1), "moe_skew": (30, 1)}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(
        prog="python -m tools.bench",
        description="Measure against peers in one run, in interleaved rounds; medians and interquartile ranges.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "benchmark",
        choices=list(_DEFAULTS),
        help="train_step: our step, bare mcore blocks, HF Llama or Mixtral; moe_bookkeeping: a step with and without expert "
        "metrics; moe_layer: our layer with experts, DeepSpeed's, mcore's, HF's; moe_skew: ours on two ranks, tokens spread "
        "evenly and by Zipf's law",
    )
    top.add_argument(
        "overrides",
        nargs="*",
        help="settings as for recipes.pretrain (train_step: without any, three models); of moe_layer and moe_skew: experts=, "
        "tokens=, topk=, hidden=, ffn=",
    )
    top.add_argument("--rounds", type=integer(1), help="measured rounds (default 8; moe_layer, moe_skew 30)")
    top.add_argument(
        "--repeats", type=integer(1), help="calls per round and implementation (default 3; moe_layer, moe_skew 1)"
    )
    top.add_argument("--threads", type=integer(1, 4096), default=1, help="torch threads (default 1)")
    top.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of moe_layer; cuda is measured in bf16")
    top.add_argument(
        "--only",
        metavar="A,B",
        help="of moe_layer: these implementations and dense (ours_grouped, mcore ...): what one frees may serve the others",
    )
    top.add_argument("--json", type=file_path, help="also write machine, settings and rows to this file")
    return top


def main() -> int:
    """Run one benchmark."""
    arguments = parser().parse_intermixed_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    try:
        rows = _measure(arguments)
    except ValueError as error:
        return refuse(error)
    _show(arguments.benchmark, rows)
    if arguments.json:
        from recipes.telemetry.environment import describe_environment

        report = {"benchmark": arguments.benchmark, "overrides": arguments.overrides, "rows": rows}
        report["environment"] = describe_environment([])
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rounds, repeats = _DEFAULTS[arguments.benchmark]
    rounds = rounds if arguments.rounds is None else arguments.rounds
    repeats = repeats if arguments.repeats is None else arguments.repeats
    if min(rounds, repeats) < 1:
        raise ValueError(f"--rounds {rounds}, --repeats {repeats}: must be at least 1")
    if arguments.benchmark == "moe_layer":
        from tools.bench import moe_layer

        shapes, names = moe_layer.parse(arguments.overrides, arguments.device), moe_layer.chosen(arguments.only)
        return moe_layer.measure(shapes, rounds, repeats, names)
    if arguments.benchmark == "moe_skew":
        from tools.bench import moe_layer, moe_skew

        given = arguments.overrides or ["experts=8", "tokens=2048"]
        return moe_skew.measure(moe_layer.parse(given, "cpu")[0], rounds, repeats)
    from recipes.pretrain import compose
    from tools.bench import moe_bookkeeping, train_step

    one_process = ["train.micro_batch_size=16", "train.global_batch_size=16"]
    if arguments.benchmark == "moe_bookkeeping":
        config = compose(["experiment=switch_8e", *one_process, *arguments.overrides])
        return moe_bookkeeping.measure(config, rounds, repeats)
    chosen = train_step.STANDARD
    if arguments.overrides:
        chosen = {"given": ["experiment=dense", *arguments.overrides]}
    configs = {name: compose([*one_process, *overrides]) for name, overrides in chosen.items()}
    for config in configs.values():
        train_step.check(config)
    return train_step.measure(configs, rounds, repeats)


# Columns: the title, and what is written into it, made from the keys of a row.
_SPEED = ("tokens/s", "{tokens_per_second:,.0f}")
_COLUMNS = {
    "train_step": [
        _SPEED,
        ("ratio to HF", "{ratio_to_hf:.3f} ({ratio_to_hf_iqr:.3f})"),
        ("over bare mcore", "{overhead:+.1%} ({overhead_iqr:.1%})"),
    ],
    "moe_bookkeeping": [
        _SPEED,
        ("overhead over without", "{overhead:+.1%} ({overhead_iqr:.1%})"),
        ("recording's share of a step", "{share_of_step:.2%} ({share_of_step_iqr:.2%})"),
    ],
    "moe_layer": [
        ("time over dense", "{time_over_dense:.3f} ({iqr:.3f})"),
        _SPEED,
        ("saved bytes", "{saved_bytes:,}"),
    ],
    "moe_skew": [
        ("time over even", "{time_over_even:.3f} ({iqr:.3f})"),
        _SPEED,
        ("rows of each rank", "{rows}"),
        ("saved bytes of each rank", "{saved_bytes}"),
    ],
}
_TITLES = {
    "train_step": "{model}",
    "moe_layer": "{experts} experts, top-{topk}, {tokens} tokens",
    "moe_bookkeeping": "",
}
_TITLES["moe_skew"] = "{experts} experts on 2 ranks, {tokens} tokens each"


def _show(benchmark: str, rows: list[dict]) -> None:
    """A table for each title that the rows have."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print("medians (interquartile ranges)")
    columns = list(_COLUMNS[benchmark])
    if any(row.get("mfu") is not None for row in rows):
        columns.append(("MFU", "{mfu:.1%}"))
    for title, members in itertools.groupby(rows, lambda row: _TITLES[benchmark].format(**row)):
        table = Table(title=title, title_justify="left")
        table.add_column("implementation")
        for heading, _ in columns:
            table.add_column(heading, justify="right")
        for row in members:
            table.add_row(row["impl"], *(text.format(**row) for _, text in columns))
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())
