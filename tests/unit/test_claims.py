"""What documents and comments name exists: files, modules, targets of make, experiments, keys and options."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.config import Config
from recipes.fields import CONTENT, TOKENIZER

ROOT = Path(__file__).parents[2]
FOLDERS = ("recipes", "tools", "patches", "tests", "hydra_conf", "results")
DOCUMENTS = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md")))]
DOCUMENTS = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]  # tells what was
KEYS = {
    f"{group.name}.{field.name}"
    for group in dataclasses.fields(Config)
    for field in dataclasses.fields(group.default_factory)  # type: ignore[arg-type, type-var]
}
KEYS |= {TOKENIZER, CONTENT}  # what a resumed run may name besides them
GROUPS = {key.partition(".")[0] for key in KEYS}
_TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
_KEY = re.compile(rf"(?<![\w./-])({'|'.join(GROUPS)})\.([a-z]\w*)(?![\w(/]|\.\w)")


def texts() -> Iterator[tuple[Path, str]]:
    """Documents, and the docstrings and comments of our code."""
    for path in DOCUMENTS:
        yield path, path.read_text()
    for folder in ("recipes", "tools", "patches"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, _DOCUMENTED))
            told = [ast.get_docstring(node) or "" for node in nodes]
            told += [line.partition("#")[2] for line in source.splitlines() if "# " in line]
            yield path, "\n".join(told)


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_FILES = {"py", "md", "yaml", "cpp", "sh"}


def exists(name: str, beside: Path) -> bool:
    """A path from the root, from the folder of the text, or the end of some path in the repository."""
    if (ROOT / name).exists() or (beside.parent / name).exists():
        return True
    return any(any((ROOT / folder).rglob(name)) for folder in FOLDERS)


def unknown_names(path: Path, text: str) -> Iterator[str]:
    for module in re.findall(r"python -m ((?:recipes|tools|tests)(?:\.[a-z]\w*)*)(?!\.[A-Z])", text):
        file = ROOT / module.rstrip(".").replace(".", "/")
        if not file.with_suffix(".py").exists() and not (file / "__main__.py").exists():
            yield f"python -m {module}"
    for target in re.findall(r"`make ([a-z][\w-]*)", text):
        if target not in _TARGETS:
            yield f"make {target}"
    for name in re.findall(r"experiment=([a-z]\w*)", text):
        if not (ROOT / "hydra_conf" / "experiment" / f"{name}.yaml").exists():
            yield f"experiment={name}"
    for group, name in _KEY.findall(text):
        if f"{group}.{name}" not in KEYS and name not in _FILES and not _is_ours(path, group, name):
            yield f"{group}.{name}"
    if path.suffix == ".md":
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in link and not (path.parent / link).exists():
                yield f"]({link})"
        for name in re.findall(r"(?<![\w/*.{-])([\w/]+\.(?:py|yaml|cpp))\b", text):
            if not exists(name, path):
                yield name


def _is_ours(path: Path, group: str, name: str) -> bool:
    """`moe.layer`: the module recipes.moe.layer, or a function of the module train.py beside the text."""
    folder = ROOT / "recipes" / group
    if (folder / f"{name}.py").exists() or (folder / name).is_dir():
        return True
    return any(re.search(rf"\b{name}\b", each.read_text()) for each in (folder.with_suffix(".py"),) if each.exists())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_name_what_exists(path):
    assert not list(unknown_names(path, path.read_text()))


def test_comments_and_docstrings_name_what_exists():
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts()
        if path.suffix == ".py"
        for name in unknown_names(path, text)
    ]
    assert not found


def test_what_does_not_exist_is_seen():
    text = "`make nothing`, experiment=none, zero.stages, python -m tools.nothing, nothing.py, ](nothing.md)"
    assert len(list(unknown_names(ROOT / "README.md", text))) == 6
