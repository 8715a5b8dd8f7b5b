"""Summaries over seeds: ratios, spread, expectations, and what experiments of one seed have in common."""

from __future__ import annotations

import json
import statistics

import pytest

from tools import btm

DOMAINS = ["a", "b"]
DENSE = {1: 20.0, 2: 25.0}


def model(ppl: float) -> dict:
    return {"ppl": ppl, "by_domain": {"a": ppl - 1, "b": ppl + 1}}


def results(seed: int, ensemble: float, mix: bool) -> dict:
    """As evaluate/results.json; `ensemble` over dense."""
    dense = DENSE[seed]
    found = {"models": {"dense": model(dense), "seed": model(30.0), "x": model(18.0), "y": model(40.0)}}
    variants = {"top2": model(dense * ensemble), "last_token_cached": model(19.0), "cumulative_cached": model(19.0)}
    found |= {"ensemble": {"domain": model(dense * ensemble), "random": model(30.0)}, "ensembles": {"domain": variants}}
    found |= {"averages": {"uniform": model(35.0), "posterior": model(21.0)}, "mixes": {}}
    if mix:
        shares = {"a": [[1.0, 0.0]], "b": [[0.0, 1.0]]}
        found["mixes"] = {
            "mix": model(19.0) | {"experts": {"shares": shares, "specificity_bits": 1.0, "names": ["x", "y"]}}
        }
    matrix = {name: found["models"][name]["by_domain"] for name in ("x", "y")}
    amounts = {"seed": 5, "branches": 10, "mix": 10, "dense": 10, "batch": 4, "branch_batch": 2}
    found |= {"domains": DOMAINS, "branches": ["x", "y"], "matrix": matrix, "amounts": amounts}
    return found | {"samples": dict.fromkeys(DOMAINS, 8), "compute": {"flops_dense": 1.0}}


def test_every_seed_is_compared_with_its_own_dense_run():
    found = btm.summarise({"btm_8domains": {1: results(1, 0.8, False), 2: results(2, 0.9, False)}})
    row = found["experiments"]["btm_8domains"]["models"]["ensemble domain"]
    assert row["to_dense"] == pytest.approx([0.8, 0.9]) and row["ppl"] == pytest.approx([16.0, 22.5])
    assert row["mean"] == pytest.approx(0.85) and row["deviation"] == pytest.approx(statistics.stdev([0.8, 0.9]))
    assert found["experiments"]["btm_8domains"]["mean_by_domain"]["dense"] == {"a": 21.5, "b": 23.5}


def test_the_picture_shows_no_branches_that_were_trained_for_a_mix():
    found = btm.summarise({"btm_8domains": {1: results(1, 0.8, False)}, "btx_8domains": {1: results(1, 0.8, True)}})
    (axes,) = btm.arms(found).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert [label for label in labels if "(btx)" in label] == ["mix (btx)"] and "ensemble domain (btm)" in labels


def test_expectations_hold_for_the_mean_and_say_so_of_every_seed():
    found = btm.summarise({"btm_8domains": {1: results(1, 0.8, False), 2: results(2, 1.1, False)}})
    rows = {row["what"]: row for row in found["expected"]}
    assert rows["ensemble domain / dense"]["each"] == pytest.approx([0.8, 1.1])
    assert rows["ensemble domain / dense"]["holds"] and not rows["ensemble domain / dense"]["in_every_seed"]
    assert rows["average posterior / seed"]["mean"] == pytest.approx(0.7)
    assert not [row for row in found["expected"] if row["experiment"] != "btm_8domains"]


def test_a_study_starts_each_experiment_of_each_seed_and_shares_what_they_have_in_common(tmp_path, monkeypatch, capsys):
    started = []

    def run_one(experiment, seed, folder, overrides):
        started.append((experiment, seed, (folder / "seed").exists(), tuple(overrides)))
        (folder / "seed").mkdir(parents=True, exist_ok=True)
        (folder / "evaluate").mkdir(exist_ok=True)
        found = results(seed, 0.8, experiment.startswith("btx"))
        (folder / "evaluate" / "results.json").write_text(json.dumps(found))
        (folder / "evaluate" / "posterior.png").write_bytes(b"x")

    monkeypatch.setattr(btm, "_run_one", run_one)
    monkeypatch.chdir(tmp_path)
    words = ["--seeds", "1", "2", "--experiments", "btm_8domains,btx_8domains", "--steps", "10", "btm.top_k=2"]
    assert btm.main(words) == 0
    extra = ("btm.top_k=2", "train.steps=10")
    pairs = [("btm_8domains", False), ("btx_8domains", True)]
    assert started == [(name, seed, shared, extra) for seed in (1, 2) for name, shared in pairs]
    summary = json.loads((tmp_path / "report" / "btm" / "btm_8domains.json").read_text())
    assert summary["experiments"]["btx_8domains"]["specificity_bits"] == [1.0, 1.0]
    assert (tmp_path / "report/btm/btm_arms.png").stat().st_size > 10_000
    assert (tmp_path / "report/btm/btx_8domains_posterior.png").exists()
    out = capsys.readouterr().out
    assert "ensemble domain / dense = 0.800 (0.800 0.800): as expected" in out
    assert "ensemble random / dense = 1.350" in out


def test_a_run_that_fails_ends_the_study_with_its_code(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        btm.main(["--seeds", "1", "--experiments", "btm_8domains", "data.path=nowhere"])
    assert ended.value.code == 2 and "btm_8domains, seed 1: exit code 2" in capsys.readouterr().err
    assert btm.main(["--experiments", "no_such_experiment"]) == 2
    assert btm.main(["--seeds", "1", "run.dir=x"]) == 2
