"""What is trained: the run's description -> how the compute is divided -> one description per arm.

    seed: the first steps of the dense run.  dense: the rest of it, the control.  branches: the same steps at 1/N of the batch, each
    on its own part of the data.  mix: what is left after mixing.

An arm is an ordinary run of `recipes.pretrain`, told apart by a few settings. Pure arithmetic, no torch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.config import BtmConfig, Config, Resume, SplitBy, to_plain
from recipes.data.blend import resolve_weights
from recipes.data.dataset import DatasetInfo
from recipes.overrides import written
from recipes.validation import prepare, problems

CONTROL = "random"
# What a result does not depend on, but for rounding: where it lies, what is recorded, and how ranks share the work.
_IMMATERIAL = ("run", "checkpoint", "telemetry", "parallel", "zero", "deepspeed", "btm")


@dataclass(frozen=True)
class Amounts:
    """How the compute of the dense run is divided. Steps are optimizer steps, counted from the start of the seed.

    The seed ends at `seed`, the branches at `branches`, the mix at `mix`, the dense run at `dense`. `batch` is that of
    the dense run, `branch_batch` that of one branch, in sequences.
    """

    seed: int
    branches: int
    mix: int
    dense: int
    batch: int
    branch_batch: int


def amounts(config: Config, branches: int, mix_cost: float = 1.0) -> Amounts:
    """Divide the compute over seed, branches and mix, whose token costs `mix_cost` times a dense one.

    Raises ValueError for a batch that `branches` do not divide, and for shares that leave some part without a step.
    """
    steps, batch, btm = config.train.steps, config.train.global_batch_size, config.btm
    if batch % branches:
        tries = " or ".join(
            str(number) for number in (batch // branches * branches, -(-batch // branches) * branches) if number
        )
        raise ValueError(
            f"train.global_batch_size={batch} must be divisible by the number of branches={branches}, each of which gets an "
            f"equal part; try {tries}"
        )
    seed = round(steps * btm.seed_share)
    mixed = round(steps * btm.mix_share)
    end = steps - mixed
    # A token of the mix costs more than one of the dense model: fewer steps for the same compute.
    mix_steps = int(mixed / mix_cost)
    if not 0 < seed < end or (btm.mix_share and not mix_steps):
        shares = f"btm.seed_share={btm.seed_share} and btm.mix_share={btm.mix_share}"
        raise ValueError(f"train.steps={steps} with {shares} leaves a part without a step; use more steps")
    return Amounts(seed, end, end + mix_steps, steps, batch, batch // branches)


@dataclass(frozen=True)
class Arm:
    """One training run: `path` of its folder below the run folder, what differs from the description, what it starts from.

    `start`: folder, below the run folder, of the checkpoint to go on from; None: from nothing.
    """

    name: str
    path: str
    settings: dict[str, Any]
    start: str | None = None

    def described(self, config: Config, folder: Path) -> Config:
        """The description of the arm, below the run folder `folder`."""
        config = copy.deepcopy(config)
        for key, value in self.overrides(config, folder).items():
            group, _, name = key.partition(".")
            setattr(getattr(config, group), name, value)
        config.btm = BtmConfig()
        return config

    def overrides(self, config: Config, folder: Path) -> dict[str, Any]:
        """Every setting that differs, by key."""
        start = {} if self.start is None else {"checkpoint.load_from": str(folder / self.start)}
        run = {
            "run.name": f"{config.run.name}-{self.name}",
            "run.dir": str(folder / self.path),
            "run.resume": Resume.auto,
            "btm.mix_share": 0.0,  # of an experiment or a group on the command line; no arm is mixed any more
        }
        return {**run, **start, **self.settings}


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """The settings as one writes them on a command line."""
    return [f"{key}={written(value)}" for key, value in settings.items()]


@dataclass(frozen=True)
class Arms:
    """Everything that is trained.

    `parts`: names of the branches that share the seed's data; `added`: of those trained from an average of them; `used`: of
    those in ensembles, averages and mix; `control`: of the branches on random parts.
    """

    amounts: Amounts
    domains: list[str]
    parts: list[str]
    added: list[str]
    used: list[str]
    control: list[str]

    def mixed(self, seed_expert: bool) -> list[str]:
        """What the experts of the mix are made from, in order."""
        return [*self.used, *(["seed"] if seed_expert else [])]


def plan_arms(config: Config, info: DatasetInfo | None, mix_cost: float = 1.0) -> Arms:
    """Names and amounts. `info`: the data, None for a dry run without any.

    Raises ValueError for names that are no domains, empty domains, and weights of domains that branches cannot honour.
    """
    btm = config.btm
    domains = _domains(config, info)
    for key, names in (("add_domains", btm.add_domains), ("remove_domains", btm.remove_domains)):
        if btm.split_by is SplitBy.domain and (unknown := sorted(set(names) - set(domains))):
            raise ValueError(f"btm.{key}: {unknown[0]} is no domain; there are {', '.join(domains)}")
    shared = [domain for domain in domains if domain not in btm.add_domains]
    count = btm.num_branches or len(shared)
    if btm.split_by is SplitBy.domain:
        if count != len(shared):
            few = f"there are {len(shared)} domains: {', '.join(shared)}"
            raise ValueError(
                f"btm.num_branches={count} with btm.split_by=domain, but {few}; leave it null, or split otherwise"
            )
        parts = shared
    else:
        parts = [f"{btm.split_by.value}{number}" for number in range(count)]
    if unknown := sorted(set(btm.only) - {*parts, *domains, *_control_names(count), "dense"}):
        raise ValueError(f"btm.only: {unknown[0]} is no branch; there are {', '.join(parts)}")
    if len(parts) < 2:
        raise ValueError(f"one branch ({', '.join(parts)}): at least two domains are needed, or btm.num_branches")
    used = [name for name in [*parts, *btm.add_domains] if name not in btm.remove_domains]
    if len(used) < 2:
        raise ValueError(
            f"btm.remove_domains={btm.remove_domains} leaves {len(used)} branches; at least two are needed"
        )
    control = _control_names(count) if btm.random_control and btm.split_by is not SplitBy.random else []
    return Arms(amounts(config, count, mix_cost), shared, parts, list(btm.add_domains), used, control)


def _control_names(count: int) -> list[str]:
    return [f"{CONTROL}{number}" for number in range(count)]


def _domains(config: Config, info: DatasetInfo | None) -> list[str]:
    """The domains of the run; where there is no data, invented ones."""
    if info is None:
        count = config.btm.num_branches or len(config.data.domain_weights)
        if count < 2:
            raise ValueError("data.path=null: give the number of domains by btm.num_branches, or data")
        return sorted(config.data.domain_weights) or [f"domain{number}" for number in range(count)]
    weights = resolve_weights(info.tokens(), config.data.domain_weights or "uniform")
    if empty := [name for name, tokens in info.tokens().items() if not tokens and not config.data.domain_weights]:
        raise ValueError(
            f"{info.folder}: domain {empty[0]} has no training text; name the others in data.domain_weights"
        )
    if config.btm.split_by is not SplitBy.cluster and len({round(weight, 9) for weight in weights.values()}) > 1:
        given = config.data.domain_weights
        raise ValueError(f"data.domain_weights={given}: branches have equal shares of the compute; give equal weights")
    return sorted(weights)


def held_out_problems(config: Config, info: DatasetInfo) -> list[str]:
    """Domains whose held-out text is less than a batch."""
    length, batch = config.model.seq_length, config.train.micro_batch_size
    found = []
    for domain in _domains(config, info):
        if (held := info.num_samples(domain, "valid", length)) < batch:
            found.append(
                f"domain {domain}: its held-out text is {held} sequences of {length} tokens, less than a batch of {batch} "
                "(train.micro_batch_size); index it with a larger valid share, or leave the domain out"
            )
    return found


def make_arms(config: Config, arms: Arms, split_folder: Path) -> dict[str, Arm]:
    """Every arm by name: seed, dense, branches, added ones, control. `split_folder` holds the data of random parts and clusters."""
    ends, ranks = arms.amounts, config.btm.ranks_per_branch
    parallel = config.parallel
    data_parallel = max(1, ranks // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size))
    shared = {
        "schedule.lr_decay_steps": config.schedule.lr_decay_steps or ends.dense,  # one schedule over all of the compute
        "train.eval_samples": 0,  # the last stage evaluates all arms alike
        "train.eval_interval": 0,
        "checkpoint.save_final": True,
        "checkpoint.load_step": None,
    }
    clusters = config.btm.split_by is SplitBy.cluster
    weights = config.data.domain_weights if clusters else {name: 1.0 for name in arms.domains}
    whole = {**shared, "data.domain_weights": weights}
    found = {
        "seed": Arm("seed", "seed", {**whole, "train.steps": ends.seed}),
        "dense": Arm("dense", "dense", {**whole, "train.steps": ends.dense}, start="seed"),
    }
    branch = {**shared, "train.steps": ends.branches, "train.global_batch_size": ends.branch_batch}
    branch["train.micro_batch_size"] = _micro_batch(config.train.micro_batch_size, ends.branch_batch, data_parallel)
    for name in arms.parts:
        data = _part_data(config.btm.split_by, name, arms.domains, split_folder)
        found[name] = Arm(name, f"branches/{name}", branch | data, start="seed")
    for name in arms.added:
        data = {"data.domain_weights": {name: 1.0}}
        found[name] = Arm(name, f"branches/{name}", branch | data, start=f"starts/{name}")
    for name in arms.control:
        data = _part_data(SplitBy.random, name, arms.domains, split_folder)
        found[name] = Arm(name, f"control/{name}", branch | data, start="seed")
    return found


def _micro_batch(largest: int, batch: int, data_parallel: int) -> int:
    """The largest micro-batch, up to that of the dense run, that divides a rank's part of a branch's batch."""
    each = max(1, batch // data_parallel)
    return next(size for size in range(min(largest, each), 0, -1) if each % size == 0)


def _part_data(split_by: SplitBy, name: str, domains: list[str], split_folder: Path) -> dict[str, Any]:
    """Where the text of a branch lies."""
    if split_by is SplitBy.domain:
        return {"data.domain_weights": {name: 1.0}}
    path = str(split_folder / split_by.value)
    if split_by is SplitBy.cluster:
        return {"data.path": path, "data.domain_weights": {name: 1.0}}
    return {"data.path": path, "data.domain_weights": {f"{name}-{domain}": 1.0 for domain in domains}}


def complete(arm: Arm, config: Config, folder: Path, *, check: bool = True, dry_run: bool = False) -> Config:
    """The complete description of an arm, checked for the ranks of one branch. Raises ValueError when it cannot run."""
    described, ranks = arm.described(config, folder), config.btm.ranks_per_branch
    if check and (found := problems(described, ranks, launch_dir=Path.cwd(), dry_run=dry_run)):
        raise ValueError("\n  - ".join([f"{arm.name}:", *found]))
    return prepare(described, ranks, launch_dir=Path.cwd())


def without_own_data(arm: Arm) -> Arm:
    """The arm on the run's own data: what can be checked and counted before its part of the data is made."""
    if "data.path" not in arm.settings:
        return arm
    settings = {key: value for key, value in arm.settings.items() if not key.startswith("data.")}
    return dataclasses.replace(arm, settings=settings)


def material(described: Config) -> dict[str, Any]:
    """What of a description determines the result of a run."""
    kept = {key: value for key, value in to_plain(described).items() if key not in _IMMATERIAL}
    kept["data"] = {key: value for key, value in kept["data"].items() if key != "path"}
    kept["train"] = {key: value for key, value in kept["train"].items() if not key.startswith("eval_")}
    if described.deepspeed.extra:
        kept["deepspeed"] = {"extra": described.deepspeed.extra}
    return {**kept, "seed": described.run.seed}


def mix_arm(config: Config, arms: Arms, moe: Any) -> Arm:
    """The training of the mix: the dense run's batch and data, with the experts of the branches."""
    seed = make_arms(config, arms, Path())["seed"].settings
    experts = {f"moe.{field.name}": getattr(moe, field.name) for field in dataclasses.fields(moe)}
    changed = {key: value for key, value in experts.items() if value != getattr(config.moe, key.partition(".")[2])}
    settings = {**seed, "train.steps": arms.amounts.mix, **changed}
    settings["schedule.lr_decay_steps"] = config.schedule.lr_decay_steps or arms.amounts.mix
    return Arm("mix", "mix/trained", settings, start="mix/start")
