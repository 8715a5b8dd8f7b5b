import json
import math
import os

import pytest

from recipes.files import replace_text
from recipes.telemetry.summary import write_json


def test_writes_strict_json(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"nll": math.nan, "by_domain": {"日本語": [1.5, math.inf]}, "steps": 3})
    assert json.loads(path.read_text("utf-8")) == {"nll": None, "by_domain": {"日本語": [1.5, None]}, "steps": 3}


def test_a_reader_of_the_old_file_is_not_disturbed(tmp_path):
    path = tmp_path / "summary.json"
    replace_text(path, "old")
    with path.open() as reader:
        replace_text(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    replace_text(path, "old")

    def full_disk(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        replace_text(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
