"""Plain values -> a description that keeps every rule of the schema, or all problems at once.

    nested dicts, lists, numbers, text (command line, YAML, JSON of a checkpoint) -> check_description() -> Config

The values are not trusted: types, ranges, lengths and depth are checked before anything is computed from them, and messages show
them in part only. Whether the values fit each other is `recipes.validation`'s concern.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import re
import sys
import typing
from collections.abc import Container
from typing import Any, TypeVar

import yaml

from recipes import schema
from recipes.config import Config, to_plain
from recipes.rules import Length, Range, Text

Record = TypeVar("Record")
MISSING = "???"  # OmegaConf's mark of a value that somebody has to fill in
MAX_SHOWN = 20  # problems in one message
MAX_DEPTH, MAX_ITEMS = 16, 10_000  # of values that have no type of their own (`deepspeed.extra`)
# Keys that descriptions written before them lack; their default is what was done then.
LATER = frozenset({"run.resume_with", "checkpoint.load", "checkpoint.save_interval_minutes"})


def check_description(plain: Any, *, complete: bool = True) -> Config:
    """The description that `plain` (nested dicts, as `config.to_plain` makes them) holds.

    `complete`: every key must be there; else those left out have their defaults. Keys of earlier versions are passed over. Raises
    ValueError with one message that names every key that is unknown, missing, of another type or out of range.
    """
    config, found = read_description(plain, complete=complete, earlier=True)
    if found:
        raise ValueError(one_message(found))
    return config


def read_description(plain: Any, *, complete: bool = True, earlier: bool = False) -> tuple[Config, list[str]]:
    """As `check_description`, with the problems as a list; what has a problem has its default in the description."""
    reader = _Reader(complete, schema.REMOVED if earlier else ())
    config = reader.group(Config, plain, "")
    return config if isinstance(config, Config) else Config(), reader.found


def read_record(kind: type[Record], plain: Any) -> Record:
    """An instance of the dataclass `kind`, any, from plain values; keys that it does not have are passed over.

    Raises ValueError with one message that names every key that is missing or of another type.
    """
    if not isinstance(plain, dict):
        raise ValueError(f"must be a mapping, not {schema.show(plain)}")
    reader = _Reader(complete=True)
    record = reader.record(kind, plain, "")
    if reader.found:
        raise ValueError(one_message(reader.found))
    return record


def to_yaml(config: Config) -> str:
    """The description as YAML, from which every reader gets text back where there was text.

    YAML 1.2, and OmegaConf, take `1e5` for a number where YAML 1.1 does not: it is written in quotes, too.
    """
    return yaml.dump(to_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    pass


_NUMBER = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|0o[0-7]+|[-+]?\.?(inf|nan)", re.IGNORECASE)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^(?:{_NUMBER.pattern})$", re.IGNORECASE), None)


def read_value(hint: Any, value: Any, key: str) -> list[str]:
    """The problems of a single value of type `hint`."""
    reader = _Reader(complete=True)
    reader.value(hint, value, key)
    return reader.found


def one_message(problems: list[str]) -> str:
    """All problems as the text of one error."""
    more = [f"and {len(problems) - MAX_SHOWN} more"] * (len(problems) > MAX_SHOWN)
    if len(problems) == 1:
        return problems[0]
    return "\n  - ".join([f"{len(problems)} problems", *problems[:MAX_SHOWN], *more])


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Types of the fields of a dataclass, with their rules."""
    return typing.get_type_hints(kind, include_extras=True)


class _Reader:
    def __init__(self, complete: bool, earlier: Container[str] = ()):
        self.complete, self.earlier, self.items = complete, earlier, 0
        self.found: list[str] = []

    def group(self, kind: Any, value: Any, key: str) -> Any:
        """An instance of the dataclass `kind`."""
        if not isinstance(value, dict):
            ways_out = f"set one of its keys, as in {schema.first_key(key)}" if key else "its groups are needed"
            self.found.append(
                f"{key or 'description'}={schema.show(value)}: is a group of settings, not a value; {ways_out}"
            )
            return kind()
        hints, prefix, read = _hints(kind), f"{key}." if key else "", {}
        unknown = (name for name in value if name not in hints and f"{prefix}{name}" not in self.earlier)
        for name in itertools.islice(unknown, MAX_SHOWN):
            self.found.append(schema.unknown_key(f"{prefix}{schema.show(name)}"))
        for name, hint in hints.items():
            full = f"{prefix}{name}"
            if name in value:
                method = self.group if dataclasses.is_dataclass(hint) else self.entry
                read[name] = method(hint, value[name], full)
            elif self.complete and full not in LATER:
                self.found.append(f"{full}: is missing")
        return kind(**read)

    def record(self, kind: Any, value: dict, key: str) -> Any:
        """An instance of any dataclass; None when the value has a problem."""
        hints, before, prefix = _hints(kind), len(self.found), f"{key}." if key else ""
        needed = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
        self.found += [f"{prefix}{name}: is missing" for name in needed if name not in value]
        read = {name: self.value(hint, value[name], f"{prefix}{name}") for name, hint in hints.items() if name in value}
        return kind(**read) if len(self.found) == before else None

    def entry(self, hint: Any, value: Any, key: str) -> Any:
        """The value of one key; its default when it is not legal."""
        before = len(self.found)
        read = self.value(hint, value, key)
        return read if len(self.found) == before else schema.entries()[key].fresh_default()

    def value(self, hint: Any, value: Any, key: str) -> Any:
        """A value of type `hint`, at `key`, which may be a place in a list or mapping."""
        inner, optional = schema.without_null(hint)
        if value is None and optional:
            return None
        if isinstance(value, str) and value == MISSING:
            self.found.append(f"{key}={MISSING}: marks a value that is missing; give one, {self._example(key)}")
            return None
        kind, rules = schema.bare(inner)
        options = typing.get_args(kind)
        if kind is Any:
            return self.anything(value, key, 1)
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            return self.record(kind, value, key)
        if typing.get_origin(kind) in (list, dict) and isinstance(value, typing.get_origin(kind)):
            return self._collection(value, options, rules, key)
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            if isinstance(value, str) and value in kind.__members__:
                return kind[value]
        elif type(value) is kind or (kind is float and type(value) is int):
            return self._scalar(kind, value, rules, key)
        self.found.append(f"{key}={schema.show(value)}: must be {schema.type_text(hint)}{self._about(key)}")
        return None

    def _collection(self, value: Any, options: tuple[Any, ...], rules: tuple[Any, ...], key: str) -> Any:
        for rule in rules:
            if isinstance(rule, Length) and len(value) > rule.most:
                self.found.append(f"{key} has {len(value)} items; it must have {rule}")
                return None
        if isinstance(value, list):
            return [self.value(options[0], item, f"{key}[{place}]") for place, item in enumerate(value)]
        return {
            self._name(options[0], n, key): self.value(options[1], v, f"{key}.{schema.show(n)}")
            for n, v in value.items()
        }

    def _name(self, hint: Any, name: Any, key: str) -> Any:
        _, rules = schema.bare(hint)
        if type(name) is not str:
            self.found.append(f"{key}: {schema.show(name)} must be text; write it in quotes")
        elif problem := next((found for rule in rules if (found := rule.problem(name))), None):
            self.found.append(f"{key}: the name {schema.show(name)} {problem}")
        return name

    def _scalar(self, kind: Any, value: Any, rules: tuple[Any, ...], key: str) -> Any:
        for rule in rules:
            problem = None
            if isinstance(rule, Range) and value not in rule:
                finite = isinstance(value, int) or math.isfinite(value)
                problem = f"must be {'' if finite else 'finite, '}{rule}"
            elif isinstance(rule, Text):
                problem = rule.problem(value)
            if problem is not None:
                self.found.append(f"{key}={schema.show(value)} {problem}{self._about(key)}")
                return None
        if (
            kind is float and not abs(value) <= sys.float_info.max
        ):  # infinite, no number, or an integer beyond all floats
            self.found.append(f"{key}={schema.show(value)} must be finite{self._about(key)}")
            return None
        return float(value) + 0.0 if kind is float else value  # + 0.0: no negative zero

    def anything(self, value: Any, key: str, depth: int) -> Any:
        """A value of any type that JSON has."""
        self.items += 1
        if depth > MAX_DEPTH or self.items > MAX_ITEMS:
            limit = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_ITEMS} values"
            if not self.found or not self.found[-1].endswith(limit):
                self.found.append(f"{'.'.join(key.split('.')[:2])}: must not have more than {limit}")
        elif isinstance(value, dict):
            return {
                self._name(str, n, key): self.anything(v, f"{key}.{schema.show(n)}", depth + 1)
                for n, v in value.items()
            }
        elif isinstance(value, list):
            return [self.anything(item, f"{key}[{place}]", depth + 1) for place, item in enumerate(value)]
        elif isinstance(value, str):
            if value and (problem := Text(4096).problem(value)):
                self.found.append(f"{key}={schema.show(value)} {problem}")
        elif not (value is None or isinstance(value, bool | int | float)):
            self.found.append(
                f"{key}={schema.show(value)}: must be text, a number, true, false, null, a list or a mapping"
            )
        elif value is not None and value not in Range(-(2**63), 2**63 - 1):  # NaN is in no range
            self.found.append(f"{key}={schema.show(value)} must be finite and fit into 64 bits")
        return value

    def _about(self, key: str) -> str:
        entry = schema.entry_of(key)
        if entry is None:  # of a record, or of the keys of a mapping
            return ""
        note = f" ({entry.note})" if entry.note else ""
        return f"{note}; {self._example(key)}"

    def _example(self, key: str) -> str:
        entry = schema.entry_of(key)
        return "" if entry is None else f"for example {entry.example}"
