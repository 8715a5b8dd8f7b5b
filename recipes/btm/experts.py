"""Which experts of a mix the held-out text of each domain goes to.

    mix, sequences -> expert_shares [N, E];  shares of all domains -> specificity: what an expert says about the domain, in bits

N layers with experts, E experts, D domains.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from recipes import collectives
from recipes.config import DataConfig
from recipes.model.gpt import GPT
from recipes.moe.layer import MoeLayer
from recipes.train.batch import logit_inputs, model_inputs


@torch.no_grad()
def expert_shares(model: GPT, tokens_NS1: np.ndarray, eod: int, data: DataConfig, batch_size: int) -> np.ndarray:
    """Of all choices of the tokens in a layer, the share that fell on each expert: fp64 [N, E], each row sums to 1."""
    layers = [module for module in model.modules() if isinstance(module, MoeLayer)]
    counts: dict[int, torch.Tensor] = {}

    def count(module: Any, _inputs: Any, output: Any) -> None:
        counts[id(module)] = counts.get(id(module), 0) + output[1].chosen_TE.sum(0).double().cpu()

    handles = [layer.routed.register_forward_hook(count) for layer in layers]
    try:
        for begin in range(0, len(tokens_NS1), batch_size):
            inputs = model_inputs(tokens_NS1[begin : begin + batch_size], eod, data, collectives.device())
            model.logits(**logit_inputs(inputs))
    finally:
        for handle in handles:
            handle.remove()
    counts_NE = torch.stack([counts[id(layer.routed)] for layer in layers]).numpy()
    return counts_NE / counts_NE.sum(axis=1, keepdims=True)


def specificity(shares: Iterable[np.ndarray]) -> float:
    """Mutual information of domain and expert, in bits, of equally many choices of each domain; mean over layers.

    0: all domains use the experts alike; log2(E): each expert has a domain of its own. shares: [N, E] of each domain.
    """
    shares_DNE = np.stack(list(shares))
    mean_NE = shares_DNE.mean(axis=0)
    some_DNE = shares_DNE > 0
    ratio_DNE = np.where(some_DNE, shares_DNE, 1.0) / np.where(some_DNE, mean_NE, 1.0)
    return float((shares_DNE * np.log2(ratio_DNE)).sum(axis=2).mean())
