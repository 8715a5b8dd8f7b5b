"""Train a dense model and a Switch mixture of 8 experts on the same data with the same compute per token, and compare.

Each runs on two processes, the experts shared out over both (expert parallelism). Ends with a table, OUT/quickstart.json,
and the pictures and page of tools.report in OUT; all numbers come from the run folders.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.arguments import file_path

if TYPE_CHECKING:
    from rich.table import Table

    from tools.arms import Arm
    from tools.report.runs import Run

_EPILOG = """examples:
  python -m tools.quickstart
  python -m tools.quickstart --steps 200 --seeds 1 2 3 --out report/short
  python -m tools.quickstart data=small zero=stage2 moe.aux_loss_scope=global_batch

Steps, learning rate, data and evaluation are shared: an override goes to both runs, one of moe.*
or of expert parallelism to the run that has experts.
"""
DENSE, SPARSE = "dense", "switch_8e"
_EXPERIMENTS = {
    DENSE: ("experiment=dense",),
    SPARSE: ("experiment=switch_8e", "parallel.expert_model_parallel_size=2"),
}
_EVALUATIONS = (
    10  # during a run, when the settings ask for none: points between which the time to a loss is interpolated
)
_LARGEST_COMPUTE_DIFFERENCE = 0.03
_CAPTION = (
    "nll: nats per token; to the dense loss: seconds until the held-out loss is that of the dense model at its end"
)
_DEFINITIONS = {
    "nll": "held-out loss after the last step, nats per token over the evaluation samples of all domains",
    "flops_per_token": "forward and backward, causal attention, router included (recipes/plan/size.py)",
    "seconds": "training: the sum of what the optimizer steps took; start-up, evaluation and checkpoints are not counted",
    "wall_seconds": "from start to end of rank 0, all included",
    "tokens_per_second": "tokens of all steps / seconds",
}


def arms(overrides: Sequence[str], seeds: Sequence[int], runs: Path) -> list[Arm]:
    """The dense and the sparse run of each seed, checked. Raises ValueError when one of them cannot run."""
    from tools.arms import Arm, described, for_dense

    found = []
    for seed in seeds:
        for name, experiment in _EXPERIMENTS.items():
            folder = runs / (name if len(seeds) == 1 else f"{name}-seed{seed}")
            shared = for_dense(overrides) if name == DENSE else overrides
            arm = Arm(name, seed, folder, (*experiment, *shared))
            train = described(arm).train
            if not train.eval_samples:
                raise ValueError("train.eval_samples=0: the comparison is about held-out loss; leave the override out")
            if not train.eval_interval:
                every = f"train.eval_interval={max(1, train.steps // _EVALUATIONS)}"
                arm = dataclasses.replace(arm, overrides=(*arm.overrides, every))
            found.append(arm)
    return found


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """Rows and differences (sparse - dense, by seed) of finished runs, which come as dense, sparse, dense, sparse, ..."""
    from tools.report.compare import TIME_TO_LOSS, evaluated, row

    rows, differences = [], []
    for dense, sparse in zip(map(evaluated, runs[::2]), map(evaluated, runs[1::2]), strict=True):
        pair = [row(dense, dense) | {"name": DENSE}, row(sparse, dense) | {"name": SPARSE}]
        rows += pair
        by_domain = {key: pair[1]["nll_by_domain"][key] - nll for key, nll in pair[0]["nll_by_domain"].items()}
        differences.append(
            {"seed": pair[0]["seed"], "nll": pair[1]["nll"] - pair[0]["nll"], "nll_by_domain": by_domain}
        )
    return {
        "rows": rows,
        "differences": differences,
        "definitions": _DEFINITIONS | {"seconds_to_dense_loss": TIME_TO_LOSS},
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line per quantity, a column per model; with several seeds means and standard deviations, and each seed's loss."""
    from rich.table import Table

    dense, sparse = ([row for row in rows if row["name"] == name] for name in (DENSE, SPARSE))
    seeds = [row["seed"] for row in dense]
    title = f"equal compute per token, {dense[0]['steps']:,} steps, " + (
        f"seed {seeds[0]}" if len(seeds) == 1 else f"mean ± standard deviation of {len(seeds)} seeds"
    )
    shown = Table("", title=title, title_justify="left", caption=_CAPTION, caption_justify="left")
    for header in (DENSE, SPARSE, f"{SPARSE} to {DENSE}"):
        shown.add_column(header, justify="right")

    def line(label: str, form: str, ratio: bool, value: Callable[[dict[str, Any]], float | None], seed=None) -> None:
        before, after = ([value(row) for row in group if seed in (None, row["seed"])] for group in (dense, sparse))
        shown.add_row(label, _cell(before, form), _cell(after, form), _relation(before, after, ratio))

    line("parameters", "{:,.0f}", True, itemgetter("total_params"))
    line("active parameters", "{:,.0f}", True, itemgetter("active_params"))
    line("FLOPs per token", "{:,.0f}", True, itemgetter("flops_per_token"))
    line("held-out nll", "{:.4f}", False, itemgetter("nll"))
    for seed in seeds if len(seeds) > 1 else []:
        line(f"  seed {seed}", "{:.4f}", False, itemgetter("nll"), seed)
    for domain in dense[0]["nll_by_domain"]:
        line(f"  {domain}", "{:.4f}", False, partial(_domain_nll, domain))
    line("tokens per second", "{:,.0f}", True, itemgetter("tokens_per_second"))
    line("seconds of training", "{:,.1f}", True, itemgetter("seconds"))
    line("  to the dense loss", "{:,.1f}", True, itemgetter("seconds_to_dense_loss"))
    return shown


def _domain_nll(domain: str, row: dict[str, Any]) -> float | None:
    return row["nll_by_domain"][domain]


def _cell(values: Sequence[float | None], form: str) -> str:
    """One value, or mean ± standard deviation when they differ."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "never" if len(values) == 1 else f"never in {len(values) - len(known)} of {len(values)}"
    mean = form.format(statistics.mean(known))
    return mean if len(set(known)) == 1 else f"{mean} ± {form.format(statistics.stdev(known))}"


def _relation(dense: Sequence[float | None], sparse: Sequence[float | None], ratio: bool) -> str:
    """Ratio or difference of the means; nothing when a value is not known."""
    before, after = ([value for value in values if value is not None] for values in (dense, sparse))
    if len(before) < len(dense) or len(after) < len(sparse):
        return ""
    old, new = statistics.mean(before), statistics.mean(after)
    return f"x {new / old:.3f}" if ratio else f"{new - old:+.4f}"


def _parser() -> argparse.ArgumentParser:
    from tools.arms import Numbers, parser

    top = parser("tools.quickstart", __doc__, _EPILOG)
    top.add_argument("--out", type=file_path, default=Path("report"), metavar="FOLDER", help="(default: report)")
    top.add_argument("--seeds", nargs="+", action=Numbers, default=[1], metavar="SEED", help="(default: 1)")
    return top


def _run(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from recipes.run_folder import discard, fresh_folder
    from recipes.telemetry.summary import write_json
    from tools.arms import shared_overrides, train
    from tools.report.__main__ import report
    from tools.report.runs import read_run

    overrides = shared_overrides(arguments)
    folder = arguments.runs or fresh_folder("quickstart")
    try:
        todo = arms(overrides, arguments.seeds, folder)
    except ValueError:
        if arguments.runs is None:
            discard(folder)
        raise
    arguments.out.mkdir(parents=True, exist_ok=True)  # not to find out after the training that it cannot be made
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    for number, arm in enumerate(todo, start=1):
        console.print(f"run {number} of {len(todo)}: {arm.name}, seed {arm.seed}")
        train(arm)
    several = len(arguments.seeds) > 1
    runs = [read_run(arm.folder, f"{arm.name} seed {arm.seed}" if several else arm.name) for arm in todo]
    environment = json.loads((todo[0].folder / "environment.json").read_text(encoding="utf-8"))
    results = compare(runs)
    path = arguments.json or arguments.out / "quickstart.json"
    write_json(path, {"overrides": overrides, **results, "environment": environment})
    Console().print(table(results["rows"]))
    ratio = results["rows"][1]["flops_per_token"] / results["rows"][0]["flops_per_token"]
    if abs(ratio - 1) > _LARGEST_COMPUTE_DIFFERENCE:
        console.print(f"note: not equal compute, {SPARSE} does {ratio:.2f} times that of {DENSE}; see the overrides")
    console.print(f"results {path}")
    report(runs, arguments.out, console)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 on bad input; that of the launcher when a run fails."""
    arguments = _parser().parse_intermixed_args(argv)
    from tools.arms import run_command

    return run_command(_run, arguments)


if __name__ == "__main__":
    sys.exit(main())
