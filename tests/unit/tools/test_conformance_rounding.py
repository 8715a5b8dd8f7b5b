"""What rounding can do to a tensor: much where sums cancel, as much as to any other elsewhere, and no fault hides behind it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed.test_gradients import worst
from tests.distributed.workers import numpy, plain_gradients
from tests.ranks import forked
from tests.tiny import tiny_config, tiny_moe_config
from tools.conformance.rounding import AMPLITUDE, UNIT, RandomRounding, term_norms

BOUND = 1e-5
ONE_TOKEN = {"model__seq_length": 1, "train__global_batch_size": 1, "train__micro_batch_size": 1}


def terms_of(config, grads):
    return term_norms(lambda rounding: numpy(plain_gradients(config, False, rounding)[2]), numpy(grads))


def test_a_sum_that_cancels_has_the_norm_of_its_terms():
    x = torch.tensor([1000.0, 1.0, -1000.0])

    def compute(rounding: RandomRounding | None = None) -> dict[str, np.ndarray]:
        with rounding or torch.no_grad():
            parts = x * 1.0
            sums = {"cancels": parts.sum(), "adds": parts.abs().sum(), "squares": parts.square().sum()}
            return {name: (value * torch.ones(64)).numpy() for name, value in sums.items()}

    terms = term_norms(compute, compute())
    norms = {name: np.linalg.norm(tensor) for name, tensor in compute().items()}
    assert terms["cancels"] > 100 * norms["cancels"]
    assert terms["adds"] < norms["adds"] and terms["squares"] < norms["squares"]


def test_numbers_that_are_only_moved_stay_as_they_are():
    x = torch.randn(5, 7)
    with RandomRounding():
        moved = torch.cat([x.t().clone(), x.t()[:, [1, 0]]], dim=1).to(torch.float64)
        copied = torch.empty(5, 7).copy_(x)
    assert torch.equal(moved, torch.cat([x.t(), x.t()[:, [1, 0]]], dim=1).double()) and torch.equal(copied, x)


@forked
def test_gradients_of_one_key_are_judged_by_their_terms():
    """The only key gets all the attention whatever it is: the gradients of queries and keys are rounding, different everywhere."""
    config = tiny_moe_config(**ONE_TOKEN)
    grads = plain_gradients(config, False)[2]
    terms = terms_of(config, grads)
    noise = {name: tensor.clone() for name, tensor in grads.items()}
    for name, rounded in plain_gradients(config, False, RandomRounding(seed=1))[2].items():
        if ".attention.q." in name or ".attention.k." in name:
            assert grads[name].norm() < 1e-5 * terms[name]
            noise[name] = 3 * UNIT / AMPLITUDE * rounded  # as much as one kind of processors was seen to make of it
    assert worst(noise, grads)[0] > BOUND
    assert worst(noise, grads, terms)[0] < BOUND
    for name in grads:  # and everything else is judged as before
        if not grads[name].any():  # an expert without tokens: not even rounding
            assert terms[name] == 0 or ".attention." in name
        elif ".attention.q." not in name and ".attention.k." not in name:
            wrong = grads | {name: grads[name] * (1 + 4 * BOUND)}
            assert worst(wrong, grads, terms)[0] > BOUND, name


@forked
@pytest.mark.parametrize("experts", [False, True])
def test_where_nothing_cancels_no_bound_is_wider(experts):
    config = tiny_moe_config() if experts else tiny_config()
    grads = plain_gradients(config, False)[2]
    terms = terms_of(config, grads)
    assert all(terms[name] < tensor.norm() for name, tensor in grads.items())
