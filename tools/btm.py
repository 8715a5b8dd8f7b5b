"""Branch-Train-Merge against dense training of equal compute, over several seeds: domains, random parts, clusters, mix.

Runs `recipes.btm` for each experiment and seed (nothing that is there already is made again), then writes OUT/btm_8domains.json,
pictures and a table: perplexities as multiples of the dense run's of the same experiment and seed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.arguments import file_path, unicode_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

_EPILOG = """examples:
  python -m tools.btm
  python -m tools.btm --seeds 1 --experiments btm_8domains --runs outputs/btm
  python -m tools.btm --seeds 1 2 --steps 200 --runs outputs/btm_short --out report/btm_short
"""
EXPERIMENTS = ("btm_8domains", "cbtm_8clusters", "btx_8domains")
_SHARED = (
    "split/domain",
    "seed",
    "dense",
)  # that experiments of a seed may have in common; those that differ are made anew
# What is expected of mean perplexities: experiment, model, another model, smallest and largest ratio of the two.
EXPECTED = (
    ("btm_8domains", "ensemble domain", "dense", 0.0, 0.97),
    ("btm_8domains", "ensemble random", "dense", 1.02, 9.0),
    ("btm_8domains", "average uniform", "dense", 1.05, 9.0),
    ("btm_8domains", "average posterior", "average uniform", 0.0, 1.0),
    ("btm_8domains", "average posterior", "seed", 0.0, 1.0),
    ("btm_8domains", "ensemble domain: top2", "ensemble domain", 0.99, 1.01),
    ("btm_8domains", "ensemble domain: top2_uniform", "ensemble domain: cumulative_uniform", 0.99, 1.01),
    ("btm_8domains", "ensemble domain: last_token_cached", "ensemble domain: cumulative_cached", 0.97, 1.03),
    ("btm_8domains", "ensemble domain: last_token_updating", "ensemble domain: cumulative_updating", 0.97, 1.03),
    ("btm_8domains", "ensemble domain: last_token_uniform", "ensemble domain: cumulative_uniform", 0.97, 1.03),
    ("cbtm_8clusters", "ensemble cluster", "dense", 0.0, 1.0),
    ("btx_8domains", "mix", "dense", 0.0, 1.0),
)


def perplexities(results: Mapping[str, Any]) -> dict[str, float]:
    """Of every model but single branches, by name, from a run's evaluate/results.json."""
    found = {name: results["models"][name]["ppl"] for name in ("dense", "seed")}
    for family, value in results["ensemble"].items():
        found[f"ensemble {family}"] = value["ppl"]
        variants = results["ensembles"].get(family, {})
        found |= {f"ensemble {family}: {variant}": other["ppl"] for variant, other in variants.items()}
    found |= {f"average {kind}": value["ppl"] for kind, value in results["averages"].items()}
    return found | {name: value["ppl"] for name, value in results["mixes"].items()}


def summarise(runs: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Results by experiment and seed -> every number, means and standard deviations (None for one seed), expectations."""
    found: dict[str, Any] = {"experiments": {}}
    for experiment, by_seed in runs.items():
        each = {seed: perplexities(results) for seed, results in by_seed.items()}
        first = next(iter(by_seed.values()))
        models = {
            name: _over_seeds([(values[name], values["dense"]) for values in each.values()]) for name in each[min(each)]
        }
        domains = {
            name: {d: statistics.mean(_main(r)[name][d] for r in by_seed.values()) for d in first["domains"]}
            for name in _main(first)
        }
        matrix = {
            branch: {d: statistics.mean(r["matrix"][branch][d] for r in by_seed.values()) for d in first["domains"]}
            for branch in first["branches"]
        }
        found["experiments"][experiment] = {
            "seeds": list(by_seed),
            **{key: first[key] for key in ("branches", "domains", "samples", "amounts", "compute")},
            "models": models,
            "mean_by_domain": domains,
            "mean_matrix": matrix,
        }
        if "mix" in first["mixes"]:
            bits = [results["mixes"]["mix"]["experts"]["specificity_bits"] for results in by_seed.values()]
            found["experiments"][experiment]["specificity_bits"] = bits
    return found | {"expected": _expectations(found["experiments"])}


def _main(results: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    """Perplexities by domain of the models that matter most."""
    models = {"dense": results["models"]["dense"], "seed": results["models"]["seed"]}
    models |= {f"ensemble {family}": value for family, value in results["ensemble"].items()}
    models |= {f"average {kind}": value for kind, value in results["averages"].items()} | results["mixes"]
    return {name: value["by_domain"] for name, value in models.items()}


def _over_seeds(values: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Perplexities of a model and of the dense one, per seed -> all of them, ratios, mean and spread of the ratios."""
    ratios = [ours / dense for ours, dense in values]
    spread = statistics.stdev(ratios) if len(ratios) > 1 else None
    return {
        "ppl": [ours for ours, _ in values],
        "to_dense": ratios,
        "mean": statistics.mean(ratios),
        "deviation": spread,
    }


def _expectations(experiments: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for experiment, ours, other, low, high in EXPECTED:
        models = experiments.get(experiment, {}).get("models", {})
        if ours in models and other in models:
            ratios = [a / b for a, b in zip(models[ours]["ppl"], models[other]["ppl"], strict=True)]
            mean = statistics.mean(ratios)
            found.append(
                {"experiment": experiment, "what": f"{ours} / {other}", "from": low, "to": high, "each": ratios}
                | {"mean": mean, "holds": low <= mean <= high, "in_every_seed": all(low <= r <= high for r in ratios)}
            )
    return found


def table(summary: Mapping[str, Any]) -> Table:
    """Every model of every experiment."""
    from rich.table import Table

    shown = Table("experiment", "model", title="perplexity / that of the dense run", title_justify="left")
    for header in ("mean ± s.d.", "each seed", "perplexities"):
        shown.add_column(header, justify="right")
    for experiment, found in summary["experiments"].items():
        for name, row in found["models"].items():
            spread = "" if row["deviation"] is None else f" ± {row['deviation']:.3f}"
            each = (
                " ".join(f"{value:.{digits}f}" for value in row[key]) for key, digits in (("to_dense", 3), ("ppl", 2))
            )
            shown.add_row(experiment, name, f"{row['mean']:.3f}{spread}", *each)
    return shown


def arms(summary: Mapping[str, Any]) -> Figure:
    """Each model's perplexity over dense: a dot per seed, a bar at the mean. Of an experiment with a mix that alone: its
    branches are trained for as long as suits the mix."""
    from matplotlib.figure import Figure

    rows = [
        (f"{name} ({experiment.split('_')[0]})", row)
        for experiment, found in summary["experiments"].items()
        for name, row in found["models"].items()
        if ":" not in name and (name == "mix" if "mix" in found["models"] else name != "dense")
    ][::-1]
    figure = Figure(figsize=(8, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, (_, row) in enumerate(rows):
        axes.plot(row["to_dense"], [place] * len(row["to_dense"]), "o", color="#0072B2", markersize=4, alpha=0.7)
        axes.plot([row["mean"]] * 2, [place - 0.3, place + 0.3], color="#D55E00", linewidth=2)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_xscale("log")
    axes.set_xticks(ticks := [0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 2], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    values = [value for _, row in rows for value in row["to_dense"]]
    axes.set(xlabel="perplexity / dense of equal compute", xlim=(min(values) / 1.03, max(values) * 1.03))
    axes.grid(axis="x", alpha=0.3)
    return figure


def _share(source: Path, folder: Path) -> None:
    """Give a new run folder what another experiment of the seed has made, where it has nothing yet; inputs are compared later."""
    for path in _SHARED:
        if (source / path).is_dir() and not (folder / path).exists():
            shutil.copytree(source / path, folder / path)


def _equal_weights(experiment: str, overrides: Sequence[str]) -> list[str]:
    """For clusters, which leave the shares of domains to the data: equal ones, so that seed and dense are those of the others."""
    from recipes.config import SplitBy
    from recipes.data.dataset import load_dataset
    from recipes.pretrain import compose

    config = compose([f"experiment={experiment}", *overrides])
    if config.btm.split_by is not SplitBy.cluster or config.data.domain_weights:
        return []
    return [f"data.domain_weights={{{','.join(f'{name}:1' for name in load_dataset(str(config.data.path)).domains)}}}"]


def _run_one(experiment: str, seed: int, folder: Path, overrides: Sequence[str]) -> None:
    from tools.arms import run_to_end

    own = [f"run.seed={seed}", f"run.dir={folder}", "run.resume=auto", *_equal_weights(experiment, overrides)]
    words = [sys.executable, "-m", "recipes.btm", f"experiment={experiment}", *overrides, *own]
    run_to_end(words, f"{experiment}, seed {seed}", folder)


def _parser() -> argparse.ArgumentParser:
    from tools.arms import Numbers, parser

    top = parser("tools.btm", __doc__, _EPILOG)
    top.add_argument("--seeds", nargs="+", action=Numbers, default=[1, 2, 3], metavar="SEED", help="(default: 1 2 3)")
    top.add_argument(
        "--experiments",
        type=unicode_text,
        default=",".join(EXPERIMENTS),
        metavar="A,B",
        help="by comma (default: %(default)s)",
    )
    top.add_argument(
        "--out", type=file_path, default=Path("report/btm"), metavar="FOLDER", help="(default: report/btm)"
    )
    top.set_defaults(runs=Path("outputs/btm"))
    return top


def _run(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from recipes.btm.show import matrix
    from recipes.files import replace_bytes
    from recipes.telemetry.summary import write_json
    from tools.arms import shared_overrides
    from tools.report.figures import render

    overrides, experiments = shared_overrides(arguments), arguments.experiments.split(",")
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    folders = {(e, seed): arguments.runs / f"{e}-seed{seed}" for seed in arguments.seeds for e in experiments}
    for (experiment, seed), folder in folders.items():  # seed by seed: stopped early, some seeds are whole
        console.print(f"{experiment}, seed {seed}: {folder}")
        if experiment != experiments[0]:
            _share(folders[experiments[0], seed], folder)
        _run_one(experiment, seed, folder, overrides)
    results = {
        e: {s: json.loads((folders[e, s] / "evaluate/results.json").read_text()) for s in arguments.seeds}
        for e in experiments
    }
    summary = summarise(results)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.json or arguments.out / "btm_8domains.json"
    write_json(path, {"overrides": overrides, **summary})
    replace_bytes(arguments.out / "btm_arms.png", render(lambda: arms(summary)))
    for experiment, found in summary["experiments"].items():
        dense = {"dense": {"by_domain": found["mean_by_domain"]["dense"]}}
        drawn = {
            "branches": found["branches"],
            "domains": found["domains"],
            "matrix": found["mean_matrix"],
            "models": dense,
        }
        replace_bytes(arguments.out / f"{experiment}_matrix.png", render(partial(matrix, drawn)))
        for name in ("posterior.png", "experts.png"):
            picture = folders[experiment, min(arguments.seeds)] / "evaluate" / name
            if picture.exists():
                replace_bytes(arguments.out / f"{experiment}_{name}", picture.read_bytes())
    Console(width=None if console.is_terminal else 140).print(table(summary))
    for row in summary["expected"]:
        each = " ".join(f"{value:.3f}" for value in row["each"])
        verdict = "as expected" if row["holds"] else f"expected {row['from']:g} to {row['to']:g}"
        print(f"{row['experiment']}: {row['what']} = {row['mean']:.3f} ({each}): {verdict}")
    console.print(f"results {path}, pictures beside it")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 on bad input; that of `recipes.btm` when a run fails."""
    arguments = _parser().parse_intermixed_args(argv)
    from tools.arms import run_command

    return run_command(_run, arguments)


if __name__ == "__main__":
    sys.exit(main())
