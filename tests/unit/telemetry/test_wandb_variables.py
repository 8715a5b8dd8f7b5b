"""Which of W&B's variables hold, and what is said about it."""

from __future__ import annotations

import sys

import pytest

from recipes.btm.pool import Job
from recipes.config import Config, TelemetryConfig, WandbMode, config_hash
from recipes.pretrain import compose
from recipes.telemetry.wandb_variables import for_own_run, kept_back, obey
from tools.arms import run_to_end


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_MODE": "online"}, "online"),
        ({"WANDB_MODE": "run"}, "online"),
        ({"WANDB_MODE": "disabled"}, "disabled"),
        ({"WANDB_MODE": "dryrun"}, "offline"),
        ({"WANDB_MODE": ""}, "offline"),
        ({"WANDB_DISABLED": "true"}, "disabled"),
        ({"WANDB_DISABLED": "true", "WANDB_MODE": "online"}, "disabled"),
        ({"WANDB_DISABLED": "false", "WANDB_MODE": "online"}, "online"),
        ({"WANDB_SWEEP_ID": "s1"}, "online"),
        ({"WANDB_SWEEP_ID": "s1", "WANDB_MODE": "offline"}, "offline"),
    ],
)
def test_the_mode_follows_the_variables(environ, mode):
    telemetry, notes = obey(TelemetryConfig(), ["train.steps=3"], environ)
    assert telemetry.wandb_mode.value == mode
    assert any("telemetry.wandb_mode" in note for note in notes) == (mode != "offline")
    if "WANDB_SWEEP_ID" in environ and mode != "online":
        assert notes[-1] == "the sweep s1 hears nothing of this run: W&B is offline"


def test_the_command_line_wins_and_says_so():
    for word in ("telemetry.wandb_mode=offline", "telemetry=offline", "+telemetry.wandb_mode=offline"):
        telemetry, notes = obey(compose([word.lstrip("+")]).telemetry, [word], {"WANDB_MODE": "online"})
        assert telemetry.wandb_mode is WandbMode.offline
        assert notes == ["telemetry.wandb_mode=offline of the command line holds, WANDB_MODE=online does not"]
    _, notes = obey(TelemetryConfig(), ["telemetry=offline"], {"WANDB_SWEEP_ID": "s1"})
    assert notes[-1] == "the sweep s1 hears nothing of this run: W&B is offline"
    telemetry, _ = obey(compose(["experiment=debug"]).telemetry, ["experiment=debug"], {"WANDB_MODE": "online"})
    assert telemetry.wandb_mode is WandbMode.online, "an experiment is a file"


def test_project_entity_and_group():
    environ = {"WANDB_PROJECT": "p", "WANDB_ENTITY": "e", "WANDB_RUN_GROUP": "g"}
    telemetry, notes = obey(TelemetryConfig(), ["telemetry.wandb_group=mine"], environ)
    assert (telemetry.wandb_project, telemetry.wandb_entity, telemetry.wandb_group) == ("p", "e", None)
    assert "telemetry.wandb_project=p, as WANDB_PROJECT=p" in notes and len(notes) == 3


def test_a_mode_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"WANDB_MODE=onlin: must be one of offline, online, disabled"):
        obey(TelemetryConfig(), [], {"WANDB_MODE": "onlin"})


def test_runs_that_are_started_have_an_identity_of_their_own(tmp_path, monkeypatch):
    """Those of Branch-Train-Merge and of the tools: the id of this process is not theirs, its project is."""
    own = {"WANDB_RUN_ID": "mine", "WANDB_NAME": "n", "WANDB_SWEEP_ID": "s", "WANDB_RESUME": "must"}
    for name, value in (own | {"WANDB_PROJECT": "p"}).items():
        monkeypatch.setenv(name, value)
    assert for_own_run(own | {"HOME": "h"}) == {"HOME": "h"}
    assert kept_back(own) is not None and "WANDB_RUN_ID" in kept_back(own) and kept_back({"WANDB_PROJECT": "p"}) is None
    write = "import os, pathlib; pathlib.Path('{}').write_text(' '.join(sorted(k for k in os.environ if k[:6] == 'WANDB_')))"
    seen = tmp_path / "seen"
    job = Job("a", [sys.executable, "-c", write.format(seen)], tmp_path / "log")
    job.start()
    assert job.process is not None and job.process.wait(30) == 0
    assert seen.read_text() == "WANDB_PROJECT"
    (tmp_path / "summary.json").write_text("{}")
    run_to_end([sys.executable, "-c", write.format(tmp_path / "arm")], "arm", tmp_path)
    assert (tmp_path / "arm").read_text() == "WANDB_PROJECT"


def test_ranks_may_differ_in_what_only_the_first_uses():
    one, other = Config(), Config()
    other.telemetry.wandb_mode, other.telemetry.wandb_project = WandbMode.online, "p"
    assert config_hash(one) == config_hash(other)
    other.telemetry.profile_steps = [1, 2]
    assert config_hash(one) != config_hash(other)
