"""What may change when a run goes on from a checkpoint, and when a new one starts from another run's.

description, data and checkpoint -> check_resume() or check_start() -> what to say, one line for each change
                                                                     -> or a ValueError with every change that is refused

The class of each key stands at its field (`recipes/fields.py`). A change of identity is accepted when `run.resume_with` names it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from recipes import schema
from recipes.checkpoint.format import Checkpoint
from recipes.checkpoint.trainer import check_trainer
from recipes.config import CheckpointLoad, Config, DecayStyle, to_plain
from recipes.data import identity
from recipes.data.dataset import DatasetInfo
from recipes.fields import CONTENT, TOKENIZER, OnResume
from recipes.logical import logical_tensors

_DECAY_END = "schedule.lr_decay_steps"
# What a run has in common with the one whose state it starts from, whatever else is new about it.
_OF_THE_STATE = ("model.", "moe.", "train.precision", "optimizer.name")


@dataclass(frozen=True)
class Change:
    """One difference between a checkpoint and the run: its key, both values as text, whether it is refused, and another way out."""

    key: str
    old: str
    new: str
    refused: bool
    way_out: str = ""
    also: str = ""  # another key by which it may be accepted


def check_resume(config: Config, data: DatasetInfo, checkpoint: Checkpoint) -> list[str]:
    """What to say of a run that goes on from its own checkpoint. Raises ValueError naming all that differs and must not."""
    changes = [*_settings(check_trainer(checkpoint), config, checkpoint.step), *_data(data, checkpoint)]
    notes = [] if "data" in checkpoint.trainer else ["the checkpoint does not record its data, which was not compared"]
    return _judge(config, checkpoint, changes, "resumed") + notes


def check_start(config: Config, data: DatasetInfo, checkpoint: Checkpoint) -> list[str]:
    """What to say of a new run that starts from another run's checkpoint. Raises ValueError as `check_resume`.

    With `checkpoint.load=all` the run takes over optimizer states and steps; with `weights` all that counts is that they fit.
    """
    weights_only = config.checkpoint.load is CheckpointLoad.weights
    if not weights_only and checkpoint.step >= config.train.steps:
        raise ValueError(
            f"checkpoint.load_from={checkpoint.path}: train.steps={config.train.steps} must be above the checkpoint's step, "
            f"{checkpoint.step}; train for more, or start anew from its weights with checkpoint.load=weights"
        )
    changes = []
    for change in _settings(check_trainer(checkpoint), config, checkpoint.step):
        if schema.entries()[change.key].on_resume is not OnResume.identity:
            continue  # another run, by another name, on other ranks
        needed = not weights_only and change.key.startswith(_OF_THE_STATE)
        if needed or not weights_only or change.key.startswith(("model.", "moe.")):
            changes.append(dataclasses.replace(change, refused=needed))
    changes += [change for change in _data(data, checkpoint) if change.key == TOKENIZER]
    return _judge(config, checkpoint, changes, "started")


def _judge(config: Config, checkpoint: Checkpoint, changes: list[Change], how: str) -> list[str]:
    accepted = set(config.run.resume_with)
    refused = [change for change in changes if change.refused and not accepted & {change.key, change.also}]
    if refused:
        keys = ",".join(dict.fromkeys([*config.run.resume_with, *(change.key for change in refused)]))
        lines = [
            f"{c.key}={c.new} but the checkpoint has {c.old}{f'; {c.way_out}' if c.way_out else ''}" for c in refused
        ]
        ways_out = f"keep what the checkpoint has, start a new run, or accept the change by 'run.resume_with=[{keys}]'"
        raise ValueError(f"{checkpoint.path} is of another run:\n  " + "\n  ".join([*lines, ways_out]))
    if misfit := _misfit(config, checkpoint):
        raise ValueError(f"{checkpoint.path}: {misfit}; use the model.* and moe.* settings of the checkpoint")
    known = {name for change in changes for name in (change.key, change.also)}
    unused = [f"run.resume_with names {key}, which has not changed" for key in accepted - known]
    by_flag = " (accepted by run.resume_with)"
    return [f"{how} with changed {c.key}: {c.old} -> {c.new}{by_flag if c.refused else ''}" for c in changes] + sorted(
        unused
    )


def _misfit(config: Config, checkpoint: Checkpoint) -> str | None:
    """A tensor that the model has and the checkpoint does not, or in another shape."""
    stored = {name: tuple(shape) for name, (shape, _) in checkpoint.tensors("model").items()}
    needed = {name: tuple(tensor.shape) for name, tensor in logical_tensors(config).items()}
    for name in sorted(stored.keys() | needed.keys()):
        if stored.get(name) != needed.get(name):
            return f"model tensor {name} is {stored.get(name, 'absent')}, the model needs {needed.get(name, 'none')}"
    return None


def _settings(old: Config, new: Config, step: int) -> list[Change]:
    """The keys that differ and are not free, those of the learning rate judged together."""
    before, after = _flat(old), _flat(new)
    follows = before[_DECAY_END] == before["train.steps"] and after[_DECAY_END] == after["train.steps"]
    found = []
    for key, entry in schema.entries().items():
        if before[key] == after[key] or entry.on_resume is OnResume.free:
            continue
        change = Change(key, schema.show(before[key]), schema.show(after[key]), entry.on_resume is OnResume.identity)
        if key == "train.steps" and follows:
            keep = f"the learning rate decays over train.steps, so set {_DECAY_END}={before[key]} to keep its decay"
            change = dataclasses.replace(change, refused=not _free_end(old, new, step), way_out=keep, also=_DECAY_END)
        elif key == _DECAY_END:
            if follows:
                continue
            change = dataclasses.replace(change, refused=not _free_end(old, new, step))
        found.append(change)
    return found


def _free_end(old: Config, new: Config, step: int) -> bool:
    """Whether a decay that ends elsewhere leaves the steps so far as they were: no decay, or one of wsd put off in time."""
    styles = {old.schedule.lr_decay_style, new.schedule.lr_decay_style}
    if styles == {DecayStyle.constant}:
        return True
    before, after = (config.schedule.lr_decay_steps or config.train.steps for config in (old, new))
    return styles == {DecayStyle.wsd} and after > before and step <= before - old.schedule.wsd_decay_steps


def _data(data: DatasetInfo, checkpoint: Checkpoint) -> Iterable[Change]:
    """Another tokenizer, another content. The text of both says which domains differ."""
    trainer = checkpoint.trainer
    stored = trainer.get("data")
    theirs, eod = str(trainer.get("tokenizer")), stored.get("eod") if isinstance(stored, dict) else None
    if theirs != data.tokenizer_fingerprint or eod not in (None, data.eod):
        old = f"{theirs:.12}" + ("" if eod is None else f" (end of document {eod!r:.20})")
        yield Change(TOKENIZER, old, f"{data.tokenizer_fingerprint:.12} (end of document {data.eod})", True)
    if stored is not None and (found := identity.changes(stored, data)):
        yield Change(CONTENT, found[0], found[1], True)


def _flat(config: Config) -> dict[str, Any]:
    """Plain values by dotted key; a decay without an end of its own ends with the run."""
    plain = {f"{group}.{key}": value for group, keys in to_plain(config).items() for key, value in keys.items()}
    plain[_DECAY_END] = plain[_DECAY_END] or plain["train.steps"]
    return plain
