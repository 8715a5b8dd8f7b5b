"""Command lines of the tools at random: each is answered, or refused by one message with exit code 2.

Flags and their kinds are asked of each parser, so that new ones are tried by themselves. What would start processes, or fetch
packages, is not run.
"""

from __future__ import annotations

import argparse
import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import values
from tests.fuzz.judging import FACTOR, fault, run, try_all
from tools import arguments

TOOLS = {  # module -> what is not run
    "tools.evaluate": None,
    "tools.generate": None,
    "tools.report.__main__": None,
    "tools.index": None,
    "tools.tokenizer": None,
    "tools.corpus.__main__": "_build",
    "tools.conformance.__main__": "_run",
    "tools.quickstart": "_run",
    "tools.scaling": "_run",
    "tools.btm": "_run",
}
FILES = [
    "folder",
    "folder/garbage.json",
    "empty",
    "missing",
    "missing/too",
    "text.jsonl",
    "~",
    "~/x",
    "~nobody_of_this_name/x",
]
FILES += [
    "",
    " ",
    "x" * 256,
    "a/" * 3000,
    "a\0b",
    "\udcff",
    "a\nb",
    "\x1b[31m",
    "-",
    "--",
    "-1",
    "folder/../folder",
    "loop/x",
    "null",
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "garbage.json").write_bytes(b"\xff\0{")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n{"text": 3}\n[[[\n')
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path


def _actions(module: Any) -> list[argparse.Action]:
    """The flags of a tool, those of its commands among them, as its parser has them."""
    seen: list[argparse.Action] = []

    class Watched(arguments.Parser):
        def add_argument(self, *names: Any, **more: Any) -> argparse.Action:
            seen.append(super().add_argument(*names, **more))
            return seen[-1]

    with pytest.MonkeyPatch.context() as patched:
        for name in (module, importlib.import_module("tools.arms")):
            patched.setattr(name, "Parser", Watched, raising=False)
        run(module.main, ["--no-such-flag"])
    return [action for action in seen if "--help" not in action.option_strings]


def _value(action: argparse.Action, rng: random.Random) -> str:
    if action.type in (arguments.file_path, arguments.file_name):
        return rng.choice(FILES)
    if action.choices and rng.random() < 0.7:
        return rng.choice(list(action.choices))
    if rng.random() < 0.5:
        return rng.choice(["1", "0", "7", "0.5", "a", "train.steps=5", "sample", "dense"])
    found = rng.choice([*values.MAD, values.soup(rng)])
    return rng.choice(FILES) if "/" in found else found  # no path that leads out of here


def _argv(actions: list[argparse.Action], rng: random.Random) -> list[str]:
    words: list[str] = []
    for action in rng.sample(actions, rng.randint(0, min(5, len(actions)))):
        if not action.option_strings:
            words += [_value(action, rng) for _ in range(rng.choice([1, 1, 2]))]
        elif action.nargs == 0:
            words.append(action.option_strings[0])
        else:
            flag, value = action.option_strings[0], _value(action, rng)
            words += rng.choice(
                [[flag, value], [flag, value], [f"{flag}={value}"], [flag], [flag, value, value], [flag[:-1], value]]
            )
    if rng.random() < 0.1:
        words.insert(0, rng.choice(["--no-such-flag", "-x", "--", rng.choice(FILES)]))
    return words


@pytest.mark.timeout(60 * FACTOR)
@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_answers_or_refuses(name, monkeypatch):
    module = importlib.import_module(name)
    if name in ("tools.evaluate", "tools.generate"):
        importlib.import_module("recipes.btm.model")  # whose import takes longer than a command may
    actions = _actions(module)
    assert len(actions) > 3
    if TOOLS[name]:
        monkeypatch.setattr(module, TOOLS[name], lambda *given, **more: [])

    def cases() -> Iterator[list[str]]:
        for number in range(int(40 * FACTOR)):
            yield _argv(actions, random.Random(f"{name}:{number}"))

    _, refused = try_all(module.main, cases(), seconds=3)
    assert refused > 0


@pytest.mark.parametrize(
    ("name", "argv", "message"),
    [
        ("tools.generate", ["folder", "--top-k", "-1"], "--top-k -1: must be at least 0"),
        (
            "tools.generate",
            ["folder", "--temperature", "nan"],
            "--temperature nan: must be a finite number, at least 0",
        ),
        ("tools.generate", ["folder", "--prompt", "a\udcff"], r"--prompt a\udcff: must be valid Unicode"),
        ("tools.evaluate", ["x" * 300], "must have names of at most 255 bytes"),
        ("tools.evaluate", ["~nobody_of_this_name/x"], "~nobody_of_this_name is no home folder"),
        ("tools.index", ["--seed", "9" * 5000], "--seed 9999"),
        ("tools.report.__main__", ["run", "--no-such\nflag"], r"unrecognized arguments: --no-such\nflag"),
        ("tools.tokenizer", ["train", "--input", "x"], "the following arguments are required: --out"),
        ("tools.conformance.__main__", ["--world-size", "0"], "--world-size 0: must be at least 1"),
    ],
)
def test_mistakes_are_named(name, argv, message):
    verdict = run(importlib.import_module(name).main, argv)
    assert verdict.code == 2 and fault(verdict) is None and verdict.err.count("\n") == 1
    assert message in verdict.err and "--help" in verdict.err


def test_the_home_folder_is_that_of_the_user(here):
    assert arguments.file_path("~/x") == Path.home() / "x" == here / "x"
    assert arguments.file_path("x/~") == Path("x/~") and arguments.file_name("./~x") == "~x"
