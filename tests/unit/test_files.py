"""Files that nobody vouches for: what is read must be regular, what is written stays inside its folder."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.files import (
    MAX_DEPTH,
    open_append,
    open_regular,
    own_folder,
    parse_json,
    read_small,
    replace_bytes,
    replace_text,
)


def link(path: Path) -> None:
    path.symlink_to(path.with_name("target"))


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


NOT_REGULAR = [link, dangling, os.mkfifo, Path.mkdir, bound]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where something else than a regular file will be; beside it a file that a link points to."""
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    (tmp_path / "target").write_text("precious")
    return Path("place")


@pytest.mark.parametrize("make", NOT_REGULAR)
def test_only_regular_files_are_read_and_grow(place: Path, make: Callable[[Path], object]) -> None:
    make(place)
    descriptors = len(os.listdir("/proc/self/fd"))
    for use in (lambda: open_regular(place).__enter__(), lambda: read_small(place, 10), lambda: open_append(place)):
        with pytest.raises(ValueError, match=r"^place: "):
            use()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert Path("target").read_text() == "precious" and not Path("nowhere").exists()


@pytest.mark.parametrize("make", [link, dangling])
def test_a_link_is_replaced_and_its_target_left_alone(place: Path, make: Callable[[Path], object]) -> None:
    make(place)
    temporary = place.with_name(f".place.{os.getpid()}.tmp")
    temporary.symlink_to("target")  # whoever may put a link at one name may put one at another
    replace_text(place, "日本語\n")
    assert not place.is_symlink() and place.read_text("utf-8") == "日本語\n"
    make(other := Path("other"))
    replace_bytes(other, b"\0")
    assert other.read_bytes() == b"\0" and not other.is_symlink()
    assert Path("target").read_text() == "precious" and not Path("nowhere").exists() and not temporary.is_symlink()


def test_lines_are_added_to_what_is_there(place: Path) -> None:
    for text in ("a\n", "日\n"):
        with open_append(place) as file:
            file.write(text)
    assert place.read_text("utf-8") == "a\n日\n"
    with pytest.raises(FileNotFoundError):
        open_append(Path("absent") / "file")


@pytest.mark.parametrize("make", [link, dangling, os.mkfifo, Path.touch])
def test_a_folder_of_our_own_is_no_link_and_no_file(place: Path, make: Callable[[Path], object]) -> None:
    make(place)
    for made in (True, False):
        with pytest.raises(ValueError, match=r"^place: .*move it away"):
            own_folder(place, make=made)
    assert own_folder(Path("a") / "b").is_dir() and own_folder(Path("a") / "b").is_dir()
    assert not own_folder(Path("c"), make=False).exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NaN", "NaN is no finite number"),
        ('{"a": [-Infinity]}', "-Infinity is no finite number"),
        ("1e999", "1e999 is no finite number"),
        ("[" * 100_000, "nested deeper than"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested deeper than"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested deeper than"),
        ("9" * 5000, "integer"),
        ("{", "Expecting"),
        (b"\xff", "decode"),
    ],
)
def test_strict_json(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


@pytest.mark.parametrize("value", [None, 1, -1.5e300, "x", [], {}, {"a": [{"b": [[]]}]}, [[1], "]" * 1000]])
def test_what_json_holds_comes_back(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_json(deep)) == deep
