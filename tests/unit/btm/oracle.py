"""The ensemble by hand: one sequence, one position and one expert at a time, in Python numbers."""

from __future__ import annotations

import math


def _normalised(values: list[float]) -> list[float]:
    highest = max(values)
    scaled = [math.exp(value - highest) for value in values]
    return [value / math.fsum(scaled) for value in scaled]


def weights_by_hand(log_probs, prior, cumulative, updating, top_k):
    """p(D = j | x_<t) of one sequence: log_probs[j][t] -> weights[t][j]."""
    experts, positions = range(len(log_probs)), len(log_probs[0])
    prior, found = list(prior), []
    for t in range(positions):
        history = range(t) if cumulative else range(max(t - 1, 0), t)
        scores = [math.log(prior[j]) + math.fsum(log_probs[j][s] for s in history) for j in experts]
        posterior = _normalised(scores)
        if updating is not None:
            prior = [(1 - updating) * p + updating * q for p, q in zip(prior, posterior, strict=True)]
        chosen = sorted(experts, key=lambda j: (-posterior[j], j))[: top_k or len(log_probs)]
        total = math.fsum(posterior[j] for j in chosen)
        found.append([posterior[j] / total if j in chosen else 0.0 for j in experts])
    return found


def ensemble_by_hand(log_probs, weights):
    """log p(x_t | x_<t) of one sequence."""
    experts = range(len(log_probs))
    return [math.log(math.fsum(w[j] * math.exp(log_probs[j][t]) for j in experts)) for t, w in enumerate(weights)]


def cached_prior_by_hand(log_probs_of_sequences, decay):
    """log_probs_of_sequences[b][j][t] -> prior[j]."""
    experts = len(log_probs_of_sequences[0])
    prior = [1 / experts] * experts
    for log_probs in log_probs_of_sequences:
        posterior = _normalised([math.fsum(row) for row in log_probs])
        prior = [(1 - decay) * p + decay * q for p, q in zip(prior, posterior, strict=True)]
    return prior
