"""Entry: command line -> typed config -> checked config -> plan (`--dry-run`) or training run.

    deepspeed --num_accelerators 2 recipes/pretrain.py experiment=dense
    torchrun --nproc_per_node 2 -m recipes.pretrain experiment=dense
    python -m recipes.pretrain experiment=dense --dry-run

Every rank composes and checks for itself before it joins the others. Nothing heavy is imported until that is done.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file: the modules beside this one must not become top-level names
    sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "recipes")]

from recipes import schema  # noqa: E402
from recipes.config import Config  # noqa: E402
from recipes.launcher import Ranks, launch_note, rank_environment, split_arguments  # noqa: E402
from recipes.process import Signalled, end_by, fail, heavy_imports, run_guarded, watch  # noqa: E402
from recipes.topology import Cluster, model_parallel_size  # noqa: E402
from recipes.validation import prepare, problems  # noqa: E402
from recipes.validation.notes import notes  # noqa: E402

CONFIG_DIR = ROOT / "hydra_conf"


def compose(overrides: Sequence[str] = ()) -> Config:
    """The description that the configuration groups and `overrides` make, as plain dataclasses.

    Works from any directory, changes none, and writes nothing. Raises ValueError, with the key, the value, what is
    legal and a way out, when an override cannot be read, names an unknown key (even with `+`) or has a wrong type.
    """
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="schema", node=Config)
    readable = [_readable(override) for override in overrides]
    try:
        with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            composed = hydra.compose("config", overrides=readable)
        # Merged once more, as plain values: a key added by `+` survives in what Hydra returns, but not here.
        plain = OmegaConf.to_container(composed, resolve=True)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    except (HydraException, OmegaConfBaseException, OSError) as error:
        raise ValueError(_explain(error, overrides)) from error
    assert isinstance(config, Config)
    return config


def _readable(override: str) -> str:
    """The override in Hydra's grammar.

    Keys of free-form mappings need no `+`; text that the grammar has no characters for (`run.dir=出力/a=b`) is quoted.
    Raises ValueError for what is no override at all.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    match = re.fullmatch(r"(\+\+|\+|~)?([^=\s]+)(?:=(.*))?", override, re.DOTALL)
    if match is None or (match[3] is None and match[1] != "~"):
        raise ValueError(f"{override!r}: not an override; write key=value, or group=option, as in train.steps=100")
    sign, key, value = match[1] or "", match[2], match[3]
    if value == "null" and (CONFIG_DIR / key).is_dir():
        raise ValueError(f"{override}: name one of its options ({', '.join(_options(key))}), or leave the override out")
    if key.split(".")[0] == "hydra":
        raise ValueError(f"{override}: Hydra's own settings have no effect here; the run folder is run.dir=FOLDER")
    if not sign and any(key == name or key.startswith(f"{name}.") for name in schema.FREE_FORM):
        sign = "++"
    if sign == "+" and key in schema.entries():
        raise ValueError(f"{override}: the key exists already; leave out the +, as in {key}={value}")
    override = override if value is None else f"{sign}{key}={value}"
    try:
        (parsed,) = OverridesParser.create().parse_overrides([override])
    except OverrideParseException as error:
        if not value or value[0] in "[{'\"":
            hint = "check brackets and quotes, and put the whole override in single quotes for the shell"
            raise ValueError(f"{override}: the value cannot be read; {hint}") from error
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'{sign}{key}="{quoted}"'
    if parsed.is_sweep_override():
        raise ValueError(
            f"{override}: one run has one value; a list is {key}=[a,b], and text with commas {key}='\"a,b\"'"
        )
    return override


def _explain(error: BaseException, overrides: Sequence[str]) -> str:
    """One message for what Hydra or OmegaConf refused."""
    from hydra.errors import MissingConfigException

    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = str(error.missing_cfg_file).partition("/")
        return f"{group}={option}: no such option; {group} has {', '.join(error.options)}"
    where = re.match(r"In '([^']+)'", str(error))
    place = f" (in hydra_conf/{where[1]}.yaml)" if where else ""
    full_key = next((key for e in _causes(error) if (key := getattr(e, "full_key", None))), None)
    if full_key is None:
        return " ".join(str(error).split())
    key = re.sub(r"\[.*", "", full_key)
    entry = schema.entries().get(key)
    if entry is None and key.startswith(tuple(f"{name}." for name in schema.FREE_FORM)):
        entry = schema.entries()[".".join(key.split(".")[:2])]
    written = [override for override in overrides if override.lstrip("+~").startswith(f"{key}=")]
    shown = written[-1].lstrip("+~") if written else full_key
    reason = next(str(e) for e in _causes(error) if getattr(e, "full_key", None)).splitlines()[0]
    if entry is not None:
        note = f" ({entry.note})" if entry.note else ""
        return f"{shown}{place}: must be {entry.legal}{note}, for example {entry.example}. {reason}"
    if key in schema.groups():
        return f"{shown}{place}: is a group of settings, not a value; set one of its keys, as in {_first_key(key)}"
    return schema.unknown_key(key) + place


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_key(group: str) -> str:
    return next(entry.example for key, entry in schema.entries().items() if key.startswith(f"{group}."))


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
        world_size = ranks.world_size
        if arguments.dry_run and world_size == 1:  # plan for as many ranks as the description asks for
            world_size = (config.parallel.data_parallel_size or 1) * model_parallel_size(config)
        found = problems(config, world_size, launch_dir=Path.cwd(), dry_run=arguments.dry_run)
        if found:
            raise ValueError(found[0] if len(found) == 1 else "\n  - ".join([f"{len(found)} problems", *found]))
        config = prepare(config, world_size, launch_dir=Path.cwd())
        for note in notes(config) if ranks.rank == 0 else []:
            print(f"note: {note}", file=sys.stderr)
        if arguments.dry_run:
            if ranks.rank == 0:
                _show_plan(config, world_size, _cluster(ranks), arguments.json)
            return 0
    except ValueError as error:
        return fail(error, os.environ)
    except Signalled as stopped:
        end_by(stopped)
    if note := launch_note(os.environ, ranks):
        print(f"note: {note}", file=sys.stderr)
    if arguments.ignored and ranks.rank == 0:
        print(f"note: no effect here, use deepspeed.extra={{...}}: {', '.join(arguments.ignored)}", file=sys.stderr)

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
    import json

    from rich.console import Console

    from recipes.plan.size import describe, plan

    Console().print(describe(config, world_size, cluster))
    if json_file is None:
        return
    try:
        Path(json_file).write_text(json.dumps(plan(config, world_size, cluster), indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"--json {json_file}: cannot be written ({error.strerror}); name another file") from error


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
    return sorted(file.stem for file in (CONFIG_DIR / group).glob("*.yaml"))


def _help() -> str:
    groups = [folder.name for folder in sorted(CONFIG_DIR.iterdir()) if folder.is_dir()]
    listed = "\n".join(f"  {group:11} {', '.join(_options(group))}" for group in groups)
    keys = "\n".join(f"  {entry.example:45} {entry.note or entry.legal}" for entry in schema.entries().values())
    return _HELP.format(groups=listed, keys=keys)


if __name__ == "__main__":
    sys.exit(main())
