"""What is installed is what the lock says: every package, its version, and the files that may be taken for it."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import lock

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / lock.LOCK).read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEEDED = [
    *PROJECT["project"]["dependencies"],
    *PROJECT["project"]["optional-dependencies"]["dev"],
    *PROJECT["build-system"]["requires"],
    "pip",
]


def pinned(environment: dict[str, str]) -> dict[str, str]:
    """Versions by name, on a machine of this environment."""
    found: dict[str, str] = {}
    for name, version, marker in lock.parse(TEXT):
        if not marker or Marker(marker.removeprefix(" ;")).evaluate(environment):
            assert found.setdefault(name, version) == version, f"{name} is pinned twice"
    return found


def test_it_names_no_place_to_take_files_from():
    assert lock.write(lock.parse(TEXT)) == TEXT
    assert not re.search(r"://|index|find-links", TEXT)


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_what_the_project_needs_is_pinned_within_its_ranges(python):
    environment = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux"}
    environment |= {"platform_machine": "x86_64", "platform_python_implementation": "CPython"}
    versions = pinned(environment)
    for text in NEEDED:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), text


def test_what_is_installed_is_what_is_pinned():
    """The project's requirements, and theirs in turn; torch's CPU build has a version of its own, 2.13.0+cpu."""
    versions, seen, waiting = pinned({}), set(), [Requirement(text) for text in NEEDED if text != "pip"]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if (name, frozenset(extras)) in seen or not (
            requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        ):
            continue
        seen.add((name, frozenset(extras)))
        assert importlib.metadata.version(name).partition("+")[0] == versions.get(name), name
        for text in importlib.metadata.requires(name) or []:
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                inner.marker = None
                waiting.append(inner)
    assert len(seen) > 80


def test_hashes_of_builds_on_disk_are_added_and_stay(tmp_path):
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"of this machine")
    new = {("torch", "2.13.0", ""): ["a" * 64], ("numpy", "2.4.6", " ; python_version >= '3.11'"): ["b" * 64]}
    found = lock.joined(new, {}, [wheel])
    (added,) = set(found["torch", "2.13.0", ""]) - {"a" * 64}
    assert lock.joined(new, found, []) == found
    assert lock.parse(lock.write(found)) == found
    newer = {("torch", "2.14.0", ""): ["c" * 64]}
    assert added not in str(lock.joined(newer, found, []))
    for name in ("torch-2.13.0.tar.gz", "scipy-1.0-py3-none-any.whl"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match="no wheel of a version that is pinned"):
            lock.joined(new, {}, [tmp_path / name])


def test_a_line_that_pins_nothing_is_refused():
    for line in ("numpy>=2\n", "numpy==2.4.6\n", "--index-url x\n", "numpy==2.4.6 \\\n    --hash=md5:00\n"):
        with pytest.raises(ValueError, match="is no pin with hashes"):
            lock.parse(TEXT + line)


def test_a_failure_leaves_the_lock_as_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lock.LOCK.write_text(TEXT)

    def fails(uv, upgrade):
        lock.LOCK.write_text("half")
        raise subprocess.CalledProcessError(1, "uv", stderr="no versions go together")

    monkeypatch.setattr(lock, "compiled", fails)
    assert lock.main(["--uv", "uv", "--upgrade"]) == 1
    assert lock.LOCK.read_text() == TEXT and capsys.readouterr().err == "error: uv: no versions go together\n"


def test_the_installation_takes_nothing_that_is_not_pinned():
    """Each call of pip that may fetch a file asks for hashes, but for torch's, whose file is checked by the next call."""
    recipe = (ROOT / "Makefile").read_text().partition("\n_install:")[2].partition("\n\n")[0]
    calls = [line for line in recipe.splitlines() if "$(PIP)" in line]
    assert len(calls) == 5
    unchecked = [line for line in calls if "--require-hashes" not in line]
    assert all("download --no-deps" in line or "--no-deps --no-build-isolation -e ." in line for line in unchecked)
    assert "--no-build-isolation -c $(LOCK)" in recipe
