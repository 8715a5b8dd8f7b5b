"""Trained branches are kept unless a change is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest

from recipes.btm.arms import complete, make_arms, material, plan_arms, without_own_data
from recipes.btm.resume import check_trained
from recipes.btm.split import data_digest
from recipes.btm.stages import STAMP
from recipes.config import Config
from recipes.data.dataset import load_dataset
from tests.cli.fake_data import write_dataset

TOKENS = {"code": 50_000, "en": 100_000, "ja": 50_000}
Check = Callable[..., None]


@pytest.fixture
def trained(tmp_path) -> tuple[Config, Check]:
    """A description whose arms (the random control too) were all trained, and the check of another against them."""
    config, folder = Config(), tmp_path / "run"
    config.data.path = str(write_dataset(tmp_path / "data", tokens=TOKENS))
    config.train.steps, config.train.global_batch_size = 100, 24
    info = load_dataset(config.data.path)
    for arm in make_arms(config, plan_arms(config, info), folder / "split").values():
        described = complete(without_own_data(arm), config, folder, check=False)
        settings = material(described)
        domains = list(described.data.domain_weights)
        data = "of its own" if "data.path" in arm.settings else data_digest(info, domains)
        (folder / arm.path).mkdir(parents=True)
        record = {"inputs": {"settings": settings, "data": data, "start": None}, "content": "d"}
        (folder / arm.path / STAMP).write_text(json.dumps(record))

    def check(changed: Config) -> None:
        info = load_dataset(changed.data.path or "")
        check_trained(make_arms(changed, plan_arms(changed, info), folder / "split").values(), changed, info, folder)

    return config, check


def test_what_does_not_change_a_result_may_change(trained):
    config, check = trained
    check(config)
    config.telemetry.log_interval, config.zero.stage, config.btm.workers, config.btm.top_k = 3, 2, 1, 1
    check(config)


def test_a_change_that_would_train_anew_is_refused_and_accepted_by_name(trained):
    config, check = trained
    for key, value in (("optimizer.lr", 0.5), ("run.seed", 9), ("model.num_layers", 3), ("train.steps", 200)):
        group, _, name = key.partition(".")
        changed = copy.deepcopy(config)
        setattr(getattr(changed, group), name, value)
        with pytest.raises(ValueError, match=rf"{key}=\d.* but \w+ has .*") as caught:
            check(changed)
        keys = str(caught.value).rpartition("run.resume_with=[")[2].rstrip("]'").split(",")
        assert key in keys and (len(keys) == 1 or key == "train.steps")
        changed.run.resume_with = keys
        check(changed)
    extra = copy.deepcopy(config)
    extra.deepspeed.extra = {"wall_clock_breakdown": True}
    with pytest.raises(ValueError, match=r"deepspeed\.extra="):
        check(extra)


def test_other_text_is_refused(trained, tmp_path):
    config, check = trained
    config.data.path = str(write_dataset(tmp_path / "other", tokens=TOKENS | {"ja": 60_000}))
    with pytest.raises(ValueError, match=r"data\.content is another than that of seed"):
        check(config)
    config.run.resume_with = ["data.content"]
    check(config)
