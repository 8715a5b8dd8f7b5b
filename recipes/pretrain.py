"""Entry: command line -> typed config -> checked config -> plan (`--dry-run`) or training run.

    deepspeed --num_accelerators 2 recipes/pretrain.py experiment=dense
    torchrun --nproc_per_node 2 -m recipes.pretrain experiment=dense
    python -m recipes.pretrain experiment=dense --dry-run

Every rank composes and checks for itself before it joins the others. Nothing heavy is imported until that is done.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file: the modules beside this one must not become top-level names
    sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "recipes")]

from recipes import schema  # noqa: E402
from recipes.config import Config, to_plain  # noqa: E402
from recipes.description import one_message, read_description  # noqa: E402
from recipes.launcher import Ranks, launch_note, rank_environment, split_arguments  # noqa: E402
from recipes.overrides import Setting, read, resolve, split  # noqa: E402
from recipes.process import Signalled, end_by, fail, heavy_imports, run_guarded, tell, watch  # noqa: E402
from recipes.rules import user_path  # noqa: E402
from recipes.telemetry.wandb_variables import obey  # noqa: E402
from recipes.topology import Cluster, model_parallel_size  # noqa: E402
from recipes.validation import prepare, problems  # noqa: E402
from recipes.validation.notes import notes  # noqa: E402

CONFIG_DIR = ROOT / "hydra_conf"


def compose(overrides: Sequence[str] = ()) -> Config:
    """The description that the configuration groups and `overrides` make, as plain dataclasses.

    Hydra merges the files of the chosen options; values of keys are then set as `recipes.overrides` reads them, references to
    other keys resolved, and all of it checked against the schema. Works from any directory, changes none, and writes nothing.
    Raises ValueError, with the key, the value, what is legal and a way out, for everything that is not legal.
    """
    choices: dict[str, str] = {}
    settings: list[Setting] = []
    for override in overrides:
        group, option = _choice(override)
        if not group:
            settings.append(read(override))
        elif group in choices:
            raise ValueError(f"{schema.show(override)}: {group}={choices[group]} is chosen already; choose one of them")
        else:
            choices[group] = option
    plain = _merged_files(tuple(f"{group}={option}" for group, option in choices.items()))
    _, wrong_in_files = read_description(plain)
    for setting in settings:
        setting.apply(plain)
    config, found = read_description(resolve(plain))
    found += _expand_paths(config)
    if found:
        in_files = set(found) <= set(wrong_in_files)
        place = (
            f"hydra_conf ({', '.join(f'{group}={option}' for group, option in choices.items())}): " if in_files else ""
        )
        raise ValueError(place + one_message(found))
    return config


def _choice(override: str) -> tuple[str, str]:
    """The configuration group and the option that an override chooses; two empty texts for one that sets a key.

    Only files of the group's own folder can be chosen: no path, and no link that leads out of it.
    """
    sign, key, text = split(override)
    shown, groups = schema.show(override), _groups()
    if key.split(".")[0].split("/")[0] == "hydra":
        raise ValueError(f"{shown}: Hydra's own settings have no effect here; the run folder is run.dir=FOLDER")
    if "@" in key or "/" in key:
        raise ValueError(f"{shown}: packages and paths cannot be chosen; the groups are {', '.join(groups)}")
    if key not in groups:
        return "", ""
    options = _options(key)
    if sign or text == "null":
        raise ValueError(f"{shown}: name one of its options ({', '.join(options)}), or leave the override out")
    if text not in options:
        raise ValueError(f"{shown}: no such option; {key} has {', '.join(options)}")
    return key, text


def _merged_files(choices: tuple[str, ...]) -> dict[str, Any]:
    """What the schema's defaults and the files of the chosen options make together, without a check of any value."""
    import hydra
    import yaml
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="schema", node=to_plain(Config()))
    try:
        with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            composed = hydra.compose("config", overrides=list(choices))
        plain = OmegaConf.to_container(composed, resolve=False)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ValueError(f"hydra_conf ({', '.join(choices)}): cannot be read: {reason}") from error
    return cast(dict[str, Any], plain)


def _expand_paths(config: Config) -> list[str]:
    """Write paths as the user of a shell means them, `~` replaced; returns the problems."""
    found = []
    for key in schema.path_keys():
        group, _, name = key.partition(".")
        if (text := getattr(getattr(config, group), name)) is not None:
            try:
                setattr(getattr(config, group), name, str(user_path(text)) if text.startswith("~") else text)
            except ValueError as error:
                found.append(f"{key}={schema.show(text)}: {error}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, or 2 for bad input (a crash ends the process with 1)."""
    try:
        arguments = split_arguments(sys.argv[1:] if argv is None else argv, os.environ)
        if arguments.help or arguments.version:
            print(_help() if arguments.help else _version())
            return 0
        # Plans are made in processes that have other uses for their signals.
        launcher = "" if arguments.dry_run else watch(os.environ).identity
        ranks = rank_environment(os.environ, launcher)
        config = compose(arguments.overrides)
        config.telemetry, wandb_notes = obey(config.telemetry, arguments.overrides, os.environ)
        world_size = ranks.world_size
        if arguments.dry_run and world_size == 1:  # plan for as many ranks as the description asks for
            world_size = (config.parallel.data_parallel_size or 1) * model_parallel_size(config)
        found = problems(config, world_size, launch_dir=Path.cwd(), dry_run=arguments.dry_run)
        if found:
            raise ValueError(one_message(found))
        config = prepare(config, world_size, launch_dir=Path.cwd())
        for note in notes(config) if ranks.rank == 0 else []:
            tell(f"note: {note}")
        if arguments.dry_run:
            if ranks.rank == 0:
                _show_plan(config, world_size, _cluster(ranks), arguments.json)
            return 0
    except ValueError as error:
        return fail(error, os.environ)
    except Signalled as stopped:
        end_by(stopped)
    if launched := launch_note(os.environ, ranks):
        tell(f"note: {launched}")
    for note in wandb_notes if ranks.rank == 0 else ():
        tell(f"note: {note}")
    if arguments.ignored and ranks.rank == 0:
        tell(f"note: no effect here, use deepspeed.extra={{...}}: {', '.join(arguments.ignored)}")

    def job() -> None:
        with heavy_imports():
            from recipes.train.job import run

        run(config, ranks)

    return run_guarded(job, ranks.rank)


def _cluster(ranks: Ranks) -> Cluster | None:
    """The nodes, when a launcher started the ranks on several, equally many on each."""
    nodes, rest = divmod(ranks.world_size, ranks.local_world_size)
    return Cluster(nodes, ranks.local_world_size) if nodes > 1 and not rest else None


def _show_plan(config: Config, world_size: int, cluster: Cluster | None, json_file: str | None) -> None:
    from rich.console import Console

    from recipes.plan.size import describe, plan

    Console().print(describe(config, world_size, cluster))
    if json_file is not None:
        write_plan(json_file, plan(config, world_size, cluster))


def write_plan(json_file: str, sizes: Any) -> None:
    """Write a plan to the file of `--json`. Raises ValueError when that cannot be."""
    import json

    try:
        user_path(json_file).write_text(json.dumps(sizes, indent=2) + "\n")
    except (ValueError, OSError) as error:
        reason = f"cannot be written ({error.strerror})" if isinstance(error, OSError) else str(error)
        raise ValueError(f"--json {schema.show(json_file)}: {reason}; name another file") from error


def _version() -> str:
    from importlib.metadata import version

    return version("sparse-pretraining-recipes")


_HELP = """\
Pretrain a language model described by Hydra configuration groups.

usage: python -m recipes.pretrain [group=option ...] [key=value ...] [--dry-run [--json FILE]]   (one process)
       deepspeed --num_accelerators N recipes/pretrain.py [group=option ...] [key=value ...]
       torchrun --nproc_per_node N -m recipes.pretrain [group=option ...] [key=value ...]
       srun python -m recipes.pretrain [group=option ...] [key=value ...]                        (one task per rank)

  --dry-run     check everything, print sizes and layout, start nothing
  --json FILE   with --dry-run: write the plan there too
  --version     print the version
  -h, --help    print this

groups and their options (files in hydra_conf/):
{groups}

keys (default; meaning and unit):
{keys}

examples:
  python -m recipes.pretrain experiment=debug run.dir=/tmp/first
  deepspeed --num_accelerators 2 recipes/pretrain.py experiment=dense zero=stage2 train.steps=200
  deepspeed --num_accelerators 2 recipes/pretrain.py experiment=switch_8e parallel.expert_model_parallel_size=2
  torchrun --nproc_per_node 2 -m recipes.pretrain experiment=dense model.num_layers=8 'run.name=eight layers'
  python -m recipes.pretrain experiment=dense run.dir=outputs/a run.resume=auto        # go on where it stopped
  python -m recipes.pretrain experiment=llama3_8b_64gpu_h100_bf16 --dry-run"""


def _options(group: str) -> list[str]:
    files = (CONFIG_DIR / group).glob("*.yaml")
    return sorted(file.stem for file in files if file.resolve().parent == (CONFIG_DIR / group).resolve())


def _groups() -> list[str]:
    return [folder.name for folder in sorted(CONFIG_DIR.iterdir()) if folder.is_dir()]


def _help() -> str:
    listed = "\n".join(f"  {group:11} {', '.join(_options(group))}" for group in _groups())
    keys = "\n".join(f"  {entry.example:45} {entry.note or entry.legal}" for entry in schema.entries().values())
    return _HELP.format(groups=listed, keys=keys)


if __name__ == "__main__":
    sys.exit(main())
