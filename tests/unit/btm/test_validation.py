"""Settings of Branch-Train-Merge that contradict themselves or the rest."""

from __future__ import annotations

import pytest

from recipes.config import BtmConfig, Config, SplitBy
from recipes.validation import problems
from recipes.validation.btm import check_btm


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed_share": 1.0}, "btm.seed_share=1.0"),
        ({"seed_share": 0.5, "mix_share": 0.5}, "below 1 - btm.seed_share = 0.5; try 0.25"),
        ({"add_domains": ["x"], "remove_domains": ["x"]}, "both name x"),
        ({"add_domains": ["x"], "split_by": SplitBy.cluster}, "needs btm.split_by=domain"),
        ({"average_weights": {"a": -1.0, "b": 2.0}}, "btm.average_weights"),
        ({"average_weights": {"a": 0.0}}, "btm.average_weights"),
        ({"stages": []}, "btm.stages=[]"),
    ],
)
def test_a_contradiction_is_named_with_a_way_out(changes, words, tmp_path):
    config = Config(btm=BtmConfig(**changes))
    config.data.path, config.model.vocab_size = None, 100
    (problem,) = problems(config, 1, launch_dir=tmp_path, dry_run=True)
    assert words in problem


def test_only_dense_models_without_biases_can_be_mixed():
    config = Config(btm=BtmConfig(mix_share=0.25))
    assert not list(check_btm(config, 1))
    config.moe.num_moe_experts, config.model.add_bias_linear = 8, True
    assert ["moe=dense" in problem or "biases" in problem for problem in check_btm(config, 1)] == [True, True]


def test_a_mix_without_a_layer_of_experts_is_refused():
    config = Config(btm=BtmConfig(mix_share=0.25, mix_layer_freq=5))
    assert ["leaves no layer of model.num_layers=4" in problem for problem in check_btm(config, 1)] == [True]


def test_defaults_are_legal():
    assert not list(check_btm(Config(), 1))
