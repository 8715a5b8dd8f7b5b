"""Entry: command line -> description -> checks -> plan (`--dry-run`) or the stages of Branch-Train-Merge.

    python -m recipes.btm experiment=btm_4domains
    python -m recipes.btm experiment=btm_8domains run.dir=outputs/btm run.resume=auto btm.stages=[merge,evaluate]

Nothing heavy is imported until the description is known to be legal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from recipes.config import Config
from recipes.launcher import split_arguments
from recipes.pretrain import compose
from recipes.run_folder import RunFolder
from recipes.telemetry.wandb_variables import kept_back
from recipes.validation import prepare, problems
from recipes.validation.notes import notes

if TYPE_CHECKING:
    from recipes.data.dataset import DatasetInfo

_HELP = """usage: python -m recipes.btm [group=option ...] [key=value ...]

Train one expert per part of the data, each from a common seed and without any communication, and merge them. The rest of
the description is the dense run that they are compared with, and whose compute they share; all keys: python -m
recipes.pretrain --help (those of btm.* at the end).

  --dry-run     check everything, print the plan, start nothing
  --json FILE   with --dry-run: write the plan there too
  -h, --help    print this

stages (btm.stages=[...]; what is unchanged is skipped; run.resume=auto goes on in a folder that exists):
  split         parts of the data: statistics; random parts and clusters as data sets
  seed          the first steps of the dense run
  branch        what the branches start from
  train         branches, the rest of the dense run, and the random control, btm.workers at once
  merge         weights of the branches, averages, the ensemble (RUN/merge/ensemble works like a checkpoint)
  mix           branches as experts of one model, trained on (btm.mix_share)
  evaluate      perplexities of all models, table, pictures, summary.json

examples:
  python -m recipes.btm experiment=btm_4domains
  python -m recipes.btm experiment=btm_8domains run.seed=2 run.dir=outputs/btm-2
  python -m recipes.btm experiment=btm_8domains run.dir=outputs/btm-2 run.resume=auto 'btm.stages=[merge,evaluate]' btm.top_k=2
  python -m recipes.btm experiment=btm_4domains run.dir=/shared/btm run.resume=auto 'btm.stages=[train]' 'btm.only=[ja]'
  python -m recipes.btm experiment=btm_4domains 'btm.add_domains=[ja]' run.dir=outputs/btm-add
  python -m recipes.btm experiment=btm_8x125m_64gpu_h100_bf16 --dry-run
  python -m tools.generate outputs/btm-2/merge/ensemble --prompt "In the beginning"
  python -m tools.evaluate outputs/btm-2/merge/ensemble"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for bad input or a branch that failed, 128 + n after signal n."""
    try:
        given = split_arguments(sys.argv[1:] if argv is None else argv, os.environ)
        if given.help:
            print(_HELP)
            return 0
        config = compose(given.overrides)
        ranks = config.btm.ranks_per_branch
        if found := problems(config, ranks, launch_dir=Path.cwd(), dry_run=given.dry_run):
            raise ValueError(found[0] if len(found) == 1 else "\n  - ".join([f"{len(found)} problems", *found]))
        for note in notes(config):
            print(f"note: {note}", file=sys.stderr)
        if given.dry_run:
            _show_plan(config, given.json)
            return 0
        with _stoppable():
            _run(config, given.overrides)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run(config: Config, overrides: Sequence[str]) -> None:
    from rich.console import Console

    from recipes.btm.pipeline import SET_BY_ARMS, Pipeline

    rest = [text for text in overrides if not text.lstrip("+~").startswith(SET_BY_ARMS)]
    if config.data.domain_weights and (weights := compose(rest).data.domain_weights):
        raise ValueError(
            f"data.domain_weights={weights} of the experiment: give it on the command line of recipes.btm instead"
        )
    console = Console(markup=False, highlight=False, soft_wrap=True)
    claim = RunFolder(config.run, shared=bool(config.btm.only))
    with contextlib.closing(claim):
        try:
            pipeline = Pipeline(config, overrides, claim.path, console.print)
        except ValueError:
            claim.abandon()
            raise
        console.print(f"run folder {claim.path}")
        if note := kept_back(os.environ):
            console.print(f"note: {note}")
        pipeline.run()


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Inside, SIGTERM and the end of the terminal raise SystemExit, so that no branch is left behind."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def plan(config: Config) -> dict[str, Any]:
    """What would be trained, as plain values. Raises ValueError when it cannot be."""
    from recipes.btm.arms import complete, make_arms, mix_arm, plan_arms, without_own_data
    from recipes.btm.mixing import mix_cost, mix_moe
    from recipes.data.dataset import load_dataset
    from recipes.plan.size import plan as sizes_of

    info: DatasetInfo | None = None if config.data.path is None else load_dataset(config.data.path)
    ranks = config.btm.ranks_per_branch
    base = prepare(config, ranks, launch_dir=Path.cwd())
    arms = plan_arms(config, info, mix_cost(base, info))
    folder = Path(config.run.dir or "outputs").absolute()
    made = make_arms(config, arms, folder / "split")
    if config.btm.mix_share:
        made["mix"] = mix_arm(config, arms, mix_moe(config.btm, len(arms.used) + config.btm.mix_seed_expert))
    shown: dict[str, Any] = {
        "amounts": vars(arms.amounts),
        "branches": arms.parts,
        "added": arms.added,
        "control": arms.control,
    }
    shown["arms"] = {}
    first = {"seed": 0, "dense": arms.amounts.seed, "mix": arms.amounts.branches}
    alike: dict[str, list[str]] = {}  # what differs in name and data alone has equal sizes
    for name, arm in made.items():
        settings = {key: value for key, value in arm.settings.items() if not key.startswith("data.")}
        alike.setdefault(f"{settings} {first.get(name)}", []).append(name)
    for names in alike.values():
        longest = made[max(names, key=len)]  # whose paths are the longest
        described = complete(without_own_data(longest), config, folder, dry_run=True)
        sizes = sizes_of(described, ranks)
        steps = described.train.steps - first.get(names[0], arms.amounts.seed)
        keys = ("total_params", "active_params", "flops_per_token", "tokens_per_step", "bytes_per_rank")
        flops = steps * sizes["tokens_per_step"] * sizes["flops_per_token"]
        row = {key: sizes[key] for key in keys} | {"steps": steps, "ranks": ranks, "flops": flops}
        shown["arms"] |= dict.fromkeys(names, row)
    shown["arms"] = {name: shown["arms"][name] for name in made}
    return shown


def _show_plan(config: Config, json_file: str | None) -> None:
    import json

    from rich.console import Console
    from rich.table import Table

    shown = plan(config)
    table = Table("run", title=f"plan of {config.run.name}", title_justify="left")
    for header in ("ranks", "parameters", "steps", "tokens/step", "FLOPs each", "GiB/rank"):
        table.add_column(header, justify="right")
    alike: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for name, arm in shown["arms"].items():
        alike.setdefault(json.dumps(arm), ([], arm))[0].append(name)
    for names, arm in alike.values():
        label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
        sizes = (
            f"{arm['ranks']}",
            f"{arm['total_params'] / 1e6:,.1f}M",
            f"{arm['steps']:,}",
            f"{arm['tokens_per_step']:,}",
        )
        table.add_row(label, *sizes, f"{arm['flops']:.3g}", f"{arm['bytes_per_rank']['total'] / 2**30:.2f}")
    table.caption = (
        f"{config.btm.workers} at once; seed and branches have the FLOPs of the dense run, whose start is the seed"
    )
    Console(markup=False).print(table)
    if json_file is not None:
        try:
            Path(json_file).write_text(json.dumps(shown, indent=2) + "\n")
        except OSError as error:
            raise ValueError(f"--json {json_file}: cannot be written ({error.strerror}); name another file") from error


if __name__ == "__main__":
    sys.exit(main())
