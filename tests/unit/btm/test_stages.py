"""Artefacts: made once, again when an input changes, gone on with after a crash, and only by their own stage."""

from __future__ import annotations

import pytest

from recipes.btm.stages import Artefact, Store
from recipes.config import BtmStage


class Recorder:
    """Makes a file, and remembers how often."""

    def __init__(self, text: str = "x"):
        self.text, self.calls = text, 0

    def __call__(self, folder):
        self.calls += 1
        (folder / "file").write_text(self.text)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, [BtmStage.seed], say=lambda line: None)


def artefact(**inputs) -> Artefact:
    return Artefact("seed", BtmStage.seed, inputs)


def test_it_is_made_once_and_again_when_an_input_changes(store, tmp_path):
    make = Recorder()
    first = store(artefact(a=1), make)
    assert store(artefact(a=1), make) == first and make.calls == 1
    (tmp_path / "seed" / "old").touch()
    assert store(artefact(a=2), make) == first and make.calls == 2
    assert not (tmp_path / "seed" / "old").exists()


@pytest.mark.parametrize("damage", ["delete", "change", "stamp"])
def test_damage_is_noticed(store, tmp_path, damage):
    make = Recorder()
    first = store(artefact(a=1), make)
    file = tmp_path / "seed" / "file"
    if damage == "delete":
        file.unlink()
    elif damage == "change":
        file.write_text("y")
    else:
        (tmp_path / "seed" / "artefact.json").write_text("{")
        file.unlink()
    assert store(artefact(a=1), make) == first and make.calls == 2


def test_what_a_crash_left_is_gone_on_with(store, tmp_path):
    def crash(folder):
        (folder / "half").touch()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        store(artefact(a=1), crash)
    make = Recorder()
    store(artefact(a=1), make)
    assert make.calls == 1 and (tmp_path / "seed" / "half").exists()


def test_the_digest_is_of_content_alone(tmp_path):
    stores = [Store(tmp_path / name, [BtmStage.seed], say=lambda line: None) for name in "abc"]
    made = [store(artefact(a=name), Recorder(text)) for store, name, text in zip(stores, "pqr", "xxy", strict=True)]
    assert made[0] == made[1] != made[2]


def test_only_its_own_stage_makes_it_and_foreign_folders_are_left_alone(tmp_path):
    other = Store(tmp_path, [BtmStage.merge], say=lambda line: None)
    with pytest.raises(ValueError, match=r"add seed to btm\.stages"):
        other(artefact(a=1), Recorder())
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / "precious").touch()
    store = Store(tmp_path, [BtmStage.seed], say=lambda line: None)
    with pytest.raises(ValueError, match="not of this run"):
        store(artefact(a=1), Recorder())


def test_what_changed_is_named(tmp_path):
    said = []
    store = Store(tmp_path, [BtmStage.seed], said.append)
    store(artefact(settings={"train": {"steps": 1}, "model": 2}), Recorder())
    store(artefact(settings={"train": {"steps": 2}, "model": 2}), Recorder())
    assert said == ["seed: settings.train.steps changed, so it is made again"]
