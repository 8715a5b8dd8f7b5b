"""The import graph: each module imports only from its own floor or those below."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# From the ground up. A module may import its own floor and every lower one.
FLOORS = [
    {
        "recipes",
        "recipes.rules",
        "recipes.text",
        "recipes.config",
        "recipes.schema",
        "recipes.description",
        "recipes.topology",
        "recipes.launcher",
        "recipes.files",
    },
    {
        "recipes.collectives",
        "recipes.groups",
        "recipes.partial",
        "recipes.logical",
        "recipes.placement",
        "recipes.data",
    },
    {"recipes.moe", "recipes.telemetry", "recipes.plan"},
    {"recipes.model", "recipes.validation"},
    {"recipes.engine"},
    {"recipes.checkpoint"},
    {"recipes.train", "recipes.btm"},
    {"recipes.pretrain", "recipes.btm.__main__"},
    {"tools", "launch"},
    {"tests"},
]
HYDRA = {"recipes/pretrain.py", "recipes/btm/__main__.py"}
DEEPSPEED = ("recipes/engine/", "recipes/moe/layer.py", "recipes/groups.py", "patches/", "tools/bench/moe_peers.py")


def floor(module: str) -> int | None:
    """The floor of a module of ours, by its longest listed prefix."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        for number, members in enumerate(FLOORS):
            if ".".join(parts[:length]) in members:
                return number
    return None


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names if node.module == "recipes"}
    return found


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_imports_run_one_way():
    wrong = []
    for path in sources("recipes", "tools"):
        own = floor(module_name(path))
        assert own is not None, f"{path}: on no floor"
        wrong += [
            f"{module_name(path)} imports {name}" for name in imports(path) if (other := floor(name)) and other > own
        ]
    assert not wrong


def test_patches_know_only_upstream():
    ours = ("recipes", "tools", "launch", "tests")
    assert not [(path, name) for path in sources("patches") for name in imports(path) if name.split(".")[0] in ours]


def test_only_entry_points_import_hydra_and_only_engine_and_moe_import_deepspeed():
    for path in sources("recipes", "tools", "patches"):
        where = path.relative_to(ROOT).as_posix()
        roots = {name.split(".")[0] for name in imports(path)}
        assert "hydra" not in roots or where in HYDRA, where
        assert "deepspeed" not in roots or where.startswith(DEEPSPEED), where


def test_the_description_and_its_checks_need_no_torch():
    modules = (
        "recipes.config, recipes.schema, recipes.validation, recipes.launcher, recipes.plan.size, recipes.pretrain"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
