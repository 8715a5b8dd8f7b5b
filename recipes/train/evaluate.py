"""Held-out loss per domain: the same samples whatever the layout, as many batches on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from recipes import collectives
from recipes.config import DataConfig
from recipes.data.loader import EvalSet
from recipes.model.gpt import GPT
from recipes.train.batch import model_inputs, valid_tokens


@torch.no_grad()
def evaluate(model: GPT, sets: Mapping[str, EvalSet], eod: int, data: DataConfig) -> dict[str, float]:
    """Nats per valid token of each domain, and of all together under "" (a collective)."""
    was_training = model.training
    model.eval()
    totals = torch.zeros(len(sets), 2, dtype=torch.float64, device=collectives.device())
    for row, eval_set in zip(totals, sets.values(), strict=True):
        for batch in eval_set:
            inputs = model_inputs(batch.tokens_BS1, eod, data, totals.device, batch.weight_B > 0)
            row[0] += model(**inputs).double().sum()
            row[1] += valid_tokens(inputs).sum()
    model.train(was_training)
    collectives.sum_over_ranks(totals.mul_(model.groups.leads))
    losses = {domain: float(nll / tokens) for domain, (nll, tokens) in zip(sets, totals, strict=True) if tokens > 0}
    if losses:
        losses[""] = float(totals[:, 0].sum() / totals[:, 1].sum())
    return losses
