"""What the schema in `recipes/config.py` says of each key, for help and error messages.

dataclass fields and the comments beside them -> entries() -> {"train.steps": Entry(int, 1000, "optimizer steps"), ...}
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import functools
import inspect
import re
import types
import typing
from dataclasses import dataclass
from typing import Any

from recipes import config as config_module
from recipes.config import Config

# Mappings whose keys are the user's: domain names, DeepSpeed's own settings.
FREE_FORM = ("deepspeed.extra", "data.domain_weights", "btm.average_weights")


@dataclass(frozen=True)
class Entry:
    """One key: its annotated type, its default and the note (meaning and unit) beside it."""

    key: str
    hint: Any
    default: Any
    note: str

    @property
    def legal(self) -> str:
        """The type in words, e.g. "an integer" or "one of fp32, bf16"."""
        return type_text(self.hint)

    @property
    def example(self) -> str:
        """An override that is legal: the default."""
        return f"{self.key}={show(self.default)}"


@functools.cache
def entries() -> dict[str, Entry]:
    """Every key of the schema by its dotted name, in the order of the file."""
    notes = _notes()
    found = {}
    for group in dataclasses.fields(Config):
        schema = typing.get_type_hints(Config)[group.name]
        hints, defaults = typing.get_type_hints(schema), schema()
        for field in dataclasses.fields(schema):
            key = f"{group.name}.{field.name}"
            note = notes.get((schema.__name__, field.name), "")
            found[key] = Entry(key, hints[field.name], getattr(defaults, field.name), note)
    return found


def _notes() -> dict[tuple[str, str], str]:
    """The comment beside each annotated field of `config.py`, by class and field name."""
    source = inspect.getsource(config_module)
    lines = source.splitlines()
    notes = {}
    for node in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = "\n".join(lines[field.lineno - 1 : field.end_lineno])
                if comment := re.search(r"#\s*(.+)", text):
                    notes[node.name, field.target.id] = comment[1].strip()
    return notes


def groups() -> list[str]:
    """The names before the first dot."""
    return [field.name for field in dataclasses.fields(Config)]


def type_text(hint: Any) -> str:
    """A type in words."""
    options = typing.get_args(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join("null" if option is types.NoneType else type_text(option) for option in options)
    if typing.get_origin(hint) is list:
        return f"a list like [1,2] in which each item is {type_text(options[0])}"
    if typing.get_origin(hint) is dict:
        return f"a mapping like {{a:1,b:2}} in which each value is {type_text(options[1])}"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(hint.__members__)
    return {int: "an integer", float: "a number", bool: "true or false", str: "text"}.get(hint, "any value")


def show(value: Any) -> str:
    """A value as one writes it on the command line."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ",".join(map(show, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    return str(value)


def unknown_key(key: str) -> str:
    """The message for a key that the schema does not have: what is near it, and what there is."""
    known = entries()
    group = key.partition(".")[0]
    if group not in groups():
        near = difflib.get_close_matches(key, [*groups(), "experiment", *known], n=3)
        return f"{key}: unknown key{_did_you_mean(near)}; the groups are {', '.join([*groups(), 'experiment'])}"
    legal = [name.partition(".")[2] for name in known if name.startswith(f"{group}.")]
    near = [f"{group}.{name}" for name in difflib.get_close_matches(key.partition(".")[2], legal, n=3)]
    near += [name for name in known if name.partition(".")[2] == key.rpartition(".")[2]]  # right name, wrong group
    return f"{key}: unknown key{_did_you_mean(near)}; {group} has {', '.join(legal)}"


def _did_you_mean(near: list[str]) -> str:
    return f", did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""
