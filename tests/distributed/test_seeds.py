"""Ranks hold the same weights, different samples and different dropout; the loader leaves the generators alone."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed


def test_weights_are_shared_samples_and_dropout_are_not(run_ranks, tiny_data):
    first, second = run_ranks("seed_report", 2, str(tiny_data), 1234)
    assert first["weights"] == second["weights"]
    assert first["dropout"] != second["dropout"] and first["tracked_dropout"] != second["tracked_dropout"]
    assert not set(first["samples"]) & set(second["samples"])
    assert sorted(first["samples"] + second["samples"]) == list(range(24))  # three steps of 8
    assert first["rng_before_loading"] == first["rng_after_loading"]

    again = run_ranks("seed_report", 2, str(tiny_data), 1234)[0]
    assert again == first
    other = run_ranks("seed_report", 2, str(tiny_data), 99)[0]
    assert other["tokens"] != first["tokens"] and other["weights"] != first["weights"]
    assert other["dropout"] != first["dropout"]
