"""Weights and mixtures against sums by hand, for each form, prior and number of experts that speak."""

from __future__ import annotations

import itertools

import pytest
import torch

from recipes.btm import ensemble
from recipes.config import PosteriorForm
from tests.unit.btm.oracle import cached_prior_by_hand, ensemble_by_hand, weights_by_hand

EXPERTS, SEQUENCES, POSITIONS = 5, 3, 9


def log_probs(seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (EXPERTS, SEQUENCES, POSITIONS)
    return -spread * torch.rand(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("form", "updating", "top_k"), itertools.product(PosteriorForm, (None, 0.3), (None, 1, 2, EXPERTS))
)
@pytest.mark.parametrize("uniform", [True, False])
def test_the_ensemble_is_the_sum_by_hand(form, updating, top_k, uniform):
    log_probs_EBS = log_probs()
    prior_E = torch.full((EXPERTS,), 1 / EXPERTS) if uniform else torch.tensor([0.4, 0.1, 0.25, 0.05, 0.2])
    prior_E = prior_E.double()
    log_weights = ensemble.expert_log_weights(log_probs_EBS, prior_E.log(), form, updating, top_k)
    mixed_BS = ensemble.mixture(log_probs_EBS, log_weights)
    for sequence in range(SEQUENCES):
        rows, cumulative = log_probs_EBS[:, sequence].tolist(), form is PosteriorForm.cumulative
        weights = weights_by_hand(rows, prior_E.tolist(), cumulative, updating, top_k)
        expected = torch.tensor(ensemble_by_hand(rows, weights), dtype=torch.float64)
        torch.testing.assert_close(log_weights[:, sequence].exp().T, torch.tensor(weights, dtype=torch.float64))
        assert (mixed_BS[sequence] - expected).abs().max() < 1e-10


def test_the_cached_prior_is_the_moving_average_by_hand():
    log_probs_EBS = log_probs(1, spread=0.5)
    found = ensemble.cached_prior(log_probs_EBS, 0.3)
    sequences = log_probs_EBS.transpose(0, 1).tolist()
    expected = cached_prior_by_hand(sequences, 0.3)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert float(found.sum()) == pytest.approx(1)


@pytest.mark.parametrize("experts", [1, 2, 3, 6, 7, 10])
def test_equal_experts_are_exactly_one_of_them(experts):
    one_BS = log_probs()[0]
    many_EBS = one_BS.expand(experts, -1, -1)
    for form, updating, top_k in itertools.product(PosteriorForm, (None, 0.3), (None, 1, 3)):
        weights = ensemble.expert_log_weights(many_EBS, ensemble.uniform_log_prior(experts), form, updating, top_k)
        assert torch.equal(ensemble.mixture(many_EBS, weights), one_BS)


def test_no_position_looks_at_its_own_label_or_later_ones():
    log_probs_EBS = log_probs()
    changed = log_probs_EBS.clone()
    changed[0, :, 5:] -= 4.0
    for form, updating in itertools.product(PosteriorForm, (None, 0.3)):
        old, new = (
            ensemble.expert_log_weights(values, ensemble.uniform_log_prior(EXPERTS), form, updating)
            for values in (log_probs_EBS, changed)
        )
        assert torch.equal(old[..., :6], new[..., :6]) and not torch.equal(old[..., 6], new[..., 6])


def test_long_evidence_and_experts_that_never_speak_stay_finite():
    log_probs_EBS = torch.full((3, 1, 4000), -1.0, dtype=torch.float64)
    log_probs_EBS[1] -= 5.0
    log_prior_E = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    log_probs_EBS[2] = 0.0
    weights = ensemble.expert_log_weights(log_probs_EBS, log_prior_E, PosteriorForm.cumulative)
    mixed_BS = ensemble.mixture(log_probs_EBS, weights)
    assert torch.allclose(mixed_BS[:, -100:], torch.tensor(-1.0, dtype=torch.float64))
    assert float(weights[2].exp().sum()) == 0.0


def test_a_certain_expert_is_heard_although_another_is_sure_of_nothing():
    """An expert that excludes a token must not silence the ensemble."""
    mixed = ensemble.mixture(torch.tensor([[-torch.inf], [-2.0]]), torch.tensor([[0.5], [0.5]]).log())
    assert float(mixed) == pytest.approx(-2.0 - 0.6931471805599453)


@pytest.mark.parametrize(("form", "updating"), itertools.product(PosteriorForm, (None, 0.3)))
def test_evidence_starts_anew_with_each_document(form, updating):
    log_probs_EBS, documents = log_probs(), [[4, 1, 4], [9], [2, 7]]
    log_prior_E = torch.tensor([0.4, 0.1, 0.25, 0.05, 0.2]).double().log()
    found = ensemble.expert_log_weights(log_probs_EBS, log_prior_E, form, updating, 3, documents)
    for sequence, lengths in enumerate(documents):
        for end, length in zip(itertools.accumulate(lengths), lengths, strict=True):
            part = slice(end - length, end)
            alone = log_probs_EBS[:, sequence : sequence + 1, part]
            expected = ensemble.expert_log_weights(alone, log_prior_E, form, updating, 3)
            torch.testing.assert_close(found[:, sequence, part], expected[:, 0], rtol=0, atol=0)
    together = ensemble.expert_log_weights(log_probs_EBS, log_prior_E, form, updating, 3)
    assert torch.equal(found[:, 1], together[:, 1]) and not torch.equal(found[:, 0], together[:, 0])
