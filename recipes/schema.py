"""What the schema in `recipes/config.py` says of each key, for help and error messages.

dataclass fields and the comments beside them -> entries() -> {"train.steps": Entry(int, 1000, "optimizer steps"), ...}
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import enum
import functools
import inspect
import itertools
import re
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any

from recipes import config as config_module
from recipes.config import Config
from recipes.fields import CONTENT, TOKENIZER, OnResume, classes
from recipes.rules import PathText, Range
from recipes.text import shown

# Keys of earlier versions, and what is used in their place.
REMOVED = {
    "checkpoint.override_schedule": "name the keys whose change is accepted, as in run.resume_with=[train.steps]"
}


@dataclass(frozen=True)
class Entry:
    """One key: its annotated type, its default, the note (meaning and unit) beside it, and its class on resume."""

    key: str
    hint: Any
    default: Any
    note: str
    on_resume: OnResume

    @property
    def legal(self) -> str:
        """The type in words, e.g. "an integer" or "one of fp32, bf16"."""
        return type_text(self.hint)

    @property
    def example(self) -> str:
        """An override that is legal: the default."""
        return f"{self.key}={show(self.default)}"

    def fresh_default(self) -> Any:
        """The default, which the caller may change."""
        return copy.deepcopy(self.default)


@functools.cache
def entries() -> dict[str, Entry]:
    """Every key of the schema by its dotted name, in the order of the file."""
    notes = _notes()
    found = {}
    for group in dataclasses.fields(Config):
        schema = typing.get_type_hints(Config)[group.name]
        hints, defaults, on_resume = typing.get_type_hints(schema, include_extras=True), schema(), classes(schema)
        for field in dataclasses.fields(schema):
            key = f"{group.name}.{field.name}"
            note = notes.get((schema.__name__, field.name), "")
            found[key] = Entry(key, hints[field.name], getattr(defaults, field.name), note, on_resume[field.name])
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


def find(key: str) -> tuple[Entry, list[str]] | None:
    """The entry that a dotted key belongs to, and the names below it when it is of a mapping with free names; else None.

    Names of a mapping of single values may have dots themselves.
    """
    group, name, *below = key.split(".", 2) if key.count(".") else (key, "")
    entry = entries().get(f"{group}.{name}")
    if entry is None or not below:
        return None if entry is None else (entry, [])
    inner = bare(without_null(entry.hint)[0])[0]
    if typing.get_origin(inner) is not dict:
        return None
    return entry, below if typing.get_args(inner)[1] is not Any else below[0].split(".")


def entry_of(key: str) -> Entry | None:
    """The entry that a place such as `telemetry.profile_steps[1]` or `data.domain_weights.en` belongs to."""
    group, _, name = key.partition(".")
    return entries().get(f"{group}.{re.split('[.[]', name, maxsplit=1)[0]}")


@functools.cache
def path_keys() -> list[str]:
    """The keys that name a file or folder."""
    rules = {key: bare(without_null(entry.hint)[0])[1] for key, entry in entries().items()}
    return [key for key, found in rules.items() if any(isinstance(rule, PathText) for rule in found)]


def first_key(group: str) -> str:
    """A legal override of a key of the group."""
    return next(entry.example for key, entry in entries().items() if key.startswith(f"{group}."))


def groups() -> list[str]:
    """The names before the first dot."""
    return [field.name for field in dataclasses.fields(Config)]


def type_text(hint: Any) -> str:
    """A type and its rules in words."""
    hint, rules = bare(hint)
    options = typing.get_args(hint)
    if _is_union(hint):
        return " or ".join("null" if option is types.NoneType else type_text(option) for option in options)
    if typing.get_origin(hint) is list:
        return f"a list like [1,2] in which each item is {type_text(options[0])}"
    if typing.get_origin(hint) is dict:
        return f"a mapping like {{a:1,b:2}} in which each value is {type_text(options[1])}"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(hint.__members__)
    if dataclasses.is_dataclass(hint):
        return "a group of " + ", ".join(field.name for field in dataclasses.fields(hint))
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}.get(hint, "any value")
    return ", ".join([words, *(str(rule) for rule in rules if isinstance(rule, Range))])


def bare(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its rules, and these (see `recipes.rules`)."""
    if typing.get_origin(hint) is Annotated:
        return hint.__origin__, hint.__metadata__
    return hint, ()


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


@functools.cache
def without_null(hint: Any) -> tuple[Any, bool]:
    """The type of a value that is not null, and whether null is legal. The schemas only have unions with null."""
    if not _is_union(bare(hint)[0]):
        return hint, False
    (inner,) = (option for option in typing.get_args(bare(hint)[0]) if option is not types.NoneType)
    return inner, True


def show(value: Any, depth: int = 4) -> str:
    """A value as one writes it on the command line; long and deep ones in part."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict) and value and not depth:
        return "[...]" if isinstance(value, list) else "{...}"
    if isinstance(value, list):
        return (
            "[" + ",".join([show(item, depth - 1) for item in value[:_SHOWN]] + ["..."] * (len(value) > _SHOWN)) + "]"
        )
    if isinstance(value, dict):
        items = itertools.islice(value.items(), _SHOWN)
        pairs = [f"{show(key)}:{show(item, depth - 1)}" for key, item in items] + ["..."] * (len(value) > _SHOWN)
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"{'-' * (value < 0)}2^{value.bit_length() - 1}.."
    text = shown(str(value))
    return text if text and text == text.strip() else repr(text)


_SHOWN = 128  # items of a list or mapping


def unknown_key(key: str) -> str:
    """The message for a key that the schema does not have: what is near it, and what there is."""
    if key in REMOVED:
        return f"{key}: is no longer a key; {REMOVED[key]}"
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


def resume_table() -> str:
    """The class of every key on resume, as a Markdown table: a line for each group."""
    lines = ["| group | " + " | ".join(kind.name for kind in OnResume) + " |", "|---" * (1 + len(OnResume)) + "|"]
    for group in groups():
        keys: dict[OnResume, list[str]] = {kind: [] for kind in OnResume}
        for entry in entries().values():
            if entry.key.startswith(f"{group}."):
                keys[entry.on_resume].append(f"`{entry.key.partition('.')[2]}`")
        if group == "data":
            keys[OnResume.identity] += [f"the folder's `{key.partition('.')[2]}`" for key in (TOKENIZER, CONTENT)]
        lines.append(f"| `{group}` | " + " | ".join(", ".join(names) for names in keys.values()) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(resume_table())
