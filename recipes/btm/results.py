"""Merge and evaluation: scores of held-out text under each model -> weights, averages, ensembles, perplexities, compute.

development scores -> weights of the branches for each domain -> merge/
evaluation scores -> evaluate/results.json, pictures, summary.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recipes.btm.average import Average, uniform, write
from recipes.btm.ensemble import expert_log_weights, keep_top, mixture, uniform_log_prior
from recipes.btm.model import DESCRIPTION, Weighing, write_ensemble
from recipes.btm.score import Scores
from recipes.btm.split import data_digest
from recipes.btm.stages import Artefact, digest, digest_files, digest_folder
from recipes.checkpoint.load import load_weights
from recipes.checkpoint.model import open_model
from recipes.config import BtmStage, ExpertPrior, PosteriorForm, SplitBy
from recipes.data.packing import Documents
from recipes.files import replace_bytes
from recipes.model.gpt import GPT, registry
from recipes.plan.size import flops_per_token
from recipes.telemetry.summary import write_json

if TYPE_CHECKING:
    from recipes.btm.pipeline import Pipeline

RIDGE_SHARPNESS = 8.0  # logit by which the router of a training-free mix prefers the expert of a text that it knows


def perplexities(log_probs: Mapping[str, torch.Tensor], counts: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Perplexity of all counted labels together and by domain, from log-probabilities [N, S] by domain."""
    sums = {domain: -float(log_probs[domain][counts[domain]].sum()) for domain in log_probs}
    tokens = {domain: int(counts[domain].sum()) for domain in log_probs}
    return {
        "ppl": math.exp(sum(sums.values()) / sum(tokens.values())),
        "by_domain": {domain: math.exp(sums[domain] / tokens[domain]) for domain in sums},
    }


def merge(pipeline: Pipeline) -> None:
    """Weights of the branches for each domain, the uniform and the given average as checkpoints, the ensemble's description."""
    config, names = pipeline.config, pipeline.arms.used
    scores = Scores(pipeline)
    for name in names:
        scores.of_arm(name, BtmStage.merge)
    inputs = pipeline.weighing_inputs(names) | {"given": config.btm.average_weights}
    inputs["branches"] = {name: pipeline.digests[pipeline.made[name].path] for name in names}
    step = pipeline.arms.amounts.branches

    def make(folder: Path) -> None:
        members = pipeline.checkpoints(names)
        priors = {domain: scores.prior(names, domain, BtmStage.merge) for domain in scores.domains}
        write_json(folder / "weights.json", {"prior_by_domain": priors})
        averages = {"uniform": uniform(members)}
        if config.btm.average_weights:
            averages["given"] = config.btm.average_weights
        for name, weights in averages.items():
            average = Average(members, weights)
            write(average, folder / name / "checkpoints", step, average.trainer, ["model"])
        overall = [sum(prior[name] for prior in priors.values()) / len(priors) for name in names]
        cached = config.btm.prior is ExpertPrior.cached
        prior = tuple(overall if cached else [1 / len(names)] * len(names))
        updating = config.btm.prior_decay if config.btm.prior is ExpertPrior.updating else None
        weighing = Weighing(config.btm.form, prior, updating, config.btm.top_k)
        folders = {name: pipeline.folder / pipeline.made[name].path for name in names}
        write_ensemble(folder / "ensemble", folders, weighing)

    def content(folder: Path) -> str:
        from recipes.btm.pipeline import checkpoint_digest

        files = digest_files([folder / "weights.json", folder / "ensemble" / DESCRIPTION], folder)
        kinds = ["uniform", *(["given"] if config.btm.average_weights else [])]
        return digest([files, *(checkpoint_digest(folder / kind, step) for kind in kinds)])

    artefact = Artefact("merge", BtmStage.merge, inputs, content)
    pipeline.digests["merge"] = pipeline.store(artefact, make)


def ensembles(
    log_probs_ENS: torch.Tensor,
    prior_E: torch.Tensor,
    decay: float,
    form: PosteriorForm,
    prior: ExpertPrior,
    top_k: int | None,
    documents: Documents | None = None,
) -> torch.Tensor:
    """log p of the ensemble's tokens, [N, S]. `prior_E`: the cached prior, where it is used; `documents`: to be told apart."""
    experts = len(log_probs_ENS)
    log_prior_E = prior_E.log() if prior is ExpertPrior.cached else uniform_log_prior(experts)
    updating = decay if prior is ExpertPrior.updating else None
    return mixture(log_probs_ENS, expert_log_weights(log_probs_ENS, log_prior_E, form, updating, top_k, documents))


class Evaluation:
    """Everything that is known of the models of a run, as perplexities."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline, self.config, self.arms = pipeline, pipeline.config, pipeline.arms
        self.scores = Scores(pipeline)
        self.domains = self.scores.domains
        self.counts = {domain: self.scores.counted(domain) for domain in self.domains}

    def single(self, scored: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Perplexities of one model."""
        return perplexities({domain: scored[f"{domain}/evaluation"] for domain in self.domains}, self.counts)

    def ensemble(
        self, names: Sequence[str], form: PosteriorForm, prior: ExpertPrior, top_k: int | None
    ) -> dict[str, Any]:
        """Perplexities of an ensemble of arms, with the cached prior of each domain."""
        found = {}
        for domain in self.domains:
            log_probs_ENS = self.scores.stacked(names, domain, "evaluation", BtmStage.evaluate)
            cached = self.scores.prior(names, domain, BtmStage.evaluate)
            prior_E = torch.tensor([cached[name] for name in names], dtype=torch.float64)
            documents = self.scores.documents(domain)
            found[domain] = ensembles(
                log_probs_ENS, prior_E, self.config.btm.prior_decay, form, prior, top_k, documents
            )
        return perplexities(found, self.counts)

    def variants(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Every form with every prior, and the configured one, also from a uniform prior, with fewer experts."""
        btm = self.config.btm
        found = {f"{form.value}_{prior.value}": (form, prior, None) for form in PosteriorForm for prior in ExpertPrior}
        tops: dict[str, tuple[PosteriorForm, ExpertPrior, int | None]] = {}
        for k in [k for k in (1, 2, 4) if k < len(names)]:
            tops |= {f"top{k}": (btm.form, btm.prior, k), f"top{k}_uniform": (btm.form, ExpertPrior.uniform, k)}
        return {name: self.ensemble(names, *choice) for name, choice in (found | tops).items()}

    def routed(self, names: Sequence[str]) -> dict[str, Any]:
        """Perplexities of an ensemble weighted by the distance of the text to the clusters' centres."""
        from recipes.btm.cluster import Clusters, route

        btm, info = self.config.btm, self.pipeline.info
        clusters, tokenizer = Clusters.load(self.pipeline.folder / "split" / "cluster"), info.tokenizer()
        used = [self.arms.parts.index(name) for name in names]
        found = {}
        for domain in self.domains:
            tokens_NS1 = self.scores.text(domain).evaluation_NS1
            every, temperature = btm.cluster_route_every, btm.cluster_temperature
            log_KNS = torch.from_numpy(route(clusters, tokens_NS1, tokenizer, temperature, every).copy())[used]
            log_KNS = log_KNS.log_softmax(dim=0) if btm.top_k is None else keep_top(log_KNS, btm.top_k)
            found[domain] = mixture(self.scores.stacked(names, domain, "evaluation", BtmStage.evaluate), log_KNS)
        return perplexities(found, self.counts)

    def averages(self) -> dict[str, dict[str, Any]]:
        """Perplexities of averages: uniform, weighted for each domain by its prior, the best branch of each, given weights."""
        members = self.pipeline.checkpoints(self.arms.used)
        merged = self.pipeline.digests["merge"]
        choices: dict[str, Callable[[str], dict[str, float]]] = {
            "uniform": lambda domain: uniform(members),
            "posterior": lambda domain: self.scores.prior(self.arms.used, domain, BtmStage.evaluate),
        }
        if self.config.btm.average_weights:
            choices["given"] = lambda domain: self.config.btm.average_weights
        found = {}
        for kind, weights_of in choices.items():
            scored: dict[str, torch.Tensor] = {}
            for domain in self.domains:
                name = f"average_{kind}" if kind != "posterior" else f"average_{kind}_{domain}"
                weights = weights_of(domain)
                only = domain if kind == "posterior" else None
                opened = lambda weights=weights: self._average(members, weights)  # noqa: E731
                scored |= self.scores.of(name, [merged, weights], opened, BtmStage.evaluate, only)
            found[kind] = self.single(scored)
        best = {}
        for domain in self.domains:
            prior = self.scores.prior(self.arms.used, domain, BtmStage.evaluate)
            name = max(prior, key=prior.__getitem__)
            best[f"{domain}/evaluation"] = self.scores.of_arm(name, BtmStage.evaluate)[f"{domain}/evaluation"]
        return found | {"argmax": self.single(best)}

    def _average(self, members: Any, weights: Mapping[str, float]) -> GPT:
        model, _, _ = open_model(next(iter(members.values())).path)
        load_weights(Average(members, weights), registry(model, model.config))  # type: ignore[arg-type]
        return model

    def mixes(self) -> dict[str, dict[str, Any]]:
        """Perplexities of the mix as it starts with fitted routers, and after its training."""
        if "mix" not in self.pipeline.made:
            return {}
        start = self.pipeline.digests["mix/start"]
        fitted = self.scores.of("mix_ridge", [start, RIDGE_SHARPNESS], self._fitted, BtmStage.evaluate)
        trained = self.single(self.scores.of_arm("mix", BtmStage.evaluate))
        return {"mix_ridge": self.single(fitted), "mix": trained | self._expert_use()}

    def _expert_use(self) -> dict[str, Any]:
        """Shares of the experts of the trained mix by domain, layer and expert, and what they say about the domain in bits."""
        from recipes.btm.experts import expert_shares, specificity

        config, info = self.config, self.pipeline.info
        path, rows = self.pipeline.made["mix"].path, config.train.micro_batch_size
        inputs: dict[str, Any] = {"mix": self.pipeline.digests[path], "data": data_digest(info, self.domains)}
        inputs["samples"] = config.train.eval_samples

        def make(folder: Path) -> None:
            model = self.pipeline.open_trained(path, self.pipeline.made["mix"].settings["train.steps"])
            texts = {domain: self.scores.text(domain).evaluation_NS1 for domain in self.domains}
            shares = {name: expert_shares(model, text, info.eod, config.data, rows) for name, text in texts.items()}
            found = {"shares": {name: share_NE.tolist() for name, share_NE in shares.items()}}
            write_json(folder / "experts.json", found | {"specificity_bits": specificity(shares.values())})

        artefact = Artefact("mix/experts", BtmStage.evaluate, inputs)
        self.pipeline.digests[artefact.path] = self.pipeline.store(artefact, make)
        found = json.loads((self.pipeline.folder / artefact.path / "experts.json").read_text())
        return {"experts": {"names": self.arms.mixed(config.btm.mix_seed_expert), **found}}

    def _fitted(self) -> GPT:
        """The untrained mix with routers regressed on development text and its labels."""
        from recipes.btm.mix import fit_routers

        model = self.pipeline.open_trained("mix/start", self.arms.amounts.branches)
        batches, labels = [], []
        for domain in self.domains:
            prior = self.scores.prior(self.arms.used, domain, BtmStage.evaluate)
            expert = self.arms.used.index(max(prior, key=prior.__getitem__))
            tokens = torch.from_numpy(self.scores.text(domain).development_NS1[:, :-1])
            for part in tokens.split(self.config.train.micro_batch_size):
                batches.append(part)
                labels.append(torch.full((len(part),), expert))
        fit_routers(model, batches, labels, RIDGE_SHARPNESS)
        return model


def compute(pipeline: Pipeline) -> dict[str, float]:
    """FLOPs of training, forward and backward, of each arm and of the methods as a whole."""
    config, ends = pipeline.base, pipeline.arms.amounts
    per_step = flops_per_token(config) * config.model.seq_length
    branch = (ends.branches - ends.seed) * ends.branch_batch * per_step
    seed = ends.seed * ends.batch * per_step
    found = {
        "flops_dense": ends.dense * ends.batch * per_step,
        "flops_seed": seed,
        "flops_branch": branch,
        "flops_branches": branch * len(pipeline.arms.parts),
        "flops_btm": seed + branch * len(pipeline.arms.parts),
        "flops_added": branch * len(pipeline.arms.added),
        "flops_control": branch * len(pipeline.arms.control),
    }
    if "mix" in pipeline.made:
        from recipes.btm.arms import complete

        described = complete(pipeline.made["mix"], pipeline.config, pipeline.folder, check=False)
        per_token = flops_per_token(described) * config.model.seq_length
        found["flops_mix"] = (ends.mix - ends.branches) * ends.batch * per_token
        found["flops_btx"] = found["flops_btm"] + found["flops_mix"]
    return {key: float(value) for key, value in found.items()}


def evaluate(pipeline: Pipeline) -> None:
    """evaluate/results.json, its pictures, summary.json, and a table on the terminal."""
    from recipes.btm import show

    config, arms = pipeline.config, pipeline.arms
    evaluation = Evaluation(pipeline)
    stage, btm = BtmStage.evaluate, config.btm
    singles = {name: evaluation.single(evaluation.scores.of_arm(name, stage)) for name in ("dense", "seed", *arms.used)}
    family = "random" if btm.split_by is SplitBy.random else btm.split_by.value
    variants = {family: evaluation.variants(arms.used)}
    main = {family: evaluation.ensemble(arms.used, btm.form, btm.prior, btm.top_k)}
    if btm.split_by is SplitBy.cluster:
        main[family] = variants[family]["routed"] = evaluation.routed(arms.used)
    if arms.control:
        variants["random"] = evaluation.variants(arms.control)
        main["random"] = evaluation.ensemble(arms.control, btm.form, btm.prior, btm.top_k)
    averages, mixes = evaluation.averages(), evaluation.mixes()
    results = {
        "domains": evaluation.domains,
        "branches": arms.used,
        "matrix": {name: singles[name]["by_domain"] for name in arms.used},
        "models": singles,
        "ensembles": variants,
        "ensemble": main,
        "averages": averages,
        "mixes": mixes,
        "amounts": vars(arms.amounts),
        "compute": compute(pipeline),
        "samples": {domain: len(evaluation.scores.text(domain).evaluation_NS1) for domain in evaluation.domains},
    }
    inputs = {
        "scores": {key: value for key, value in pipeline.digests.items() if key.startswith(("scores/", "mix/experts"))},
        "merge": pipeline.digests["merge"],
        "settings": pipeline.weighing_inputs(arms.used)["weighing"],
        "compute": results["compute"],
    }

    def make(folder: Path) -> None:
        write_json(folder / "results.json", results)
        for name, picture in show.pictures(results, posteriors(evaluation)).items():
            replace_bytes(folder / name, picture)

    pipeline.store(Artefact("evaluate", stage, inputs, digest_folder), make)
    write_json(pipeline.folder / "summary.json", summary(results))
    show.print_table(results)


def posteriors(evaluation: Evaluation) -> dict[str, torch.Tensor]:
    """How far each branch is believed along the first held-out sequence of each domain, from a uniform prior: [E, S]."""
    names, found = evaluation.arms.used, {}
    for domain in evaluation.domains:
        log_probs_ENS = evaluation.scores.stacked(names, domain, "evaluation", BtmStage.evaluate)[:, :1]
        form = evaluation.config.btm.form
        documents = evaluation.scores.documents(domain)
        first = None if documents is None else documents[:1]
        uniform_E = uniform_log_prior(len(names))
        found[domain] = expert_log_weights(log_probs_ENS, uniform_E, form, documents=first)[:, 0].exp()
    return found


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that others rely on: `ppl_*`, each with `_by_domain`, and `flops_*`; null where there is no such model."""
    models = {
        "dense": results["models"]["dense"],
        "seed": results["models"]["seed"],
        **{f"ensemble_{family}": results["ensemble"].get(family) for family in ("domain", "random", "cluster")},
        **{f"average_{kind}": results["averages"].get(kind) for kind in ("uniform", "posterior", "argmax", "given")},
        **{name: results["mixes"].get(name) for name in ("mix", "mix_ridge")},
    }
    found: dict[str, Any] = {}
    for name, value in models.items():
        found[f"ppl_{name}"] = None if value is None else value["ppl"]
        found[f"ppl_{name}_by_domain"] = None if value is None else value["by_domain"]
    return found | dict(results["compute"])
