from __future__ import annotations

import json
import math

import pytest

from recipes.telemetry.jsonl import read_metrics
from tests.distributed.launching import tiny_overrides
from tests.fake_runs import fake_run
from tools import arms
from tools.quickstart import DENSE, SPARSE, main, table


@pytest.fixture
def overrides(tiny_data):
    """A tiny model for both arms."""
    words = tiny_overrides(tiny_data, "unused", "train.eval_samples=4")
    ours = ("experiment=", "run.dir=")
    return ["schedule.lr_warmup_steps=2", *(word for word in words if not word.startswith(ours))]


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Works in an empty folder. Each arm is a folder filled at once: the sparse one is half as fast and 0.1 nats better."""
    started = []

    def train(arm):
        config = arms.described(arm)
        started.append((arm, config))
        better, seed = (0.1 if arm.name == SPARSE else 0.0), 0.01 * arm.seed
        losses = {20: 3.4 + seed - better, 30: 3.1 + seed - better, 40: 3.0 + seed - better}
        fake_run(arm.folder, config, losses, rate=500.0 if arm.name == SPARSE else 1000.0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arms, "train", train)
    return started


def test_the_comparison_in_numbers(started, overrides, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tools.report.__main__._domain_uses", lambda runs, console: ({}, []))
    assert main(["--steps", "40", "--seeds", "2", *overrides, "--out", "out"]) == 0
    results = json.loads((tmp_path / "out" / "quickstart.json").read_text())
    dense, sparse = results["rows"]
    assert (dense["name"], sparse["name"]) == (DENSE, SPARSE) == ("dense", "switch_8e")
    assert (dense["nll"], sparse["nll"]) == pytest.approx((3.02, 2.92))
    assert sparse["nll_by_domain"] == pytest.approx({"en": 2.42, "ja": 3.42})
    assert results["differences"] == [
        {"seed": 2, "nll": pytest.approx(-0.1), "nll_by_domain": pytest.approx({"en": -0.1, "ja": -0.1})}
    ]
    assert dense["tokens_per_second"] == pytest.approx(1000) and dense["seconds"] == pytest.approx(40 * 128 / 1000)
    assert dense["seconds_to_dense_loss"] == pytest.approx(dense["seconds"])
    # From 3.32 after 20 steps to 3.02 after 30 steps of 0.256 s: at the very evaluation.
    assert sparse["seconds_to_dense_loss"] == pytest.approx(30 * 0.256, rel=1e-6)
    assert sparse["total_params"] > sparse["active_params"] > dense["active_params"] == dense["total_params"]
    assert sparse["flops_per_token"] == pytest.approx(dense["flops_per_token"], rel=0.03)
    for row in (dense, sparse):
        assert row["seed"] == 2 and row["steps"] == 40 and row["run_dir"].endswith(f"/{row['name']}")
    assert results["environment"] == {"cpu": {"cores": 2}} and "seconds_to_dense_loss" in results["definitions"]
    assert (tmp_path / "out" / "index.html").exists() and (tmp_path / "out" / "loss_seconds.png").exists()
    out, err = capsys.readouterr()
    for shown in ("3.0200", "2.9200", "-0.1000", "x 0.500", "7.7"):
        assert shown in out
    assert "not equal compute" not in err


def test_both_arms_get_the_same_settings(started, overrides, monkeypatch, tmp_path):
    monkeypatch.setattr("tools.report.__main__._domain_uses", lambda runs, console: ({}, []))
    assert main([*overrides, "train.steps=40", "optimizer.lr=0.5", "--seeds", "1", "3", "--runs", "runs"]) == 0
    assert [(arm.name, arm.seed, arm.folder.name) for arm, _ in started] == [
        (DENSE, 1, "dense-seed1"),
        (SPARSE, 1, "switch_8e-seed1"),
        (DENSE, 3, "dense-seed3"),
        (SPARSE, 3, "switch_8e-seed3"),
    ]
    for (_, dense), (_, sparse) in zip(started[::2], started[1::2], strict=True):
        assert dense.train == sparse.train and dense.train.steps == 40 and dense.train.eval_interval == 4
        assert dense.optimizer == sparse.optimizer and dense.optimizer.lr == 0.5
        assert (dense.schedule, dense.data, dense.model) == (sparse.schedule, sparse.data, sparse.model)
        assert dense.moe.num_moe_experts is None and sparse.moe.num_moe_experts == 8
        assert sparse.parallel.expert_model_parallel_size == 2
    results = json.loads((tmp_path / "report" / "quickstart.json").read_text())
    assert [(row["name"], row["seed"]) for row in results["rows"]] == [(DENSE, 1), (SPARSE, 1), (DENSE, 3), (SPARSE, 3)]


def test_unequal_compute_is_said(started, overrides, monkeypatch, capsys):
    monkeypatch.setattr("tools.report.__main__._domain_uses", lambda runs, console: ({}, []))
    assert main([*overrides, "train.steps=40", "moe.moe_ffn_hidden_size=96"]) == 0
    assert [config.moe.moe_ffn_hidden_size for _, config in started] == [None, 96]
    assert "not equal compute" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.stpes=3"], "train.stpes"),
        (["run.seed=3"], "run.seed=3: is set by the comparison itself"),
        (["experiment=debug"], "experiment=debug: is set by"),
        (["train.eval_samples=0"], "train.eval_samples=0: the comparison is about held-out loss"),
        (["--steps", "0"], "--steps"),
        (["data.path=/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_starts_nothing(started, overrides, tmp_path, capsys, arguments, message):
    try:
        code = main([*overrides, *arguments])
    except SystemExit as end:  # of the parser
        code = end.code
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("error: ") and message in error and "Traceback" not in error
    assert started == [] and list(tmp_path.iterdir()) == []


def test_a_run_folder_that_exists_is_not_touched(started, overrides, tmp_path, capsys):
    (tmp_path / "runs" / SPARSE).mkdir(parents=True)
    assert main([*overrides, "--runs", "runs"]) == 2
    assert f"runs/{SPARSE}" in capsys.readouterr().err and started == []


def test_numbers_may_be_followed_by_settings_but_not_missing(started, overrides, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--seeds", "one"])
    assert exit_.value.code == 2 and "--seeds one: must be" in capsys.readouterr().err
    assert main(["--seeds", "1", "x", *overrides]) == 2
    assert "'x': not an override" in capsys.readouterr().err


def test_the_table_of_several_seeds_shows_each_and_says_never():
    def row(name, seed, nll, to_dense):
        sizes = {"total_params": 10, "active_params": 10, "flops_per_token": 10, "steps": 5, "seconds": 2.0}
        return {"name": name, "seed": seed, "nll": nll, "nll_by_domain": {"en": nll}, "tokens_per_second": 7.0,
                "seconds_to_dense_loss": to_dense, **sizes}  # fmt: skip

    rows = [row(DENSE, 1, 3.0, 2.0), row(SPARSE, 1, 3.5, None), row(DENSE, 2, 4.0, 2.0), row(SPARSE, 2, 3.9, 1.0)]
    shown = table(rows)
    labels, dense, sparse, relation = (list(column.cells) for column in shown.columns)
    at = labels.index("held-out nll")
    assert dense[at] == f"3.5000 ± {math.sqrt(0.5):.4f}" and relation[at] == "+0.2000"
    assert labels[at + 1 : at + 3] == ["  seed 1", "  seed 2"] and sparse[at + 1 : at + 3] == ["3.5000", "3.9000"]
    assert sparse[-1] == "never in 1 of 2" and relation[-1] == ""


@pytest.mark.distributed
def test_an_arm_is_trained_by_the_launcher(overrides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    settings = ("experiment=switch_8e", "parallel.expert_model_parallel_size=2", *overrides, "train.steps=2")
    arms.train(arms.Arm(SPARSE, 7, tmp_path / "runs" / SPARSE, settings))
    assert [row["step"] for row in read_metrics(tmp_path / "runs" / SPARSE / "metrics.jsonl")] == [1, 2, 2]
    assert json.loads((tmp_path / "runs" / SPARSE / "summary.json").read_text())["world_size"] == 2
