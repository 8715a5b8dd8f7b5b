"""Sequences that only fill up a batch of evaluation change nothing: not who is routed where, not the capacity, not the loss."""

from __future__ import annotations

import pytest
import torch

from recipes.config import DataConfig
from tests.ranks import forked
from tests.unit.moe.padding import EOD, ROUTERS, config_of, padded_and_expected, samples

BOUND = 1e-6


@pytest.mark.parametrize("router", ROUTERS)
@forked
def test_nine_samples_in_batches_of_eight_are_eight_and_one(router):
    from recipes.model.gpt import GPT

    found, expected = padded_and_expected(GPT(config_of(router)), 8)
    assert found == pytest.approx(expected, abs=BOUND)


@forked
def test_of_an_ensemble_too():
    from recipes.btm.model import Ensemble, Weighing
    from recipes.config import PosteriorForm
    from recipes.model.gpt import GPT

    experts = [GPT(config_of("expert choice", run__seed=seed)) for seed in (1, 2)]
    ensemble = Ensemble(experts, Weighing(PosteriorForm.cumulative, (0.5, 0.5), None, None))
    found, expected = padded_and_expected(ensemble, 8)
    assert found == pytest.approx(expected, abs=BOUND)


@pytest.mark.parametrize("router", ["top-2", "capacity", "expert choice", "DeepSpeed's top-1"])
@forked
def test_what_experts_are_counted_to_get_is_data(router):
    from recipes.model.gpt import GPT
    from tools.report.domains import _count

    config = config_of(router)
    model = GPT(config).eval()
    nine, eight, ninth = (_count(model, samples(config, *part), EOD) for part in ((0, 9, 8), (0, 8, 8), (8, 1, 1)))
    assert nine.tolist() == (eight + ninth).tolist() and nine.any()


@forked
def test_padding_is_refused_in_training():
    from recipes.model.gpt import GPT
    from recipes.train.batch import model_inputs

    config = config_of("top-2")
    (batch,) = samples(config, 0, 3, 4)
    inputs = model_inputs(batch.tokens_BS1, EOD, DataConfig(), torch.device("cpu"), batch.weight_B > 0)
    with pytest.raises(AssertionError, match="in training all sequences are data"):
        GPT(config)(**inputs)
