"""Runs reproducers in one process: without their patch, with it, and after undo.

    python tests/patches/reproduce.py TEST_FILE...

Each file defines `PATCH`, the patch's name, and `reproduce()`, which raises where the defect shows. Prints one JSON
object per file: patch, applicable, errors (three messages, null where `reproduce` returned).
"""

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def outcome(reproduce: Callable[[], None]) -> str | None:
    """Message of what `reproduce` raised, or None."""
    try:
        reproduce()
    except Exception as error:  # noqa: BLE001 - upstream fails with whatever it likes
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None


def main(files: list[str]) -> None:
    """Reproduce each file's defect in turn; only the patch under test is ever in force."""
    sys.path[0] = str(ROOT)  # not this folder: its deepspeed/ would shadow the library
    from patches import registry

    every_patch = {patch.name: patch for patch in registry.PATCHES}
    for file in files:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        patch = every_patch[module.PATCH]
        errors = []
        if applicable := patch.condition():
            registry.PATCHES = (patch,)
            for switch in (None, lambda: registry.apply_all(say=sys.stderr.write), registry.undo_all):
                if switch:
                    switch()
                errors.append(outcome(module.reproduce))
        print("RESULT " + json.dumps({"patch": patch.name, "applicable": applicable, "errors": errors}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
