"""Every shipped option and experiment composes to what is recorded in tests/golden, and can run.

`UPDATE_GOLDEN=1 pytest tests/unit/test_config.py` writes the records anew; read the difference before committing it.
`default.yaml` is the whole default description, `options.yaml` what each option and experiment changes in it.
"""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.config import Config, config_hash, to_plain
from recipes.pretrain import CONFIG_DIR, compose
from recipes.schema import entries
from recipes.topology import model_parallel_size
from recipes.validation import problems

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CHOICES = sorted(f"{file.parent.name}={file.stem}" for file in CONFIG_DIR.glob("*/*.yaml"))


def _flat(config: Config) -> dict[str, Any]:
    return {f"{group}.{key}": value for group, keys in to_plain(config).items() for key, value in keys.items()}


@functools.cache
def _composed(*overrides: str) -> Config:
    return compose(overrides)


def _changes(choice: str) -> dict[str, Any]:
    default = _flat(_composed())
    return {key: value for key, value in _flat(_composed(choice)).items() if value != default[key]}


def _recorded(name: str, current: Any) -> Any:
    file = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(yaml.safe_dump(current, sort_keys=False, allow_unicode=True))
    return yaml.safe_load(file.read_text())


def test_the_default_is_as_recorded():
    current = to_plain(_composed())
    assert _recorded("default.yaml", current) == current


def test_every_option_and_experiment_is_as_recorded():
    current = {choice: _changes(choice) for choice in CHOICES}
    assert _recorded("options.yaml", current) == current
    assert len(CHOICES) > 30


@pytest.mark.parametrize("choice", CHOICES)
def test_every_option_and_experiment_is_valid(choice, tmp_path):
    config = copy.deepcopy(_composed(choice))
    config.model.vocab_size = config.model.vocab_size or 4096
    config.data.path = None  # data is not shipped
    world_size = (config.parallel.data_parallel_size or 1) * model_parallel_size(config)
    assert problems(config, world_size, launch_dir=tmp_path, dry_run=True) == []


def test_config_files_are_short_and_say_where_they_come_from():
    for file in CONFIG_DIR.rglob("*.yaml"):
        assert len(file.read_text().splitlines()) < 40, file
    for file in (*(CONFIG_DIR / "model").glob("*.yaml"), *(CONFIG_DIR / "moe").glob("*.yaml")):
        assert file.read_text().startswith("# "), file


@pytest.mark.parametrize(
    "name", ["switch_4e", "switch_8e", "switch_16e", "switch_32e", "top2_8e", "fine_grained_32e_top4_shared"]
)
def test_experiments_with_experts_differ_from_the_control_in_their_experts_only(name):
    dense, sparse = _flat(_composed("experiment=dense")), _flat(_composed(f"experiment={name}"))
    changed = {key for key in dense if dense[key] != sparse[key]}
    assert {key for key in changed if not key.startswith("moe.")} == {"run.name"}
    assert sparse["moe.moe_layer_freq"] == 2 and sparse["moe.moe_expert_capacity_factor"] is None


def test_every_key_has_a_type_in_words_and_its_default_can_be_written():
    examples = [entry.example for entry in entries().values()]
    assert [entry.key for entry in entries().values() if entry.legal == "any value"] == []
    assert to_plain(compose(examples)) == to_plain(Config())


def test_experiment_values_survive_composition():
    """The experiment is merged last; placed before the groups it would lose silently."""
    config = compose(["experiment=debug"])
    assert (config.train.steps, config.model.num_layers, config.run.name) == (20, 2, "debug")
    assert compose(["experiment=debug", "train.steps=3"]).train.steps == 3


def test_libraries_receive_plain_values():
    overrides = ["telemetry.profile_steps=[1,2]", "deepspeed.extra={a:{b:[1,2]}}", "run.name=seed-${run.seed}"]
    config = compose([*overrides, "data.domain_weights={en:1}"])
    values = (config.telemetry.profile_steps, config.deepspeed.extra["a"]["b"], config.data.domain_weights)
    assert [type(value) for value in values] == [list, list, dict]
    assert config.run.name == "seed-1234"


def test_free_form_mappings_take_new_keys_without_plus():
    config = compose(["deepspeed.extra.zero_optimization.reduce_scatter=false", "data.domain_weights.ja=0.5"])
    assert config.deepspeed.extra == {"zero_optimization": {"reduce_scatter": False}}
    assert config.data.domain_weights == {"ja": 0.5}


def test_composition_depends_on_neither_directory_nor_history(tmp_path, monkeypatch):
    before = config_hash(compose(["experiment=dense"]))
    compose(["experiment=debug"])
    monkeypatch.chdir(tmp_path)
    assert config_hash(compose(["experiment=dense"])) == before
    assert Path.cwd() == tmp_path and list(tmp_path.iterdir()) == []
