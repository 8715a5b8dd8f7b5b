"""W&B's own environment variables (docs.wandb.ai, "Environment variables"), and which setting holds.

The command line comes first, then the variables, then the files of `hydra_conf/`. What wandb reads by itself and no key of ours
says (WANDB_TAGS, WANDB_NOTES, WANDB_DIR, WANDB_BASE_URL, ...) is left to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from recipes import schema
from recipes.config import TelemetryConfig, WandbMode

_MODES = {mode.value: mode for mode in WandbMode} | {"run": WandbMode.online, "dryrun": WandbMode.offline}
_TEXTS = {"wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY", "wandb_group": "WANDB_RUN_GROUP"}
_TRUE = ("1", "true", "yes", "on")
# What belongs to one run, not to those that it starts.
_OF_ONE_RUN = ("WANDB_RUN_ID", "WANDB_NAME", "WANDB_RESUME", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")


def obey(
    telemetry: TelemetryConfig, overrides: Iterable[str], environ: Mapping[str, str]
) -> tuple[TelemetryConfig, list[str]]:
    """`telemetry` as the variables have it, and what to say about it. `overrides`: the words of the command line, which win.

    Raises ValueError for a mode that W&B does not have.
    """
    keys = {word.lstrip("+~").partition("=")[0] for word in overrides}
    # An option of the group sets the mode.
    given = {key.removeprefix("telemetry.") for key in keys} | ({"wandb_mode"} if "telemetry" in keys else set())
    wanted: dict[str, tuple[str, Any]] = _mode(environ) | {
        key: (name, environ[name]) for key, name in _TEXTS.items() if environ.get(name)
    }
    changed: dict[str, Any] = {}
    notes = []
    for key, (name, value) in wanted.items():
        mine = getattr(telemetry, key)
        if mine == value:
            continue
        shown = f"telemetry.{key}={schema.show(value)}"
        if key in given:
            notes.append(
                f"telemetry.{key}={schema.show(mine)} of the command line holds, {name}={environ[name]} does not"
            )
        else:
            changed[key] = value
            notes.append(f"{shown}, as {name}={environ[name]}")
    telemetry = replace(telemetry, **changed)
    if environ.get("WANDB_SWEEP_ID") and telemetry.wandb_mode is not WandbMode.online:
        mode = schema.show(telemetry.wandb_mode)
        notes.append(f"the sweep {environ['WANDB_SWEEP_ID']} hears nothing of this run: W&B is {mode}")
    return telemetry, notes


def _mode(environ: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """The mode that the variables ask for, and the one that does."""
    if environ.get("WANDB_DISABLED", "").lower() in _TRUE:
        return {"wandb_mode": ("WANDB_DISABLED", WandbMode.disabled)}
    if text := environ.get("WANDB_MODE", "").lower():
        if text not in _MODES:
            raise ValueError(f"WANDB_MODE={text}: must be one of {', '.join(_MODES)}; change it, or unset it")
        return {"wandb_mode": ("WANDB_MODE", _MODES[text])}
    if environ.get("WANDB_SWEEP_ID"):  # the agent waits for results
        return {"wandb_mode": ("WANDB_SWEEP_ID", WandbMode.online)}
    return {}


def for_own_run(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run that this process starts: without the identity of its own W&B run."""
    return {key: value for key, value in environ.items() if key not in _OF_ONE_RUN}


def kept_back(environ: Mapping[str, str]) -> str | None:
    """What to say of variables that the runs started here do not get; None when there are none."""
    names = [name for name in _OF_ONE_RUN if environ.get(name)]
    return (
        f"{', '.join(names)}: not for the runs that are started here, each is a W&B run of its own" if names else None
    )
