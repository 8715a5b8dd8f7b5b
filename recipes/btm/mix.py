"""Branches -> one Mixture of Experts (Sukhbaatar et al. 2024, arXiv 2403.07816): feed-forward parts become experts, all else is
averaged, routers are new.

    checkpoints of branches -> Mix, which reads like a checkpoint -> average.write -> the ordinary MoE recipe trains it on
    a built mix + text with labels -> fit_routers: routers by ridge regression, without training
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recipes.btm.average import Average, Tensors, uniform
from recipes.checkpoint.format import Checkpoint
from recipes.checkpoint.manifest import Dims
from recipes.config import Config, to_plain
from recipes.logical import initial_value, logical_tensors
from recipes.model.gpt import GPT, registry

_EXPERT = re.compile(r"(?P<layer>layers\.\d+)\.moe\.experts\.(?P<expert>\d+)\.(?P<matrix>.+)")
_MOMENTS = ("exp_avg/", "exp_avg_sq/")


class Mix:
    """The mix of `experts` (all equal in shape, one per expert, in order), as something that is read like a checkpoint.

    `averaged` names those whose other weights are averaged: the branches, without a seed that is only an expert.
    Moments go the way of their weights; new routers have none. `config` is a complete description of the mix.
    """

    def __init__(self, experts: Mapping[str, Checkpoint], averaged: Sequence[str], config: Config):
        self.config, self.names = config, list(experts)
        self.average = Average(experts, uniform(dict.fromkeys(averaged)))
        self.described = logical_tensors(config)
        self.path = f"mix of {', '.join(experts)}"

    @property
    def trainer(self) -> dict[str, Any]:
        return {**self.average.trainer, "config": to_plain(self.config)}

    def kinds(self) -> list[str]:
        return self.average.kinds()

    def require(self, *kinds: str) -> None:
        self.average.require(*kinds)

    def tensors(self, kind: str) -> Tensors:
        if kind == "model":
            return {name: (tensor.shape, torch.float32) for name, tensor in self.described.items()}
        if kind == "optimizer":
            moments = [moment for moment in _MOMENTS if any(n.startswith(moment) for n in self.average.tensors(kind))]
            return {f"{m}{name}": (t.shape, torch.float32) for name, t in self.described.items() for m in moments}
        return self.average.tensors(kind)

    def read(self, kind: str, name: str, offsets: Dims | None = None, shape: Dims | None = None) -> torch.Tensor:
        """An expert's matrix from its branch, a router drawn from the seed of the run, anything else averaged."""
        moment, _, tensor = name.rpartition("/") if kind == "optimizer" else ("", "", name)
        prefix = f"{moment}/" if moment else ""
        if tensor.endswith(".moe.router.weight"):
            described = self.described[tensor]
            whole = torch.zeros(described.shape) if moment else initial_value(described, self.config.run.seed)
            return whole if offsets is None or shape is None else whole[_box(offsets, shape)].clone()
        if match := _EXPERT.fullmatch(tensor):
            branch = self.average.members[self.names[int(match["expert"])]]
            return branch.read(kind, f"{prefix}{match['layer']}.ffn.{match['matrix']}", offsets, shape)
        return self.average.read(kind, name, offsets, shape)


def _box(offsets: Dims, shape: Dims) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))


def ridge(x_TH: torch.Tensor, targets_TE: torch.Tensor, strength: float = 1e-3) -> torch.Tensor:
    """W [E, H] of the least squares x W' ~ targets, with `strength` x the mean of x^2 as penalty. fp64.

    No constant term: a router has none.
    """
    x_TH, targets_TE = x_TH.double(), targets_TE.double()
    gram_HH = x_TH.T @ x_TH
    penalty = strength * gram_HH.diagonal().mean().clamp(min=1e-30)
    gram_HH = gram_HH + penalty * torch.eye(len(gram_HH), dtype=torch.float64, device=x_TH.device)
    return torch.linalg.solve(gram_HH, x_TH.T @ targets_TE).T


@torch.no_grad()
def fit_routers(model: GPT, batches: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], sharpness: float) -> None:
    """Give every router the regression of one-hot labels on what it reads, first layer first, without training.

    batches: ids [B, S]; labels: the expert of each of their sequences, [B], -1 for none; on any device. Targets are
    `sharpness` for the expert of the text and 0 for all others, so that a router that is sure gives it almost all of the
    gate. A layer is fitted on what the layers below, already fitted, hand to it: one forward pass over all batches per layer.
    """
    device = next(model.parameters()).device
    routers = {piece.name: entry for entry in registry(model, model.config) for piece in entry.pieces}
    for block in model.blocks:
        name = f"layers.{block.layer}.moe.router.weight"
        if name not in routers:
            continue
        inputs: list[torch.Tensor] = []
        handle = _mlp(block).register_forward_pre_hook(lambda module, args, kept=inputs: kept.append(args[0].clone()))
        for tokens_BS in batches:
            model.logits(tokens_BS.to(device))
        handle.remove()
        experts = len(routers[name].parameter)
        x_TH, targets_TE = [], []
        for x_SBH, labels_B in zip(inputs, (labels_B.to(device) for labels_B in labels), strict=True):
            known_B = labels_B >= 0
            one_hot_BE = nn.functional.one_hot(labels_B[known_B], experts) * sharpness
            x_TH.append(x_SBH[:, known_B].reshape(-1, x_SBH.shape[-1]))
            targets_TE.append(one_hot_BE.repeat(len(x_SBH), 1))
        router = routers[name].parameter
        router.copy_(ridge(torch.cat(x_TH), torch.cat(targets_TE)).to(router.dtype))


def _mlp(block: nn.Module) -> nn.Module:
    return block.inner.mlp  # type: ignore[union-attr, return-value]
