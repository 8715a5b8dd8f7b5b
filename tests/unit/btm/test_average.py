"""Averages and mixes read from checkpoints: values by hand, parts of tensors, files, refusals by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes.btm.average import Average, check_alike, uniform, write
from recipes.btm.mix import Mix, ridge
from recipes.btm.mixing import as_mix
from recipes.checkpoint.format import Box, Checkpoint, open_checkpoint, shard_name, write_shard
from recipes.checkpoint.rotate import begin, commit
from recipes.config import Config, to_plain
from recipes.logical import initial_value, logical_tensors
from tests.tiny import tiny_config


def stored(folder: Path, config: Config, seed: int, tokenizer: str = "t") -> Checkpoint:
    """A checkpoint of random weights and moments."""
    tensors = {name: initial_value(tensor, seed) + seed for name, tensor in logical_tensors(config).items()}
    partial = begin(folder, 4)
    boxes = {"model": [Box.whole(name, tensor) for name, tensor in tensors.items()]}
    boxes["optimizer"] = [
        Box.whole(f"{moment}/{name}", tensor * scale)
        for name, tensor in tensors.items()
        for moment, scale in (("exp_avg", 2.0), ("exp_avg_sq", 3.0))
    ]
    boxes["rng"] = [Box.whole("rank0/torch", torch.tensor([seed]))]
    records = [write_shard(partial, shard_name(kind, 0, 1), kind, members) for kind, members in boxes.items()]
    trainer = {"step": 4, "applied_steps": 4, "world_size": 1, "tokenizer": tokenizer, "guard": {"skipped": 7}}
    return open_checkpoint(
        commit(partial, records, {**trainer, "moe": None, "wandb_run_id": "x", "config": to_plain(config)})
    )


@pytest.fixture
def members(tmp_path) -> dict[str, Checkpoint]:
    return {name: stored(tmp_path / name, tiny_config(), seed) for seed, name in enumerate("abc", start=1)}


NAME = "layers.1.ffn.down.weight"


def test_an_average_is_the_weighted_sum_of_weights_and_moments(members):
    average = Average(members, {"a": 1.0, "c": 3.0})
    for kind, name in (("model", NAME), ("optimizer", f"exp_avg_sq/{NAME}")):
        a, c = (members[branch].read(kind, name).double() for branch in "ac")
        assert torch.equal(average.read(kind, name), (0.25 * a + 0.75 * c).float())
        part = average.read(kind, name, (3, 5), (4, 6))
        assert torch.equal(part, average.read(kind, name)[3:7, 5:11])


def test_an_average_of_equal_members_is_one_of_them(members):
    equal = dict.fromkeys("abc", members["b"])
    average = Average(equal, uniform(equal))
    for name in average.tensors("model"):
        assert torch.equal(average.read("model", name), members["b"].read("model", name))


def test_a_written_average_is_a_checkpoint_without_history(members, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.btm.average._SHARD_BYTES", 10_000)
    average = Average(members, uniform(members))
    path = write(average, tmp_path / "out", 2, average.trainer)
    found = open_checkpoint(path)
    assert found.verify() == [] and len([name for name in found.manifest.files if name.startswith("model")]) > 2
    assert (found.step, found.trainer["step"], found.trainer["wandb_run_id"]) == (2, 2, None)
    assert found.trainer["guard"] == {"accepted": [], "skipped": 0, "in_a_row": 0}
    for name in average.tensors("model"):
        assert torch.equal(found.read("model", name), average.read("model", name))


def test_branches_of_another_kind_are_refused_by_name(members, tmp_path):
    def refused(config: Config, words: str, tokenizer: str = "t") -> None:
        odd = stored(tmp_path / words.replace(" ", "_"), config, 1, tokenizer)
        with pytest.raises(ValueError, match=words):
            check_alike({**members, "odd": odd})

    refused(tiny_config(model__vocab_size=61), "branch odd .* has a vocabulary of 61 ids, a of 60")
    refused(
        tiny_config(model__ffn_hidden_size=64), r"branch odd .* has layers\.0\.ffn\.down\.weight of shape \(32, 64\)"
    )
    refused(tiny_config(model__num_layers=3), r"branch odd .* has layers\.2\.")
    refused(tiny_config(), "branch odd .* was trained with tokenizer other, a with t", tokenizer="other")


def test_bad_weights_are_refused(members):
    for weights, words in (
        ({"d": 1.0}, "d: no such branch; there are a, b, c"),
        ({"a": 0.0}, "at least 0, and one of them"),
    ):
        with pytest.raises(ValueError, match=words):
            Average(members, weights)


def test_experts_of_a_mix_are_the_branches_feed_forward_parts(members):
    config = as_mix(tiny_config(), 3)
    mix = Mix(members, ["a", "b"], config)
    described = logical_tensors(config)
    assert mix.tensors("model").keys() == described.keys()
    assert len(mix.tensors("optimizer")) == 2 * len(described)
    for expert, branch in enumerate("abc"):
        for matrix in ("gate", "up", "down"):
            theirs, ours = f"layers.1.ffn.{matrix}.weight", f"layers.1.moe.experts.{expert}.{matrix}.weight"
            assert torch.equal(mix.read("model", ours), members[branch].read("model", theirs))
            moment = members[branch].read("optimizer", f"exp_avg/{theirs}")
            assert torch.equal(mix.read("optimizer", f"exp_avg/{ours}"), moment)
    average = Average(members, {"a": 1.0, "b": 1.0})
    for name in ("embedding.weight", "layers.0.attention.q.weight", "final_norm.weight"):
        assert torch.equal(mix.read("model", name), average.read("model", name))
    router = "layers.0.moe.router.weight"
    assert mix.read("model", router).std() > 0 and not mix.read("optimizer", f"exp_avg/{router}").any()
    assert torch.equal(mix.read("model", router, (1, 2), (2, 5)), mix.read("model", router)[1:3, 2:7])


def test_feed_forward_parts_of_layers_without_experts_are_averaged(members):
    config = tiny_config()
    config.btm.mix_layer_freq = 2
    mix = Mix(members, ["a", "b", "c"], as_mix(config, 3))
    assert {name for name in mix.tensors("model") if ".moe." in name and not name.startswith("layers.1.")} == set()
    average = Average(members, uniform(members))
    for kind, name in (("model", "layers.0.ffn.up.weight"), ("optimizer", "exp_avg_sq/layers.0.ffn.up.weight")):
        assert torch.equal(mix.read(kind, name), average.read(kind, name))


def test_ridge_finds_the_least_squares_and_shrinks_what_is_not_determined():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(500, 6, generator=generator), torch.randn(3, 6, generator=generator)
    assert torch.allclose(ridge(x, x @ w.T, 1e-9).float(), w, atol=1e-4)
    x[:, 5] = 0
    assert ridge(x, x @ w.T)[:, 5].abs().max() < 1e-9
