"""Experts' log-probabilities -> how far each is believed at each token -> log-probabilities of the ensemble. Pure functions.

    p(x_t | x_<t) = sum_j p_j(x_t | x_<t) p(D = j | x_<t),   p(D = j | x_<t) proportional to p_j(x_<t) p(D = j)

(Gururangan et al. 2021, arXiv 2108.05036, sec. 5; Li et al. 2022, arXiv 2208.03306.) All in fp64 and in nats.

E experts, B sequences, S positions, V vocabulary. `log_probs_EBS[j, b, t]` is what expert j gave to the label of position t.
"""

from __future__ import annotations

import torch

from recipes.config import PosteriorForm
from recipes.data.packing import Documents


def evidence(log_probs_EBS: torch.Tensor, form: PosteriorForm) -> torch.Tensor:
    """log p_j of what lies before each position: all labels before it, or the last alone; 0 at the first. fp64 [E, B, S]."""
    before_EBS = torch.zeros(log_probs_EBS.shape, dtype=torch.float64, device=log_probs_EBS.device)
    known_EBS = log_probs_EBS[..., :-1].double()
    before_EBS[..., 1:] = known_EBS.cumsum(dim=-1) if form is PosteriorForm.cumulative else known_EBS
    return before_EBS


def expert_log_weights(
    log_probs_EBS: torch.Tensor,
    log_prior_E: torch.Tensor,
    form: PosteriorForm,
    updating: float | None = None,
    top_k: int | None = None,
    documents: Documents | None = None,
) -> torch.Tensor:
    """log p(D = j | x_<t): fp64 [E, B, S]. With `documents` x_<t is what lies before in the same one, else in the sequence.

    updating: None leaves the prior as it is; else the prior of the next position is (1 - updating) of this one's and
    `updating` of the posterior at this one. top_k: see `keep_top`.
    """
    if documents is not None:
        settings = (log_prior_E, form, updating, top_k)
        found = []
        for lengths, sequence_E1S in zip(documents, log_probs_EBS.split(1, dim=1), strict=True):
            parts = [expert_log_weights(part, *settings) for part in sequence_E1S.split(lengths, dim=2)]
            found.append(torch.cat(parts, dim=2))
        return torch.cat(found, dim=1)
    before_EBS, prior_E1 = evidence(log_probs_EBS, form), log_prior_E.double()[:, None]
    if updating is None:
        log_weights_EBS = (before_EBS + prior_E1[..., None]).log_softmax(dim=0)
    else:
        posteriors, prior_EB = [], prior_E1.exp().expand(before_EBS.shape[:2])
        for before_EB in before_EBS.unbind(dim=-1):
            posteriors.append((before_EB + prior_EB.log()).log_softmax(dim=0))
            prior_EB = (1 - updating) * prior_EB + updating * posteriors[-1].exp()
        log_weights_EBS = torch.stack(posteriors, dim=-1)
    return log_weights_EBS if top_k is None else keep_top(log_weights_EBS, top_k)


def keep_top(log_weights_EX: torch.Tensor, top_k: int) -> torch.Tensor:
    """The `top_k` largest weights over the experts, renormalised; the others are -inf. Of equal ones the first are kept."""
    order_EX = log_weights_EX.sort(dim=0, descending=True, stable=True).indices
    kept_EX = torch.full_like(log_weights_EX, -torch.inf)
    chosen_KX = order_EX[:top_k]
    return kept_EX.scatter(0, chosen_KX, log_weights_EX.gather(0, chosen_KX)).log_softmax(dim=0)


def mixture(log_probs_EX: torch.Tensor, log_weights_EX: torch.Tensor) -> torch.Tensor:
    """log sum_j w_j p_j over the first dimension; the weights sum to 1. fp64.

    Equal experts give exactly what one of them gives: weights enter as a ratio of two sums that are then the same.
    """
    log_probs_EX, weights_EX = log_probs_EX.double(), log_weights_EX.double().exp()
    heard_EX = torch.where(weights_EX > 0, log_probs_EX, -torch.inf)
    highest_X = heard_EX.amax(dim=0)
    safe_X = torch.where(highest_X.isfinite(), highest_X, 0.0)
    total_X = (weights_EX * (heard_EX - safe_X).exp()).sum(dim=0)
    return safe_X + (total_X / weights_EX.expand_as(heard_EX).sum(dim=0)).log()


def cached_prior(log_probs_EBS: torch.Tensor, decay: float) -> torch.Tensor:
    """p(D = j) of the text that the B sequences are samples of: the moving average of the posteriors at their ends. [E].

    It begins uniform, and each sequence's posterior, of all of its tokens under a uniform prior, enters with weight `decay`.
    """
    experts = len(log_probs_EBS)
    whole_EB = log_probs_EBS.double().sum(dim=-1)
    prior_E = torch.full((experts,), 1 / experts, dtype=torch.float64, device=log_probs_EBS.device)
    for posterior_E in whole_EB.softmax(dim=0).unbind(dim=1):
        prior_E = (1 - decay) * prior_E + decay * posterior_E
    return prior_E


def uniform_log_prior(experts: int) -> torch.Tensor:
    """log(1 / E) of each expert."""
    return torch.full((experts,), 1 / experts, dtype=torch.float64).log()
