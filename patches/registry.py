"""Applies the patches: checks versions and targets first, then rebinds each target; undo restores the originals.

State of this module is the process's: targets are attributes of imported modules, so they are patched or not for all.
"""

import functools
import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet

from patches.deepspeed import bf16_first_step, bf16_memory_report, optimizer_state_link, shm_build
from patches.megatron_core import current_device, rng_tracker
from patches.record import Patch

PATCHES: tuple[Patch, ...] = (
    shm_build.PATCH,
    optimizer_state_link.PATCH,
    bf16_first_step.PATCH,
    bf16_memory_report.PATCH,
    rng_tracker.PATCH,
    current_device.PATCH,
)

# What is in force: name -> (line, [(owner, attribute, original)]).
_active: dict[str, tuple[str, list[tuple[Any, str, Any]]]] = {}


def apply_all(say: Callable[[str], None] = print) -> list[str]:
    """Apply every patch whose condition holds and that is not in force yet.

    Either all of them are applied or, on an error, none.

    Args:
        say: receives one line per patch applied now; ranks other than 0 pass a function that drops it.

    Returns:
        The lines. Empty when everything was in force already.

    Raises:
        ValueError: a library is missing or its version unknown to a patch, or a target is not where it was; the message
            names the patch and what to do.
    """
    pending = [patch for patch in PATCHES if patch.name not in _active and patch.condition()]
    resolved = [(patch, _checked_version(patch), _targets(patch)) for patch in pending]
    lines = []
    for patch, installed, targets in resolved:
        line = f"patch {patch.name} ({patch.library} {installed}): {patch.why}"
        originals = [(owner, attribute, vars(owner)[attribute]) for owner, attribute in targets]
        _active[patch.name] = line, originals
        for (owner, attribute, original), wrap in zip(originals, patch.wrappers.values(), strict=True):
            setattr(owner, attribute, wrap(original))
        say(line)
        lines.append(line)
    return lines


def undo_all() -> None:
    """Restore every original, last patch first. Objects made while a patch was in force keep what they took from it."""
    while _active:
        _, (_, originals) = _active.popitem()
        for owner, attribute, original in reversed(originals):
            setattr(owner, attribute, original)


def applied() -> list[str]:
    """The lines of the patches in force, in the order of application, for the run folder."""
    return [line for line, _ in _active.values()]


def _checked_version(patch: Patch) -> str:
    try:
        installed = version(patch.library)
    except PackageNotFoundError:
        raise ValueError(f"patch {patch.name}: {patch.library} is not installed; install {patch.versions}") from None
    if not SpecifierSet(patch.versions).contains(installed, prereleases=True):
        raise ValueError(
            f"patch {patch.name}: {patch.library} {installed} is unknown, known is {patch.versions}; install a known "
            f"version, or run the reproducer in tests/patches/{patch.name.replace('.', '/test_')}.py on the new one: "
            "if it passes unpatched delete the patch, else widen its versions"
        )
    return installed


def _targets(patch: Patch) -> list[tuple[Any, str]]:
    """(owner, attribute) of each target. Only an attribute that its owner itself defines counts."""
    found = []
    for target in patch.wrappers:
        module, _, path = target.partition(":")
        *owners, attribute = path.split(".")
        try:
            owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
            if attribute not in vars(owner):
                raise AttributeError(f"{owner.__name__} does not define {attribute!r}")
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"patch {patch.name}: target {target} is missing ({type(error).__name__}: {error}); "
                f"reinstall {patch.library} {patch.versions}, or adapt or delete the patch"
            ) from error
        found.append((owner, attribute))
    return found
