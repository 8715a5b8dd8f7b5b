"""The ensemble as a model: real small models against probabilities added up one token at a time, and its files."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from recipes.btm.model import DESCRIPTION, Ensemble, Weighing, open_model, write_ensemble
from recipes.config import PosteriorForm
from recipes.model.gpt import GPT
from tests.ranks import forked
from tests.tiny import tiny_config
from tests.unit.btm.oracle import weights_by_hand

EXPERTS = 3


def models() -> list[GPT]:
    return [GPT(tiny_config(run__seed=seed, model__init_method_std=0.5)).double().eval() for seed in range(EXPERTS)]


def tokens() -> torch.Tensor:
    return torch.randint(0, 60, (2, 17), generator=torch.Generator().manual_seed(5))


@forked
@torch.no_grad()
def test_every_probability_of_the_ensemble_is_the_sum_by_hand():
    """fp64 models; for each sequence, position and token of the vocabulary."""
    experts, ids = models(), tokens()
    inputs, labels = ids[:, :-1], ids[:, 1:]
    answers = [expert.logits(inputs).double().log_softmax(-1) for expert in experts]
    priors = ((0.5, 0.2, 0.3), (1 / 3, 1 / 3, 1 / 3))
    for prior, form, updating, top_k in itertools.product(priors, PosteriorForm, (None, 0.3), (None, 1, 2)):
        ensemble = Ensemble(experts, Weighing(form, prior, updating, top_k)).eval()
        found_SBV, nll_B = ensemble.logits(inputs), ensemble(inputs, labels)
        for row in range(2):
            known = [[float(a[t, row, labels[row, t]]) for t in range(16)] for a in answers]
            weights = weights_by_hand(known, prior, form is PosteriorForm.cumulative, updating, top_k)
            total = 0.0
            for t in range(16):
                expected = sum(w * a[t, row].exp() for w, a in zip(weights[t], answers, strict=True))
                torch.testing.assert_close(found_SBV[t, row].double(), expected.log(), rtol=2e-6, atol=2e-6)
                total -= math.log(float(expected[labels[row, t]]))
            assert float(nll_B[row]) == pytest.approx(total, rel=1e-6)


@forked
@torch.no_grad()
def test_equal_experts_give_exactly_the_single_model():
    single, ids = models()[0].float(), tokens()
    ensemble = Ensemble([single] * 5, Weighing(PosteriorForm.cumulative, (0.2,) * 5, None, None)).eval()
    expected = single.logits(ids).float().log_softmax(-1)
    assert torch.equal(ensemble.logits(ids), expected)
    single_nll, nll = (model(ids[:, :-1], ids[:, 1:]) for model in (single, ensemble))
    torch.testing.assert_close(nll, single_nll, rtol=1e-6, atol=0)  # one adds tokens up in fp32, the other in fp64


@forked
@torch.no_grad()
def test_held_out_loss_takes_one_forward_pass_of_each_model():
    experts, ids, calls = models(), tokens(), []
    for expert in experts:
        expert.final_norm.register_forward_pre_hook(lambda module, args: calls.append(module))
    ensemble = Ensemble(experts, Weighing(PosteriorForm.cumulative, (1 / 3,) * 3, 0.3, 2)).eval()
    ensemble(ids[:, :-1], ids[:, 1:])
    assert calls == [expert.final_norm for expert in experts]


def test_a_damaged_description_is_one_clear_message(tmp_path):
    weighing = Weighing(PosteriorForm.cumulative, (0.5, 0.5), None, 1)
    write_ensemble(
        tmp_path / "merge" / "ensemble", {"a": tmp_path / "branches/a", "b": tmp_path / "branches/b"}, weighing
    )
    file = tmp_path / "merge" / "ensemble" / DESCRIPTION
    found = json.loads(file.read_text())
    assert found["branches"] == {"a": "../../branches/a", "b": "../../branches/b"} and found["top_k"] == 1
    for key, value in (("prior", [1.0]), ("form", "other"), ("branches", [])):
        file.write_text(json.dumps(found | {key: value}))
        with pytest.raises(ValueError, match=r"ensemble\.json: damaged .* merge the branches again"):
            open_model(file.parent)
