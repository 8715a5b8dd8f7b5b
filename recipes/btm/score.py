"""Held-out text -> log-probability of each of its tokens under each model: all that ensembles and perplexities are made of.

    data set -> HeldOut (per domain: sequences to evaluate on, and development sequences behind them)
    model, sequences -> token_log_probs [N, S]
    model, data set -> Scores (kept per model, so that an added branch scores only itself)

N sequences, S positions, S1 = S + 1 ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from recipes import collectives
from recipes.btm.ensemble import cached_prior
from recipes.btm.split import data_digest
from recipes.btm.stages import Artefact, digest_files
from recipes.config import BtmStage, Config, DataConfig
from recipes.data.dataset import DatasetInfo
from recipes.data.indexed import num_windows
from recipes.data.packing import Documents, pack
from recipes.files import replace_bytes
from recipes.model.gpt import GPT
from recipes.model.loss import losses_of_logits
from recipes.train.batch import logit_inputs, model_inputs

if TYPE_CHECKING:
    from recipes.btm.pipeline import Pipeline


class LanguageModel(Protocol):
    """A model, or an ensemble of them, in evaluation mode."""

    def logits(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor | None = None,
        documents: Documents | None = None,
        real_B: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class HeldOut:
    """Held-out sequences of one domain: `evaluation` and `development`, int64 [N, S1], which share no label."""

    evaluation_NS1: np.ndarray
    development_NS1: np.ndarray


def held_out(info: DatasetInfo, domain: str, config: Config) -> HeldOut:
    """The first `train.eval_samples` sequences of the valid split, and the next `btm.development_samples`, or those there are.

    A split too short for both keeps a quarter of its sequences for development. Raises ValueError for less than two.
    """
    source, length = info.open(domain, "valid"), config.model.seq_length
    there = num_windows(len(source.ids), length)
    if there < 2:
        raise ValueError(
            f"domain {domain}: {there} sequences of {length} tokens of held-out text; at least two are needed"
        )
    evaluated = min(config.train.eval_samples or there, there)
    if there - evaluated < 1:
        evaluated = there - max(1, there // 4)
    last = min(there, evaluated + max(1, config.btm.development_samples))
    windows_NS1 = np.stack([source.ids[n * length : (n + 1) * length + 1] for n in range(last)]).astype(np.int64)
    return HeldOut(windows_NS1[:evaluated], windows_NS1[evaluated:])


@torch.no_grad()
def token_log_probs(
    model: LanguageModel,
    tokens_NS1: np.ndarray,
    eod: int,
    data: DataConfig,
    batch_size: int,
    on_batch: Callable[[], object] = lambda: None,
) -> torch.Tensor:
    """log p of each label in nats: fp64 [N, S]. `on_batch` hears of each batch that is done."""
    found = []
    for begin in range(0, len(tokens_NS1), batch_size):
        inputs = model_inputs(tokens_NS1[begin : begin + batch_size], eod, data, collectives.device())
        logits_SBV = model.logits(**logit_inputs(inputs))
        found.append(-losses_of_logits(logits_SBV, inputs["labels_BS"]).double().cpu())
        on_batch()
    return torch.cat(found)


def counted(tokens_NS1: np.ndarray, eod: int, data: DataConfig) -> torch.Tensor:
    """Which labels count in a loss: bool [N, S]."""
    if not data.eod_mask_loss:
        return torch.ones(tokens_NS1.shape[0], tokens_NS1.shape[1] - 1, dtype=torch.bool)
    return torch.from_numpy(tokens_NS1[:, :-1] != eod)


class Scores:
    """Log-probabilities of held-out text under each model, by "domain/part": fp64 [N, S]; part: evaluation, development."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline, self.config = pipeline, pipeline.config
        added, removed = self.config.btm.add_domains, self.config.btm.remove_domains
        self.domains = [name for name in [*pipeline.arms.domains, *added] if name not in removed]
        self._texts: dict[str, HeldOut] = {}
        self._known: dict[str, dict[str, torch.Tensor]] = {}

    def text(self, domain: str) -> HeldOut:
        """The held-out sequences of a domain."""
        if domain not in self._texts:
            self._texts[domain] = held_out(self.pipeline.info, domain, self.config)
        return self._texts[domain]

    def of_arm(self, name: str, stage: BtmStage) -> dict[str, torch.Tensor]:
        """Scores of a trained arm, computed now if they are not there."""
        arm = self.pipeline.made[name]
        return self.of(
            name,
            self.pipeline.digests[arm.path],
            lambda: self.pipeline.open_trained(arm.path, arm.settings["train.steps"]),
            stage,
        )

    def of(self, name: str, model: Any, opened: Callable[[], GPT], stage: BtmStage, only: str | None = None):
        """Scores of a model whose content `model` identifies; `only`: of the evaluation text of one domain."""
        if name in self._known:
            return self._known[name]
        btm, train, data = self.config.btm, self.config.train, self.config.data
        domains = self.domains if only is None else [only]
        inputs = {
            "model": model,
            "data": data_digest(self.pipeline.info, domains),
            "samples": [train.eval_samples, btm.development_samples, train.micro_batch_size],
            "options": [data.reset_position_ids, data.reset_attention_mask],
        }

        def make(folder: Path) -> None:
            self.pipeline.say(f"scoring {name}")
            scored, ready = {}, opened()
            for domain in domains:
                parts = {"evaluation": self.text(domain).evaluation_NS1}
                if only is None:
                    parts["development"] = self.text(domain).development_NS1
                for part, tokens_NS1 in parts.items():
                    found = token_log_probs(ready, tokens_NS1, self.pipeline.info.eod, data, train.micro_batch_size)
                    if not found.isfinite().all():
                        raise ValueError(f"{name} gives {domain} a loss that is not finite: its training has diverged")
                    scored[f"{domain}/{part}"] = found.contiguous()
            replace_bytes(folder / "scores.safetensors", save(scored))

        artefact = Artefact(f"scores/{name}", stage, inputs, _scores_digest)
        self.pipeline.digests[artefact.path] = self.pipeline.store(artefact, make)
        self._known[name] = load_file(self.pipeline.folder / artefact.path / "scores.safetensors")
        return self._known[name]

    def stacked(self, names: Sequence[str], domain: str, part: str, stage: BtmStage) -> torch.Tensor:
        """[E, N, S] of several arms."""
        return torch.stack([self.of_arm(name, stage)[f"{domain}/{part}"] for name in names])

    def prior(self, names: Sequence[str], domain: str, stage: BtmStage) -> dict[str, float]:
        """The cached prior of a domain's text over these branches."""
        if domain not in self.domains:
            self.domains.append(domain)
        development = self.stacked(names, domain, "development", stage)
        return dict(zip(names, cached_prior(development, self.config.btm.prior_decay).tolist(), strict=True))

    def documents(self, domain: str) -> Documents | None:
        """The documents of the evaluation, where models are told of them."""
        if not self.config.data.reset_attention_mask:
            return None
        return pack(self.text(domain).evaluation_NS1, self.pipeline.info.eod).document_lengths

    def counted(self, domain: str) -> torch.Tensor:
        """Which labels of the evaluation count."""
        return counted(self.text(domain).evaluation_NS1, self.pipeline.info.eod, self.config.data)


def _scores_digest(folder: Path) -> str:
    path = folder / "scores.safetensors"
    try:
        load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: {error}") from error
    return digest_files([path], folder)
