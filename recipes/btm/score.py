"""Held-out text -> log-probability of each of its tokens under each model: all that ensembles and perplexities are made of.

    data set -> HeldOut (per domain: sequences to evaluate on, and development sequences behind them)
    model, sequences -> token_log_probs [N, S]

N sequences, S positions, S1 = S + 1 ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from recipes import collectives
from recipes.config import Config, DataConfig
from recipes.data.dataset import DatasetInfo
from recipes.data.indexed import num_windows
from recipes.model.loss import token_losses
from recipes.train.batch import model_inputs


class LanguageModel(Protocol):
    """A model, or an ensemble of them, in evaluation mode."""

    def logits(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
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
        logits_SBV = model.logits(inputs["tokens_BS"], inputs.get("positions_BS"), inputs.get("attention_mask"))
        found.append(-token_losses(logits_SBV, inputs["labels_BS"]).double().cpu())
        on_batch()
    return torch.cat(found)


def counted(tokens_NS1: np.ndarray, eod: int, data: DataConfig) -> torch.Tensor:
    """Which labels count in a loss: bool [N, S]."""
    if not data.eod_mask_loss:
        return torch.ones(tokens_NS1.shape[0], tokens_NS1.shape[1] - 1, dtype=torch.bool)
    return torch.from_numpy(tokens_NS1[:, :-1] != eod)
