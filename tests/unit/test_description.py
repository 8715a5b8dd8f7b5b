"""A stored description is data that nobody vouches for: every value is checked, whatever its type, and named."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from recipes.config import Config, to_plain
from recipes.description import LATER, MAX_DEPTH, check_description, to_yaml
from recipes.schema import entries


def _changed(key: str, value: Any) -> dict[str, Any]:
    plain = copy.deepcopy(to_plain(Config()))
    group, name = key.split(".")
    plain[group][name] = value
    return plain


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def test_what_was_stored_comes_back():
    stored = json.loads(json.dumps(to_plain(Config())))
    assert to_plain(check_description(stored)) == stored


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.steps", True, "train.steps=true: must be an integer"),
        ("train.steps", 3.0, "train.steps=3.0: must be an integer"),
        ("train.steps", "3", "train.steps=3: must be an integer"),
        ("train.steps", [[3]], "train.steps=[[3]]: must be an integer"),
        ("train.steps", None, "train.steps=null: must be an integer"),
        ("train.steps", "???", "train.steps=???: marks a value that is missing"),
        ("model.num_layers", 2**63, "model.num_layers=9223372036854775808 must be at least 1"),
        ("optimizer.lr", 10**400, "optimizer.lr=2^1328.. must be at least"),
        ("optimizer.lr", float("inf"), "optimizer.lr=inf must be finite"),
        ("zero.overlap_comm", 1, "zero.overlap_comm=1: must be true or false"),
        ("model.activation", 3, "model.activation=3: must be one of swiglu, gelu"),
        ("run.name", 3, "run.name=3: must be text"),
        ("run.name", "a\nb\x1b[2J", r"run.name=a\nb\x1b[2J must not contain line breaks"),
        ("run.name", "a\udcff", r"run.name=a\udcff must be valid Unicode"),
        ("run.name", " ", "run.name=' ' must not be empty"),
        ("run.dir", "a/" + "b" * 300, "names of at most 255 bytes"),
        ("run.dir", "a/" * 3000, "at most 3072 bytes long, not 6000"),
        ("telemetry.profile_steps", [1, "b"], "telemetry.profile_steps[1]=b: must be an integer"),
        ("moe.moe_layer_pattern", [0] * 10_001, "moe.moe_layer_pattern has 10001 items"),
        ("data.domain_weights", {"en": "x"}, "data.domain_weights.en=x: must be a number"),
        ("data.domain_weights", {"": 1}, "data.domain_weights: the name '' must not be empty"),
        ("data.domain_weights", {"a\0b": 1}, r"the name a\x00b must not contain"),
        ("data.domain_weights", {2023: 1}, "data.domain_weights: 2023 must be text; write it in quotes"),
        ("deepspeed.extra", {"a": [float("nan")]}, "deepspeed.extra.a[0]=nan must be finite"),
        ("deepspeed.extra", {"a": object}, "deepspeed.extra.a="),
        ("deepspeed.extra", _deep(200), f"deepspeed.extra: must not have more than {MAX_DEPTH} levels"),
        ("deepspeed.extra", {"a": [0] * 10**6}, "deepspeed.extra: must not have more than 10000 values"),
        ("run.nmae", "x", "run.nmae: unknown key, did you mean run.name?"),
    ],
)
def test_what_is_not_legal_is_refused_by_one_message(key, value, message):
    with pytest.raises(ValueError) as caught:
        check_description(_changed(key, value))
    assert message in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
    assert len(str(caught.value)) < 1000, "a message shows long values in part"


@pytest.mark.parametrize("plain", [None, 3, [], "text", {"run": 3}, _deep(100_000)])
def test_what_is_no_description_is_refused(plain):
    with pytest.raises(ValueError, match=r"description=|problems"):
        check_description(plain)


@pytest.mark.parametrize("key", sorted(entries().keys() - LATER))
def test_every_key_must_be_there(key):
    plain = copy.deepcopy(to_plain(Config()))
    group, name = key.split(".")
    del plain[group][name]
    if key in LATER:  # what was written before there was such a key
        assert to_plain(check_description(plain)) == to_plain(Config())
        return
    with pytest.raises(ValueError, match=f"^{key}: is missing$"):
        check_description(plain)
    assert to_plain(check_description(plain, complete=False)) == to_plain(Config())


def test_all_problems_are_named_together_but_not_without_end():
    plain = {"x" * 10_000 + str(number): number for number in range(5000)}
    with pytest.raises(ValueError) as caught:
        check_description(plain)
    assert "problems" in str(caught.value) and len(str(caught.value)) < 20_000


@pytest.mark.parametrize(
    "text",
    [
        "1e5",
        "1_000",
        "0x10",
        "0o17",
        "007",
        "null",
        "true",
        "on",
        "nan",
        ".inf",
        "2023-01-01",
        "1:30",
        "~",
        "a: b",
        "日本",
    ],
)
def test_text_is_text_for_every_reader_of_yaml(text):
    config = Config()
    config.run.name, config.data.domain_weights, config.btm.only = text, {text: 1.0}, [text]
    written = to_yaml(config)
    for plain in (yaml.safe_load(written), OmegaConf.to_container(OmegaConf.create(written))):
        assert to_plain(check_description(plain)) == to_plain(config)
