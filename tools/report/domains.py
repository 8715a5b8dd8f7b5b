"""Which experts the held-out text of each domain goes to, counted with the model of a checkpoint.

run folder -> newest complete checkpoint -> model; its data -> evaluation samples of the valid split -> DomainUse
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recipes.logical import expert_counts

if TYPE_CHECKING:
    import torch

    from recipes.data.loader import EvalSet
    from recipes.model.gpt import GPT


@dataclass(frozen=True)
class DomainUse:
    """counts_DNE: assignments of tokens of D domains to up to E experts in N layers (a token has one per expert it goes to)."""

    domains: list[str]
    layers: list[int]  # their global numbers, from 0
    step: int  # of the checkpoint
    counts_DNE: np.ndarray  # 0 behind a layer's own experts

    @property
    def share_DNE(self) -> np.ndarray:
        """Of a domain's assignments in a layer: sums to 1 over experts (to 0 without any token)."""
        return self.counts_DNE / self.counts_DNE.sum(axis=2, keepdims=True).clip(min=1)


def domain_use(folder: Path, say: Callable[[str], None] = print) -> DomainUse:
    """Counts over the samples that the run was evaluated on.

    Raises ValueError when the model has no experts, or its checkpoint or its data cannot be opened.
    """
    from recipes.checkpoint.model import open_model
    from tools.evaluate import open_data, open_sets

    model, config, checkpoint = open_model(folder, say)
    if model.moe is None:
        raise ValueError(f"{checkpoint.path}: a model without experts")
    dataset = open_data(None, config, checkpoint)
    sets = open_sets(dataset, "valid", config, None, None)
    counts_DNE = np.stack([_count(model, eval_set, dataset.eod) for eval_set in sets.values()])
    return DomainUse(list(sets), list(model.moe.layers), checkpoint.step, counts_DNE)


def _count(model: GPT, eval_set: EvalSet, eod: int) -> np.ndarray:
    """Assignments of one domain: int64 [N, E]. What the router chose counts, also if a full expert turned it away."""
    import torch

    from recipes.train.batch import logit_inputs, model_inputs

    device = next(model.parameters()).device
    layers = expert_counts(model.config)
    counts_NE = np.zeros((len(layers), max(layers.values())), dtype=np.int64)
    for batch in eval_set:
        inputs = model_inputs(batch.tokens_BS1, eod, model.config.data, device, batch.weight_B > 0)
        with _routing(model) as chosen, torch.inference_mode():
            model.logits(**logit_inputs(inputs))
        for row, (layer, num_experts) in enumerate(layers.items()):
            counts_NE[row, :num_experts] += chosen[layer].sum(0).cpu().numpy()
    return counts_NE


@contextlib.contextmanager
def _routing(model: GPT) -> Iterator[Mapping[int, torch.Tensor]]:
    """Global layer -> chosen_TE, the experts of each token, in the forward pass made inside."""
    from recipes.moe.layer import MoeLayer

    chosen: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(_module: object, _inputs: object, output: tuple) -> None:
            _out_TH, routing = output
            chosen[layer] = routing.chosen_TE

        return hook

    layers = [module for module in model.modules() if isinstance(module, MoeLayer)]
    handles = [module.routed.register_forward_hook(keep(module.layer)) for module in layers]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()
