"""The update of 1, 2 and 4 processes under every ZeRO stage is that of plain autograd on the whole batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from recipes.logical import Piece, assemble
from tests.tiny import tiny_config
from tools.conformance.compare import NO_TERMS, scales

pytestmark = pytest.mark.distributed


def worst(
    result: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], terms: Mapping[str, float] = NO_TERMS
) -> tuple[float, str]:
    """The largest relative error over logical tensors, and its tensor; see `tools.conformance.compare`."""
    assert result.keys() == reference.keys()
    divisors = scales({name: tensor.double().numpy() for name, tensor in reference.items()}, terms)
    difference = {name: result[name].double() - expected.double() for name, expected in reference.items()}
    return max((difference[name].norm().item() / divisor, name) for name, divisor in divisors.items())


def merged(results: list[list[dict[str, Any]]], number: int, key: str) -> dict[str, torch.Tensor]:
    """The tensors of one case from the pieces of all ranks; what several ranks hold must be the same bits."""
    union: dict[tuple[str, tuple[int, ...]], tuple[Piece, torch.Tensor]] = {}
    for rank in results:
        for piece, tensor in rank[number][key]:
            _, known = union.setdefault((piece.name, piece.offsets), (piece, tensor))
            assert torch.equal(known, tensor), f"case {number}: replicas of {piece.name} differ"
    return assemble(union.values())


def check(results: list[list[dict[str, Any]]], bound: float) -> None:
    """Compare every case of every rank with its reference; the message names the worst tensor."""
    for number, outcome in enumerate(results[0]):
        expected = outcome["reference"]
        error, name = worst(merged(results, number, "grads"), expected["grads"], expected["terms"])
        assert error <= bound, f"case {number}: gradient of {name} is off by {error:.2e}"
        error, name = worst(merged(results, number, "weights"), expected["weights"])
        assert error <= bound, f"case {number}: {name} after the step is off by {error:.2e}"
        losses, norms = ([rank[number][key] for rank in results] for key in ("loss", "norm"))
        assert sum(losses) == pytest.approx(expected["loss"], rel=bound), f"case {number}: loss"
        assert len(set(norms)) == 1, f"case {number}: ranks disagree on the norm: {norms}"
        assert norms[0] == pytest.approx(expected["norm"], rel=bound), f"case {number}: norm"
        for key, value in expected["moe"].items():
            close = pytest.approx(
                flat(value), rel=1e-6, abs=3e-6, nan_ok=True
            )  # rounded to 6 digits; counts are exact by that, too
            assert flat(outcome["moe"][key]) == close, f"case {number}: {key}"


def flat(value: Any) -> list[float]:
    """The numbers of a number or of nested lists; nothing is NaN."""
    if isinstance(value, list):
        return [number for part in value for number in flat(part)]
    return [math.nan if value is None else value]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_zero_stage_accumulation_and_bucket_size(run_ranks, world_size):
    cases = [
        {"config": tiny_config(zero__stage=stage, train__micro_batch_size=8 // world_size // accumulation)}
        for stage, accumulation in itertools.product((0, 1, 2, 3), (1, 2, 4))
        if world_size * accumulation <= 8
    ]
    for stage in (1, 2, 3):  # buckets of a few hundred elements, smaller than most tensors
        small = tiny_config(zero__stage=stage, train__micro_batch_size=max(1, 4 // world_size))
        small.zero.reduce_bucket_size = small.zero.allgather_bucket_size = 500
        cases.append({"config": small})
    check(run_ranks("gradient_cases", world_size, cases), bound=1e-5)


def test_masked_tokens_clipping_and_offload(run_ranks):
    cases = [
        {"config": tiny_config(zero__stage=stage, train__micro_batch_size=2, optimizer__clip_grad=clip), "masked": True}
        for stage, clip in itertools.product((0, 1, 2, 3), (0.0, 0.01))
    ]
    cases.append({"config": tiny_config(zero__stage=1, train__micro_batch_size=2, zero__offload_optimizer=True)})
    cases.append({"config": tiny_config(zero__stage=2, train__micro_batch_size=2, zero__offload_optimizer=True)})
    check(run_ranks("gradient_cases", 2, cases), bound=1e-5)


@pytest.mark.parametrize("fault", ["layers.1.attention.k.weight", "embedding.weight", "layers.0.ffn_norm.weight"])
def test_a_doubled_gradient_is_caught_and_named(run_ranks, fault):
    cases = [{"config": tiny_config(zero__stage=1, train__micro_batch_size=2), "fault": fault}]
    results = run_ranks("gradient_cases", 2, cases)
    # Doubling acts on the fused parameter, so a neighbour in it may be the worst.
    error, name = worst(merged(results, 0, "grads"), results[0][0]["reference"]["grads"])
    assert error == pytest.approx(1.0, rel=1e-3)
    assert name.rsplit(".", 2)[0] == fault.rsplit(".", 2)[0]
    with pytest.raises(AssertionError, match=r"gradient of .* is off by 1\.00e\+00"):
        check(results, bound=1e-5)
