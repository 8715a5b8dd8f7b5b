"""Held-out loss against the number of experts at equal compute per token, over several seeds.

One expert is the dense model. Points whose run folder is complete are not run again, and unfinished ones go on from their
last checkpoint, so that the command can be stopped and repeated. Writes OUT/scaling.json, OUT/scaling.png and a table.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.arguments import file_path

if TYPE_CHECKING:
    from rich.table import Table

    from recipes.config import Config
    from tools.arms import Arm
    from tools.report.runs import Run

_EPILOG = """examples:
  python -m tools.scaling
  python -m tools.scaling --experts 1 4 --seeds 1 2 --steps 200 --out report/short --runs outputs/short
  python -m tools.scaling --experts 1 8 32 moe.moe_aux_loss_coeff=0.001 --runs outputs/small_aux
"""


def arm_of(experts: int, seed: int, runs: Path, overrides: Sequence[str]) -> Arm:
    """The run of one point and seed; experts are shared out over as many of the processes as divide them."""
    from tools.arms import NUM_PROCESSES, Arm, for_dense

    name = "dense" if experts == 1 else f"switch_{experts}e"
    if experts == 1:
        settings = for_dense(overrides)
    else:
        settings = [f"parallel.expert_model_parallel_size={math.gcd(experts, NUM_PROCESSES)}", *overrides]
    return Arm(name, seed, runs / f"{name}-seed{seed}", (f"experiment={name}", *settings), resume=True)


def complete(folder: Path, config: Config) -> bool:
    """Whether `folder` holds the whole run that `config` describes. Raises ValueError when it holds another one."""
    from recipes.config import to_plain
    from tools.report.runs import read_config, read_run

    if not (folder / "config.yaml").exists():
        return False
    wanted, found = to_plain(config), to_plain(read_config(folder))
    for plain in (wanted, found):
        plain["run"] |= {"dir": None, "resume": None}
    for group, values in wanted.items():
        for key, value in values.items():
            if value != (other := found[group][key]):
                raise ValueError(
                    f"{folder}: was run with {group}.{key}={other}, not {value}; choose another --runs FOLDER"
                )
    if not (folder / "summary.json").exists():
        return False
    summary = read_run(folder).summary
    return summary.get("steps") == config.train.steps and bool(summary.get("complete", True))


def points(runs: Sequence[Run]) -> dict[str, Any]:
    """`rows`: every run; `points`: mean and standard deviation (None for one seed) over the seeds of each number of experts."""
    from tools.report.compare import evaluated, row

    rows = [{"experts": run.config.moe.num_moe_experts or 1, **row(evaluated(run))} for run in runs]
    found = []
    for experts in sorted({entry["experts"] for entry in rows}):
        group = [entry for entry in rows if entry["experts"] == experts]
        losses = [entry["nll"] for entry in group]
        found.append(
            {key: group[0][key] for key in ("experts", "name", "total_params", "active_params", "flops_per_token")}
            | {"seeds": [entry["seed"] for entry in group], "nll": losses, "mean": statistics.mean(losses)}
            | {"standard_deviation": statistics.stdev(losses) if len(losses) > 1 else None}
            | {"tokens_per_second": statistics.mean(entry["tokens_per_second"] for entry in group)}
        )
    return {"rows": rows, "points": found}


def table(found: Sequence[dict[str, Any]]) -> Table:
    """The points as a table."""
    from rich.table import Table

    shown = Table("experts", title="held-out loss against experts (nats per token)", title_justify="left")
    for header in ("parameters", "active", "mean ± s.d.", "to first", "each seed"):
        shown.add_column(header, justify="right")
    for point in found:
        deviation = point["standard_deviation"]
        shown.add_row(
            str(point["experts"]),
            *(f"{point[key]:,}" for key in ("total_params", "active_params")),
            f"{point['mean']:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}"),
            f"{point['mean'] - found[0]['mean']:+.4f}",
            " ".join(f"{nll:.4f}" for nll in point["nll"]),
        )
    return shown


def _parser() -> argparse.ArgumentParser:
    from tools.arms import Numbers, parser

    top = parser("tools.scaling", __doc__, _EPILOG)
    top.add_argument(
        "--experts", nargs="+", action=Numbers, default=[1, 4, 8, 16], metavar="N", help="(default: 1 4 8 16)"
    )
    top.add_argument("--seeds", nargs="+", action=Numbers, default=[1, 2, 3], metavar="SEED", help="(default: 1 2 3)")
    top.add_argument(
        "--out", type=file_path, default=Path("report/scaling"), metavar="FOLDER", help="(default: report/scaling)"
    )
    top.set_defaults(runs=Path("outputs/scaling"))
    return top


def _run(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from recipes.files import replace_bytes
    from recipes.telemetry.summary import write_json
    from tools.arms import described, shared_overrides, train
    from tools.report import figures
    from tools.report.runs import read_run

    overrides = shared_overrides(arguments)
    if any("num_moe_experts_per_layer" in override for override in overrides):
        raise ValueError(
            "moe.num_moe_experts_per_layer: a point has one number of experts; use tools.report for such runs"
        )
    if 0 in arguments.experts:
        raise ValueError("--experts 0: must be at least 1, which is the dense model")
    # Seed by seed: stopped early, there are still all points of some seeds.
    arms = [arm_of(n, seed, arguments.runs, overrides) for seed in arguments.seeds for n in arguments.experts]
    configs = [described(arm) for arm in arms]
    if not configs[0].train.eval_samples:
        raise ValueError("train.eval_samples=0: the comparison is about held-out loss; leave the override out")
    done = [complete(arm.folder, config) for arm, config in zip(arms, configs, strict=True)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    for number, (arm, there) in enumerate(zip(arms, done, strict=True), start=1):
        console.print(f"run {number} of {len(arms)}: {arm.name}, seed {arm.seed}{': complete' if there else ''}")
        if not there:
            train(arm)
    results = points([read_run(arm.folder) for arm in arms])
    environment = json.loads((arms[0].folder / "environment.json").read_text(encoding="utf-8"))
    path = arguments.json or arguments.out / "scaling.json"
    write_json(path, {"overrides": overrides, **results, "environment": environment})
    losses = {point["experts"]: point["nll"] for point in results["points"]}
    png = figures.render(
        lambda: figures.scaling(losses, "experts per layer with experts (1: dense)", "held-out nll (nats per token)")
    )
    replace_bytes(arguments.out / "scaling.png", png)
    Console().print(table(results["points"]))
    console.print(f"results {path}, figure {arguments.out / 'scaling.png'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 on bad input; that of the launcher when a run fails."""
    arguments = _parser().parse_intermixed_args(argv)
    from tools.arms import run_command

    return run_command(_run, arguments)


if __name__ == "__main__":
    sys.exit(main())
