"""An ensemble of branches as a model: what takes a checkpoint and calls `logits` or `forward` takes an ensemble too.

    RUN/ensemble/ensemble.json (branches, form, prior, top-k) -> open_model -> Ensemble

`open_model` opens both; generation and evaluation need not know which they got.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from recipes.btm.average import check_alike
from recipes.btm.ensemble import expert_log_weights, mixture
from recipes.checkpoint import model as single
from recipes.checkpoint.format import Checkpoint
from recipes.config import Config, PosteriorForm
from recipes.data.packing import Documents
from recipes.description import one_message, read_value
from recipes.files import own_folder, parse_json
from recipes.model.gpt import GPT
from recipes.model.loss import losses_of_logits
from recipes.telemetry.summary import write_json

DESCRIPTION = "ensemble.json"


@dataclass(frozen=True)
class Weighing:
    """How experts are weighed (see `ensemble.expert_log_weights`). `prior`: probability of each expert before any token."""

    form: PosteriorForm
    prior: tuple[float, ...]
    updating: float | None
    top_k: int | None

    def log_weights(self, log_probs_EBS: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        """fp64 [E, B, S]."""
        log_prior_E = torch.tensor(self.prior, dtype=torch.float64, device=log_probs_EBS.device).log()
        return expert_log_weights(log_probs_EBS, log_prior_E, self.form, self.updating, self.top_k, documents)


class Ensemble(nn.Module):
    """Models of one vocabulary that answer as one."""

    def __init__(self, experts: Sequence[GPT], weighing: Weighing):
        super().__init__()
        self.experts, self.weighing = nn.ModuleList(experts), weighing
        self.config, self.groups = experts[0].config, experts[0].groups

    def logits(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor | None = None,
        documents: Documents | None = None,
        real_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Log-probabilities of the ensemble: fp32 [S, B, V]."""
        answers_ESBV = torch.stack([_log_probs(e, tokens_BS, positions_BS, documents, real_B) for e in self.experts])
        # The last position has no label here, and its own is never part of its evidence.
        labels_SB1 = torch.cat((tokens_BS[:, 1:], tokens_BS[:, :1]), dim=1).T[..., None]
        known_EBS = torch.stack([a_SBV.gather(-1, labels_SB1)[..., 0].T for a_SBV in answers_ESBV])
        weights_ESB1 = self.weighing.log_weights(known_EBS, documents).transpose(1, 2)[..., None]
        return mixture(answers_ESBV, weights_ESB1).float()

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor,
        loss_mask_BS: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        documents: Documents | None = None,
        real_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The negative log likelihood per sequence, fp32 [B], as of a single model."""
        known_EBS = torch.stack(
            [-_losses(e, labels_BS, tokens_BS, positions_BS, documents, real_B) for e in self.experts]
        )
        losses_BS = -mixture(known_EBS, self.weighing.log_weights(known_EBS, documents))
        losses_B = (losses_BS if loss_mask_BS is None else losses_BS * loss_mask_BS).sum(dim=1).float()
        return losses_B if real_B is None else losses_B.where(real_B, 0.0)


def _log_probs(model: Any, *inputs: Any) -> torch.Tensor:
    return model.logits(*inputs).float().log_softmax(-1)


def _losses(model: Any, labels_BS: torch.Tensor, *inputs: Any) -> torch.Tensor:
    return losses_of_logits(model.logits(*inputs), labels_BS).double()


def write_ensemble(folder: Path, branches: dict[str, Path], weighing: Weighing) -> None:
    """Describe an ensemble of run folders, relative to `folder`, so that the whole may be moved."""
    own_folder(folder)
    values: dict[str, Any] = {
        "branches": {name: os.path.relpath(path, folder) for name, path in branches.items()},
        "form": weighing.form.value,
        "prior": list(weighing.prior),
        "updating": weighing.updating,
        "top_k": weighing.top_k,
    }
    write_json(folder / DESCRIPTION, values)


def open_model(path: Path, say: Callable[[str], None] = print) -> tuple[GPT, Config, Checkpoint]:
    """As `checkpoint.model.open_model`; for the folder of an ensemble all of its branches, and the first one's checkpoint.

    An `Ensemble` is no GPT, but answers to what generation and evaluation ask of one.
    """
    if not (path / DESCRIPTION).exists():
        return single.open_model(path, say)
    try:
        found = parse_json((path / DESCRIPTION).read_text())
        folders = {str(name): path / str(folder) for name, folder in found["branches"].items()}
        types = {"prior": list[float], "updating": float | None, "top_k": int | None}
        if problems := [text for key, kind in types.items() for text in read_value(kind, found[key], key)]:
            raise ValueError(one_message(problems))
        prior, updating, top_k = tuple(found["prior"]), found["updating"], found["top_k"]
        weighing = Weighing(PosteriorForm(found["form"]), prior, updating, top_k)
        if len(prior) != len(folders) or not folders:
            raise ValueError(f"{len(prior)} prior probabilities for {len(folders)} branches")
        if min(prior) < 0 or not 0.99 < sum(prior) < 1.01:
            raise ValueError(f"prior={prior} is no distribution")
        if (updating is not None and not 0 < updating <= 1) or (top_k is not None and top_k < 1):
            raise ValueError(f"updating={updating} must be above 0 and at most 1, top_k={top_k} at least 1")
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path / DESCRIPTION}: damaged ({type(error).__name__}: {error}); merge the branches again"
        ) from error
    opened = {name: single.open_model(folder, say) for name, folder in folders.items()}
    check_alike({name: checkpoint for name, (_, _, checkpoint) in opened.items()})
    models = [model for model, _, _ in opened.values()]
    _, config, checkpoint = next(iter(opened.values()))
    return cast(GPT, Ensemble(models, weighing).eval()), config, checkpoint
