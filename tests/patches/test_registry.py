"""The registry applies all or nothing, once, says what it did and restores the originals."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from patches import registry
from patches.record import Patch

ROOT = Path(__file__).parents[2]
INSTALLED = version("packaging")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module to patch: function `f`, class `C` with method `m`, and `D` that inherits it."""
    module = ModuleType("patched_library")
    module.f = lambda: "f"
    module.C = type("C", (), {"m": lambda self: "m"})
    module.D = type("D", (module.C,), {})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "_active", {})
    return module


def shout(original: Callable[..., str]) -> Callable[..., str]:
    return lambda *args: original(*args) + "!"


def patch(*targets: str, **fields) -> Patch:
    defaults = {"name": "library.shout", "library": "packaging", "versions": f"=={INSTALLED}"}
    about = {"why": "it is too quiet", "upstream": "https://example.org/1"}
    return Patch(**(defaults | about | fields), wrappers={f"patched_library:{target}": shout for target in targets})


def test_apply_wraps_functions_and_methods_and_undo_restores_them(library, monkeypatch) -> None:
    monkeypatch.setattr(registry, "PATCHES", (patch("f", "C.m"),))
    originals = library.f, vars(library.C)["m"]
    said = []
    lines = registry.apply_all(said.append)
    assert (library.f(), library.C().m()) == ("f!", "m!")
    assert lines == said == registry.applied() == [f"patch library.shout (packaging {INSTALLED}): it is too quiet"]
    registry.undo_all()
    assert (library.f, vars(library.C)["m"]) == originals
    assert registry.applied() == []


def test_a_second_apply_changes_and_says_nothing(library, monkeypatch) -> None:
    monkeypatch.setattr(registry, "PATCHES", (patch("f"),))
    registry.apply_all(say=lambda line: None)
    assert registry.apply_all(say=pytest.fail) == []
    assert library.f() == "f!"
    assert len(registry.applied()) == 1


def test_apply_prints_by_default(library, monkeypatch, capsys) -> None:
    monkeypatch.setattr(registry, "PATCHES", (patch("f"),))
    registry.apply_all()
    assert "library.shout" in capsys.readouterr().out


def test_patches_of_one_target_nest_and_unwind(library, monkeypatch) -> None:
    monkeypatch.setattr(registry, "PATCHES", (patch("f", name="library.one"), patch("f", name="library.two")))
    original = library.f
    registry.apply_all(say=lambda line: None)
    assert library.f() == "f!!"
    registry.undo_all()
    assert library.f is original


def test_a_patch_whose_condition_does_not_hold_is_left_out(library, monkeypatch) -> None:
    monkeypatch.setattr(registry, "PATCHES", (patch("f", "missing", versions="<0", condition=lambda: False),))
    assert registry.apply_all(say=pytest.fail) == []
    assert library.f() == "f"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (patch("f", versions=">=1000,<1001"), f"packaging {INSTALLED} is unknown, known is >=1000,<1001; install"),
        (patch("f", library="no-such-library"), "no-such-library is not installed; install"),
        (patch("g"), "target patched_library:g is missing"),
        (patch("C.x"), "target patched_library:C.x is missing"),
        (patch("X.m"), "target patched_library:X.m is missing"),
        (patch("D.m"), "target patched_library:D.m is missing"),  # C defines it
    ],
)
def test_an_unknown_version_or_target_names_the_patch_and_changes_nothing(
    library, monkeypatch, second, message
) -> None:
    monkeypatch.setattr(registry, "PATCHES", (patch("f", name="library.first"), second))
    with pytest.raises(ValueError) as error:
        registry.apply_all(say=pytest.fail)
    assert str(error.value).startswith("patch library.shout: ")
    assert message in str(error.value)
    assert library.f() == "f"
    assert registry.applied() == []


def test_every_file_of_a_library_is_one_registered_patch_with_a_test() -> None:
    helpers = {"torch_view", "__init__"}
    files = {
        f"{folder}.{path.stem}"
        for folder in ("deepspeed", "megatron_core")
        for path in (ROOT / "patches" / folder).glob("*.py")
        if path.stem not in helpers
    }
    assert files == {patch.name for patch in registry.PATCHES}
    for name in files:
        folder, stem = name.split(".")
        assert (ROOT / "tests" / "patches" / folder / f"test_{stem}.py").is_file()


@pytest.mark.parametrize("patch", registry.PATCHES, ids=lambda patch: patch.name)
def test_every_patch_has_an_upper_bound_and_covers_the_installed_version(patch: Patch) -> None:
    versions = SpecifierSet(patch.versions)
    assert version(patch.library) in versions
    assert "999" not in versions
    assert patch.why
    assert patch.upstream


def test_importing_the_registry_imports_no_heavy_library() -> None:
    code = "import sys, patches.registry; print([m for m in ('torch', 'deepspeed', 'megatron') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert run.stdout.strip() == "[]", run.stderr


def test_a_view_of_a_module_leaves_the_module_alone() -> None:
    from patches.megatron_core.torch_view import torch_view

    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(__name__="torch.cuda", __doc__="", device=lambda: "gpu", count=lambda: 0)
    torch.rand = lambda: 4
    view = torch_view(torch, cuda={"device": lambda: "cpu"}, host={"rand": lambda: 5})
    torch.later = "imported later"
    assert (view.cuda.device(), view.cuda.count(), view.rand(), view.later) == ("cpu", 0, 5, "imported later")
    assert (torch.cuda.device(), torch.rand()) == ("gpu", 4)
    with pytest.raises(AttributeError):
        _ = view.missing
