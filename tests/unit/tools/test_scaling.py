from __future__ import annotations

import json
import statistics

import pytest

from tests.distributed.launching import tiny_overrides
from tests.fake_runs import fake_run
from tools import arms
from tools.scaling import main

LOSSES = {1: 3.0, 4: 2.9}


@pytest.fixture
def study(tiny_data, tmp_path, monkeypatch):
    """Runs the study in an empty folder; returns exit code and the (experts, seed) that were started."""

    def study(*arguments, fail_at=None):
        started = []

        def train(arm):
            config = arms.described(arm)
            experts = config.moe.num_moe_experts or 1
            started.append((experts, arm.seed))
            if started[-1] == fail_at:
                raise SystemExit(5)
            fake_run(arm.folder, config, {40: LOSSES[experts] + 0.01 * arm.seed})

        monkeypatch.setattr(arms, "train", train)
        words = tiny_overrides(tiny_data, "unused", "train.eval_samples=4", "schedule.lr_warmup_steps=2")
        words = [word for word in words if not word.startswith(("experiment=", "run.dir="))]
        code = main(["--experts", "1", "4", "--seeds", "1", "2", *arguments, *words])
        return code, started

    monkeypatch.chdir(tmp_path)
    return study


def test_every_seed_mean_and_deviation_are_reported(study, tmp_path, capsys):
    code, started = study("--steps", "40")
    assert code == 0 and started == [(1, 1), (4, 1), (1, 2), (4, 2)]
    results = json.loads((tmp_path / "report" / "scaling" / "scaling.json").read_text())
    assert sorted((row["experts"], row["seed"]) for row in results["rows"]) == sorted(started)
    out = capsys.readouterr().out
    for point in results["points"]:
        losses = [LOSSES[point["experts"]] + 0.01 * seed for seed in (1, 2)]
        assert point["seeds"] == [1, 2] and point["nll"] == pytest.approx(losses)
        assert point["mean"] == pytest.approx(statistics.mean(losses))
        assert point["standard_deviation"] == pytest.approx(statistics.stdev(losses))
        assert f"{point['mean']:.4f}" in out
    assert [point["name"] for point in results["points"]] == ["dense", "switch_4e"]
    assert (tmp_path / "report" / "scaling" / "scaling.png").stat().st_size > 10_000


def test_a_stopped_study_goes_on(study, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        study("--steps", "40", fail_at=(1, 2))
    assert exit_.value.code == 5 and not (tmp_path / "report" / "scaling" / "scaling.json").exists()
    summary = tmp_path / "outputs" / "scaling" / "switch_4e-seed1" / "summary.json"
    summary.write_text(json.dumps({"steps": 39}))  # it was stopped before its last step

    seen = []
    original = arms.described

    def described(arm):
        seen.extend(arm.arguments)
        return original(arm)

    arms.described = described
    try:
        with pytest.raises(SystemExit):
            study("--steps", "40", fail_at=(4, 1))
    finally:
        arms.described = original
    assert "run.resume=auto" in seen
    summary.write_text(json.dumps({"steps": 40}))
    code, started = study("--steps", "40")
    assert code == 0 and started == [(1, 2), (4, 2)]
    assert "run 1 of 4: dense, seed 1: complete" in capsys.readouterr().err
    assert study("--steps", "40") == (0, [])


def test_runs_of_other_settings_are_not_mixed_in(study, capsys):
    assert study("--steps", "40")[0] == 0
    assert study("--steps", "40", "optimizer.lr=0.125") == (2, [])
    error = capsys.readouterr().err
    assert "was run with optimizer.lr=0.004, not 0.125; choose another --runs FOLDER" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experts", "0"], "--experts 0"),
        (["--experts", "5"], "switch_5e"),
        (["train.eval_samples=0"], "eval_samples=0"),
        (["moe.num_moe_experts_per_layer=[4,8]"], "num_moe_experts_per_layer"),
    ],
)
def test_bad_input_starts_nothing(tmp_path, monkeypatch, capsys, tiny_data, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arms, "train", lambda arm: pytest.fail("started"))
    assert main([*arguments, f"data.path={tiny_data}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and list(tmp_path.iterdir()) == []
