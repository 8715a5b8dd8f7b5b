"""Trained runs are not thrown away because a setting has changed by mistake.

description, run folder -> check_trained() -> nothing, or a ValueError with every setting in which a trained run differs

A stage whose inputs have changed is made again. For what costs seconds that is right; for a run that was trained it takes
`run.resume_with` to name what has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes import schema
from recipes.btm.arms import Arm, complete, material, without_own_data
from recipes.btm.split import data_digest
from recipes.btm.stages import recorded_inputs
from recipes.config import Config
from recipes.data.dataset import DatasetInfo
from recipes.fields import CONTENT


def check_trained(arms: Iterable[Arm], config: Config, info: DatasetInfo, folder: Path) -> None:
    """Compare the arms with what was trained, or begun, for them below `folder`. Raises ValueError as above."""
    refused: dict[str, str] = {}
    for arm in arms:
        inputs = recorded_inputs(folder / arm.path)
        if not isinstance(inputs, Mapping) or not isinstance(inputs.get("settings"), Mapping):
            continue
        own_data = "data.path" in arm.settings
        described = complete(without_own_data(arm), config, folder, check=False)
        old, new = _flat(inputs["settings"]), _flat(material(described))
        for key in new:
            if old.get(key) != new[key] and not (own_data and key.startswith("data.")):
                refused.setdefault(key, f"{key}={schema.show(new[key])} but {arm.path} has {schema.show(old.get(key))}")
        domains = [name for name in described.data.domain_weights or info.domains if name in info.domains]
        if not own_data and inputs.get("data") != data_digest(info, domains):
            refused.setdefault(CONTENT, f"{CONTENT} is another than that of {arm.path}")
    lines = [line for key, line in refused.items() if key not in config.run.resume_with]
    if lines:
        keys = ",".join(dict.fromkeys([*config.run.resume_with, *refused]))
        way_out = f"keep it, use another run.dir, or train anew in place of what is there by 'run.resume_with=[{keys}]'"
        raise ValueError("\n  ".join([f"{folder} holds runs that were trained otherwise:", *lines, way_out]))


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key."""
    found = {}
    for group, keys in settings.items():
        if group == "seed":
            found["run.seed"] = keys
        elif isinstance(keys, Mapping):
            found |= {f"{group}.{key}": value for key, value in keys.items()}
    return found
