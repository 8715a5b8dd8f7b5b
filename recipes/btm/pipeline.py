"""The stages in order: split -> seed -> branch -> train -> merge -> mix -> evaluate, each on what the ones before it left.

RUN/config.yaml        the description
RUN/split/*/           statistics; random parts and clusters as data sets
RUN/seed/ dense/ branches/*/ control/*/    runs of recipes.pretrain, their output in RUN/logs/
RUN/starts/*/          what added branches start from
RUN/scores/*/          log-probabilities of held-out text, per model
RUN/merge/             weights of the branches, averages, the ensemble
RUN/mix/start, mix/trained
RUN/evaluate/          tables and pictures;  RUN/summary.json
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.btm.arms import (
    Arm,
    Arms,
    arguments,
    complete,
    held_out_problems,
    make_arms,
    material,
    mix_arm,
    plan_arms,
    without_own_data,
)
from recipes.btm.average import Average, check_alike, fresh_trainer, write
from recipes.btm.mix import Mix
from recipes.btm.mixing import as_mix, mix_cost, mix_moe
from recipes.btm.pool import Job, command, device_shares, run_jobs
from recipes.btm.resume import check_trained
from recipes.btm.show import job_bars
from recipes.btm.split import data_digest, part_statistics, write_random_parts
from recipes.btm.stages import Artefact, Store, digest
from recipes.checkpoint.format import Checkpoint, open_checkpoint
from recipes.checkpoint.rotate import find_checkpoint
from recipes.checkpoint.trainer import check_trainer
from recipes.config import BtmStage, Config, SplitBy, to_plain
from recipes.data.dataset import DatasetInfo, load_dataset
from recipes.description import to_yaml
from recipes.files import replace_text
from recipes.launcher import free_port
from recipes.logical import moe_layers
from recipes.telemetry.summary import write_json
from recipes.validation import prepare

if TYPE_CHECKING:
    from recipes.model.gpt import GPT

Say = Callable[[str], None]
# Of the command line, what arms are not started with: they have their own, and weights of domains would be merged.
SET_BY_ARMS = ("btm.", "run.", "data.domain_weights")


class Pipeline:
    """One run of Branch-Train-Merge in one folder. `overrides`: the command line, which the arms are started with too."""

    def __init__(self, config: Config, overrides: Iterable[str], folder: Path, say: Say):
        """Checks everything that can be known now. Raises ValueError when some arm could not run."""
        assert config.data.path is not None
        self.config, self.folder, self.say = config, folder.absolute(), say
        self.overrides = [text for text in overrides if not text.lstrip("+~").startswith(SET_BY_ARMS)]
        self.info: DatasetInfo = load_dataset(config.data.path)
        self.base = prepare(config, config.btm.ranks_per_branch, launch_dir=Path.cwd())
        self.arms: Arms = plan_arms(config, self.info, mix_cost(self.base, self.info))
        if found := held_out_problems(config, self.info):
            raise ValueError("\n  - ".join(["held-out text is too short:", *found]))
        self.made: dict[str, Arm] = make_arms(config, self.arms, self.folder / "split")
        for arm in self.made.values():
            complete(without_own_data(arm), config, self.folder)
        self.device_shares = device_shares(config.btm.ranks_per_branch)
        self.store = Store(self.folder, config.btm.stages, say)
        self.digests: dict[str, str] = {}

    def run(self) -> None:
        """All stages up to the last one asked for."""
        check_trained(self.made.values(), self.config, self.info, self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        text = to_yaml(self.config)
        replace_text(self.folder / "config.yaml", text)
        wanted = max(list(BtmStage).index(stage) for stage in self.config.btm.stages)
        stages = [self.split, self.train_seed, self.branch, self.train, self.merge, self.mix, self.evaluate]
        for stage in stages[: wanted + 1]:
            stage()

    # split

    def split(self) -> None:
        """Statistics of the domains; data sets of random parts and clusters where they are needed."""
        kinds = {self.config.btm.split_by} | ({SplitBy.random} if self.arms.control else set())
        count = len(self.arms.parts)
        for kind in sorted(kinds, key=list(SplitBy).index):
            inputs: dict[str, Any] = {"data": data_digest(self.info, self.arms.domains), "parts": count}
            if kind is not SplitBy.domain:
                inputs["seed"] = self.config.run.seed
            if kind is SplitBy.cluster:
                settings = to_plain(self.config.btm)
                inputs["cluster"] = {key: settings[f"cluster_{key}"] for key in ("features", "tokens", "sample")}
            artefact = Artefact(f"split/{kind.value}", BtmStage.split, inputs)
            self.digests[artefact.path] = self.store(artefact, partial(self._make_split, kind))

    def _make_split(self, kind: SplitBy, folder: Path) -> None:
        count, seed, domains = len(self.arms.parts), self.config.run.seed, self.arms.domains
        if kind is SplitBy.domain:
            parts = {domain: [self.info.open(domain, "train")] for domain in domains}
        elif kind is SplitBy.random:
            write_random_parts(self.info, domains, count, seed, folder)
            made = load_dataset(folder)
            names = {f"random{part}": [f"random{part}-{domain}" for domain in domains] for part in range(count)}
            parts = {name: [made.open(domain, "train") for domain in members] for name, members in names.items()}
        else:
            from recipes.btm.cluster import write_clusters

            write_clusters(self.info, domains, count, self.config.btm, seed, folder)
            made = load_dataset(folder)
            parts = {name: [made.open(name, "train")] for name in made.domains}
        found = part_statistics(parts, self.info.vocab_size)
        write_json(folder / "split.json", found)
        sizes = ", ".join(f"{name} {row['tokens']:,}" for name, row in found["parts"].items())
        self.say(f"split/{kind.value}: tokens of {sizes}; mean divergence {found['mean_divergence_bits']:.3f} bits")
        if "warning" in found:
            expected = " (as they should be: this is the control)" if kind is SplitBy.random else ""
            self.say(f"warning: split/{kind.value}: {found['warning']}{expected}")

    # seed, branch, train

    def train_seed(self) -> None:
        """The first steps of the dense run."""
        self._train([self.made["seed"]], BtmStage.seed)

    def branch(self) -> None:
        """What the branches start from: the seed; added ones an average of trained branches, as soon as there are some."""
        inputs = {"seed": self.digests["seed"]}
        start = {"checkpoint": "seed", "step": self.arms.amounts.seed, **inputs}
        artefact = Artefact("starts/seed", BtmStage.branch, inputs)
        self.digests[artefact.path] = self.store(artefact, lambda folder: write_json(folder / "start.json", start))
        parts = [self.made[name] for name in self.arms.parts]
        if self.arms.added and all((self.folder / arm.path).exists() for arm in parts):
            self._train(parts, BtmStage.train)
            self._make_starts()

    def train(self) -> None:
        """Branches, dense control and random control in a pool; then added branches, from averages of the others."""
        only = self.config.btm.only
        names = ["dense", *self.arms.parts, *self.arms.control]
        self._train([self.made[name] for name in names], BtmStage.train, only)
        self._make_starts()
        self._train([self.made[name] for name in self.arms.added], BtmStage.train, only)

    def artefact_of(self, arm: Arm, stage: BtmStage) -> Artefact:
        """An arm's run folder: settled by its settings, its data and where it starts."""
        described = complete(arm, self.config, self.folder, check=False)
        own_data = arm.settings.get("data.path")
        domains = [name for name in described.data.domain_weights or self.info.domains if name in self.info.domains]
        data = (
            self.digests[str(Path(own_data).relative_to(self.folder))] if own_data else data_digest(self.info, domains)
        )
        start = None if arm.start is None else self.digests[arm.start]
        inputs = {"settings": material(described), "data": data, "start": start}
        steps = described.train.steps
        return Artefact(arm.path, stage, inputs, lambda folder: checkpoint_digest(folder, steps))

    def _train(self, arms: list[Arm], stage: BtmStage, only: list[str] | None = None) -> None:
        """Train those that are not done, and note the digests of all."""
        artefacts = {arm.name: self.artefact_of(arm, stage) for arm in arms}
        todo = []
        for arm in arms:
            found = self.store.current(artefacts[arm.name])
            if found is None:
                todo.append(arm)
            else:
                self.digests[arm.path] = found
        mine = [arm for arm in todo if not only or arm.name in only]
        for arm in mine:
            complete(arm, self.config, self.folder)
            self.store.begin(artefacts[arm.name])
        by_name = {arm.name: arm for arm in mine}

        def done(job: Job) -> None:
            self.digests[by_name[job.name].path] = self.store.finish(artefacts[job.name])
            self.say(f"{job.name}: trained")

        if mine:
            self.say(f"training {', '.join(by_name)}: {min(len(mine), self.config.btm.workers)} at once")
            jobs = [self._job(arm, len(mine)) for arm in mine]
            with job_bars({arm.name: self._steps(arm) for arm in mine}) as look:
                run_jobs(
                    jobs, self.config.btm.workers, self.config.btm.retries, done, self.say, look, self.device_shares
                )
        if (others := [arm.name for arm in todo if arm not in mine]) and self._later_than(stage):
            raise ValueError(f"{', '.join(others)}: not trained yet; run them, then the later stages (btm.only={only})")

    def _steps(self, arm: Arm) -> tuple[Path, int, int]:
        """Run folder, step that it starts after, and last step of an arm."""
        ends = self.arms.amounts
        first = {"seed": 0, "mix": ends.branches}.get(arm.name, ends.seed)
        return self.folder / arm.path, first, arm.settings["train.steps"]

    def _later_than(self, stage: BtmStage) -> bool:
        order = list(BtmStage)
        return any(order.index(wanted) > order.index(stage) for wanted in self.config.btm.stages)

    def _job(self, arm: Arm, jobs: int) -> Job:
        btm = self.config.btm
        words = [
            *self.overrides,
            *arguments({"run.seed": self.config.run.seed, **arm.overrides(self.config, self.folder)}),
        ]
        cores = len(os.sched_getaffinity(0))
        at_once = min(btm.workers, jobs)
        threads = btm.threads or max(1, cores // (at_once * btm.ranks_per_branch))
        port = free_port() if btm.ranks_per_branch > 1 else None
        return Job(
            arm.name, command(words, btm.ranks_per_branch, port), self.folder / "logs" / f"{arm.name}.log", threads
        )

    def _make_starts(self) -> None:
        for name in self.arms.added:
            self._make_start(name)

    def _make_start(self, name: str) -> None:
        """The average of the first branches, weighted by how well each explains the new domain's development text."""
        from recipes.btm.score import Scores

        path = f"starts/{name}"
        members = self.arms.parts
        inputs = {
            "branches": {part: self.digests[f"branches/{part}"] for part in members},
            "data": data_digest(self.info, [name]),
            "weighing": self._weighing(),
            "step": self.arms.amounts.seed,
        }

        def make(folder: Path) -> None:
            weights = Scores(self).prior(members, name, stage=BtmStage.branch)
            average = Average(self.checkpoints(members), weights)
            self.say(f"{path}: {average.path}")
            write(average, folder / "checkpoints", self.arms.amounts.seed, average.trainer)

        artefact = Artefact(
            path, BtmStage.branch, inputs, lambda folder: checkpoint_digest(folder, self.arms.amounts.seed)
        )
        self.digests[path] = self.store(artefact, make)

    def _weighing(self) -> dict[str, Any]:
        btm = to_plain(self.config.btm)
        keys = ("form", "prior", "prior_decay", "top_k", "development_samples")
        return {key: btm[key] for key in keys} | {"eval_samples": self.config.train.eval_samples}

    def checkpoints(self, names: Iterable[str]) -> dict[str, Checkpoint]:
        """The last checkpoint of each branch, all of one model and one tokenizer. Raises ValueError when they are not."""
        steps = self.arms.amounts.branches
        found = {name: last_checkpoint(self.folder / self.made[name].path, steps) for name in names}
        check_alike(found)
        return found

    def open_trained(self, path: str, step: int) -> GPT:
        """The model of checkpoint `step` of a run folder inside this one: that one and no other."""
        from recipes.checkpoint.model import open_model

        return open_model(last_checkpoint(self.folder / path, step).path)[0]

    # merge, mix, evaluate

    def merge(self) -> None:
        """Weights of the branches, averages, and the ensemble."""
        from recipes.btm.results import merge

        merge(self)

    def mix(self) -> None:
        """The branches as experts of one model, trained on."""
        if not self.config.btm.mix_share:
            return
        names, ends = self.arms.used, self.arms.amounts
        experts = self.arms.mixed(self.config.btm.mix_seed_expert)
        arm = mix_arm(self.config, self.arms, mix_moe(self.config.btm, len(experts)))
        described = as_mix(self.base, len(experts))
        start_inputs = {
            "experts": {name: self.digests[self.made[name].path] for name in experts},
            "seed": self.config.run.seed,
            "layers": moe_layers(described),
        }

        def make(folder: Path) -> None:
            members = self.checkpoints(names)
            if "seed" in experts:
                members["seed"] = last_checkpoint(self.folder / "seed", ends.seed)
            mixed = Mix(members, names, described)
            write(mixed, folder / "checkpoints", ends.branches, fresh_trainer(mixed.trainer))

        start = Artefact(
            "mix/start", BtmStage.mix, start_inputs, lambda folder: checkpoint_digest(folder, ends.branches)
        )
        self.digests[start.path] = self.store(start, make)
        self.made["mix"] = arm
        self._train([arm], BtmStage.mix)

    def evaluate(self) -> None:
        """Perplexities of everything, tables, pictures, summary.json."""
        from recipes.btm.results import evaluate

        evaluate(self)

    def weighing_inputs(self, names: Iterable[str]) -> dict[str, Any]:
        """What weights of the branches depend on."""
        scored = {name: self.digests[f"scores/{name}"] for name in names}
        return {"scores": scored, "weighing": self._weighing()}


def last_checkpoint(folder: Path, step: int) -> Checkpoint:
    """Checkpoint `step` of a run folder, whose files are checked when they are read. Raises ValueError when it is missing,
    incomplete, or not what its description says."""
    path, _ = find_checkpoint(folder / "checkpoints", step)
    assert path is not None
    checkpoint = open_checkpoint(path)
    check_trainer(checkpoint)
    return checkpoint


def checkpoint_digest(folder: Path, step: int) -> str:
    """Of the weights and moments of checkpoint `step` of a run folder, from the checksums that it records."""
    checkpoint = last_checkpoint(folder, step)
    files = checkpoint.manifest.files.items()
    return digest({name: entry.sha256 for name, entry in files if entry.kind in ("model", "optimizer")})
