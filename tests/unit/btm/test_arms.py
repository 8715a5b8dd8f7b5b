"""How the compute is divided, what each arm differs in, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.btm.arms import amounts, arguments, complete, held_out_problems, make_arms, material, mix_arm, plan_arms
from recipes.btm.mixing import as_mix, mix_cost, mix_moe
from recipes.config import Config, SplitBy
from recipes.data.dataset import load_dataset
from recipes.logical import moe_layers
from recipes.plan.size import flops_per_token
from recipes.pretrain import compose
from recipes.validation import prepare, problems
from tests.cli.fake_data import write_dataset

TOKENS = {"code": 50_000, "en": 100_000, "ja": 50_000}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("arms") / "data", tokens=TOKENS)


def described(data: Path | None, **changes) -> Config:
    config = Config()
    config.data.path = None if data is None else str(data)
    config.train.steps, config.train.global_batch_size = 100, 24
    for key, value in changes.items():
        group, _, name = key.partition("__")
        setattr(getattr(config, group), name, value)
    return config


def spent(config: Config, steps: int) -> int:
    return steps * config.train.global_batch_size * config.model.seq_length * flops_per_token(config)


@pytest.mark.parametrize(("seed_share", "mix_share"), [(0.5, 0.0), (0.2, 0.0), (0.5, 0.25), (0.3, 0.4)])
def test_all_arms_together_have_the_compute_of_the_dense_run(data, tmp_path, seed_share, mix_share):
    config = described(data, btm__seed_share=seed_share, btm__mix_share=mix_share)
    info = load_dataset(data)
    base = prepare(config, 1, launch_dir=Path.cwd())
    arms = plan_arms(config, info, mix_cost(base, info))
    made = make_arms(config, arms, tmp_path / "split")
    first = arms.amounts.seed
    whole = spent(complete(made["dense"], config, tmp_path), 100)
    total = spent(complete(made["seed"], config, tmp_path), first)
    for name in arms.parts:
        branch = complete(made[name], config, tmp_path)
        total += spent(branch, branch.train.steps - first)
    if mix_share:
        mix = complete(mix_arm(config, arms, mix_moe(config.btm, 3)), config, tmp_path)
        total += spent(mix, mix.train.steps - arms.amounts.branches)
        assert mix.moe.num_moe_experts == 3
        one_step = spent(mix, 1)
        assert whole - one_step < total <= whole
    else:
        assert total == whole


def test_each_branch_has_its_own_text_and_goes_on_with_the_schedule(data, tmp_path):
    config = described(data)
    arms = plan_arms(config, load_dataset(data))
    made = make_arms(config, arms, tmp_path / "split")
    seed, dense, ja = (complete(made[name], config, tmp_path) for name in ("seed", "dense", "ja"))
    assert seed.data.domain_weights == dense.data.domain_weights == dict.fromkeys(TOKENS, 1.0)
    assert ja.data.domain_weights == {"ja": 1.0}
    assert (seed.train.steps, ja.train.steps, dense.train.steps) == (50, 100, 100)
    assert (ja.train.global_batch_size, ja.train.micro_batch_size) == (8, 8)
    assert {c.schedule.lr_decay_steps for c in (seed, dense, ja)} == {100}
    assert ja.checkpoint.load_from == dense.checkpoint.load_from == str(tmp_path / "seed")
    control = made["random1"].settings
    assert control["data.domain_weights"] == {f"random1-{domain}": 1.0 for domain in TOKENS}


def test_the_description_survives_the_command_line(data, tmp_path):
    """What is checked here is what the branch's own process composes."""
    config = compose(["experiment=debug", f"data.path={data}", "train.global_batch_size=6", "train.steps=50"])
    folder = tmp_path / "出力 a=b"
    arm = make_arms(config, plan_arms(config, load_dataset(data)), folder / "split")["random2"]
    words = arguments(arm.overrides(config, folder))
    again = compose(["experiment=debug", "train.steps=50", *words])
    ours = arm.described(config, folder)
    assert (again.data, again.train, again.schedule, again.checkpoint, again.run.dir) == (
        ours.data,
        ours.train,
        ours.schedule,
        ours.checkpoint,
        ours.run.dir,
    )


def test_the_mix_is_a_legal_run_of_an_experiment_that_asks_for_a_mix(data, tmp_path):
    """Its experts are not refused for the mix_share that made them."""
    chosen = ["experiment=debug", "btm=mix", f"data.path={data}", "train.global_batch_size=6", "train.steps=50"]
    config = compose(chosen)
    arms = plan_arms(config, load_dataset(data))
    words = arguments(mix_arm(config, arms, mix_moe(config.btm, 3)).overrides(config, tmp_path))
    again = compose([*chosen, *words])
    again.checkpoint.load_from = None
    assert again.moe.num_moe_experts == 3 and problems(again, 1, launch_dir=tmp_path) == []


def test_only_what_a_result_depends_on_is_material(data, tmp_path):
    config = described(data)
    arm = make_arms(config, plan_arms(config, load_dataset(data)), tmp_path)["ja"]
    same = described(data, telemetry__log_interval=3, zero__stage=2, run__dir="x", checkpoint__save_interval=5)
    other = described(data, optimizer__lr=1e-2)
    first, second, third = (material(arm.described(c, tmp_path)) for c in (config, same, other))
    assert first == second != third


def test_adding_a_domain_leaves_the_others_as_they_are(data, tmp_path):
    config = described(data, data__domain_weights={"code": 1.0, "en": 1.0})
    more = described(data, btm__add_domains=["ja"])
    info = load_dataset(data)
    before, after = (make_arms(c, plan_arms(c, info), tmp_path) for c in (config, more))
    assert {name: arm.settings for name, arm in before.items()} == {
        name: arm.settings for name, arm in after.items() if name != "ja"
    }
    assert after["ja"].start == "starts/ja" and after["ja"].settings["train.global_batch_size"] == 12


def test_the_mix_has_experts_where_and_with_the_rates_that_are_asked_for(data):
    config = prepare(described(data, btm__mix_layer_freq=2, btm__mix_expert_lr_scale=None), 1, launch_dir=Path.cwd())
    mixed = as_mix(config, 3)
    assert moe_layers(mixed) == [1, 3] and mixed.moe.moe_expert_lr_scale is None
    assert moe_layers(as_mix(prepare(described(data), 1, launch_dir=Path.cwd()), 3)) == [0, 1, 2, 3]


def test_experts_of_the_mix_are_the_branches(data):
    config = prepare(described(data, btm__mix_topk=2), 1, launch_dir=Path.cwd())
    mixed = as_mix(config, 3)
    assert (mixed.moe.num_moe_experts, mixed.moe.moe_router_topk, mixed.moe.moe_ffn_hidden_size) == (3, 2, 384)
    assert mix_cost(config, None) == 1.0


REFUSED = [
    (
        {"train__global_batch_size": 16},
        "divisible by the number of branches=3, each of which gets an equal part; try 15 or 18",
    ),
    ({"train__steps": 1}, "leaves a part without a step"),
    ({"btm__num_branches": 4}, "there are 3 domains: code, en, ja"),
    ({"btm__add_domains": ["xx"]}, "btm.add_domains: xx is no domain; there are code, en, ja"),
    ({"btm__remove_domains": ["en", "ja"]}, "leaves 1 branches; at least two"),
    ({"btm__only": ["en", "fr"]}, "btm.only: fr is no branch"),
    ({"data__domain_weights": {"en": 2.0, "ja": 1.0}}, "give equal weights"),
    ({"data__domain_weights": {"en": 1.0, "fr": 1.0}}, "data.domain_weights.fr: no such domain"),
    ({"data__domain_weights": {"en": 1.0}}, "one branch"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_cannot_be_divided_is_refused(data, changes, words):
    with pytest.raises(ValueError, match=words):
        plan_arms(described(data, **changes), load_dataset(data))


def test_an_empty_domain_is_refused_by_name(tmp_path):
    data = write_dataset(tmp_path / "data", tokens=TOKENS | {"fr": 0})
    with pytest.raises(ValueError, match="domain fr has no training text"):
        plan_arms(described(data), load_dataset(data))


def test_held_out_text_of_less_than_a_batch_is_a_problem_of_each_domain(data):
    config = described(data, train__micro_batch_size=16, train__global_batch_size=48)
    found = held_out_problems(config, load_dataset(data))  # 2000 tokens: 15 sequences of 128
    assert (
        len(found) == 3
        and "domain ja: its held-out text is 15 sequences of 128 tokens, less than a batch of 16" in found[2]
    )
    config.train.micro_batch_size = 15
    assert held_out_problems(config, load_dataset(data)) == []


def test_parts_of_a_dry_run_without_data_are_counted():
    config = described(None, btm__num_branches=4, model__vocab_size=100)
    assert plan_arms(config, None).parts == ["domain0", "domain1", "domain2", "domain3"]
    config.btm.split_by = SplitBy.cluster
    assert plan_arms(config, None).parts == ["cluster0", "cluster1", "cluster2", "cluster3"]
    config.btm.num_branches = None
    with pytest.raises(ValueError, match=r"btm\.num_branches"):
        plan_arms(config, None)


def test_amounts_by_hand():
    found = amounts(described(None, train__steps=800, train__global_batch_size=16, btm__mix_share=0.25), 8, 1.4)
    assert (found.seed, found.branches, found.mix, found.dense, found.branch_batch) == (400, 600, 742, 800, 2)
