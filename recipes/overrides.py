"""Overrides of the command line -> keys and values, each read as the schema's type of its key says.

    "run.dir=2024_01_02"            -> Setting("run.dir", (), "2024_01_02")        text keeps the characters typed
    "data.domain_weights={2023:1}"  -> Setting("data.domain_weights", (), {"2023": 1})
    {"run": {"name": "${run.seed}"}} -> resolve -> {"run": {"name": "1234"}}       references to other keys, and nothing else

What a type cannot be made from stays text, which `recipes.description` refuses by name. `written` is the way back.
"""

from __future__ import annotations

import enum
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes import schema

MAX_DEPTH = 32  # of brackets within brackets
MAX_DIGITS = 64  # of a number
_QUOTES = "'\""
_INTEGER = re.compile(r"[+-]?\d+(_\d+)*", re.ASCII)
_FLOAT = re.compile(r"[+-]?((\d+(_\d+)*\.?\d*|\.\d+)(e[+-]?\d+)?|inf|nan)", re.ASCII | re.IGNORECASE)
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")  # names that need no quotes
MAX_TEXT = 2**16  # characters that a text with references may come to
_REFERENCE = re.compile(r"(\\*)\$\{([^{}]*)(\}?)")


@dataclass(frozen=True)
class Setting:
    """One override. `below`: names inside the mapping that `key` is. `delete`: take that away instead of setting it."""

    key: str
    below: tuple[str, ...]
    value: Any = None
    delete: bool = False

    def apply(self, plain: dict[str, Any]) -> None:
        """Change a description of plain values; mappings are merged, as Hydra does."""
        group, _, name = self.key.partition(".")
        *path, last = (name, *self.below)
        at = plain[group]
        if not isinstance(at, dict):  # a file made it so, which is found out with all else
            return
        for part in path:
            if not isinstance(at.get(part), dict):
                at[part] = {}
            at = at[part]
        if self.delete:
            if last not in at:
                raise ValueError(
                    f"~{self.key}.{'.'.join(self.below)}: not there; there are {', '.join(map(schema.show, at)) or 'none'}"
                )
            del at[last]
        elif isinstance(self.value, dict) and isinstance(at.get(last), dict):
            at[last] = _merged(at[last], self.value)
        else:
            at[last] = self.value


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(old[name], value)
        for name, value in new.items()
        if isinstance(old.get(name), dict) and isinstance(value, dict)
    }
    return {**old, **new, **both}


def split(override: str) -> tuple[str, str, str | None]:
    """Sign (`+`, `++`, `~` or none), key and text of an override; no text is None. Raises ValueError for what is none."""
    match = re.fullmatch(r"(\+\+|\+|~)?([^=\s+~][^=\s]*)(?:=(.*))?", override, re.DOTALL)
    if match is None or (match[3] is None and match[1] != "~"):
        shown = schema.show(override) if override.strip() else repr(override)
        raise ValueError(f"{shown!r}: not an override; write key=value, or group=option, as in train.steps=100")
    return match[1] or "", match[2], match[3]


def read(override: str) -> Setting:
    """The setting of a key. Raises ValueError, with what is legal and a way out, for unknown keys and unreadable values."""
    sign, key, text = split(override)
    shown = schema.show(override)
    found = schema.find(key)
    if found is None:
        if key in schema.groups():
            raise ValueError(
                f"{shown}: is a group of settings, not a value; set one of its keys, as in {schema.first_key(key)}"
            )
        raise ValueError(schema.unknown_key(schema.show(key)))
    entry, below = found
    if sign == "~":
        if not below:
            raise ValueError(
                f"{shown}: deletion of a key; every key has a value, so set it instead, as in {entry.example}"
            )
        if text is not None:
            raise ValueError(f"{shown}: ~ takes a name away and has no value; write ~{schema.show(key)}")
        return Setting(entry.key, tuple(below), delete=True)
    if sign == "+" and not below:
        raise ValueError(f"{shown}: the key exists already; leave out the +, as in {key}={schema.show(text)}")
    hint = schema.without_null(entry.hint)[0] if below else entry.hint
    if below:
        hint = typing.get_args(schema.bare(hint)[0])[1]
    assert text is not None
    try:
        return Setting(entry.key, tuple(below), value(hint, text))
    except _Unreadable as error:
        hint_ = "check brackets and quotes, and put the whole override in single quotes for the shell"
        raise ValueError(f"{shown}: the value cannot be read: {error}; {hint_}") from error


class _Unreadable(Exception):
    """Why a value cannot be read."""


def value(hint: Any, text: str) -> Any:
    """The value of type `hint` that `text` means; the text itself when it means none."""
    kind = schema.bare(schema.without_null(hint)[0])[0]
    opening = text.lstrip()[:1]
    if (kind is Any and opening in ("[", "{")) or (typing.get_origin(kind) in (list, dict) and opening in ("[", "{")):
        return _Reader(text).whole(hint)
    whole = _unquoted(text)
    if whole is not None:
        return _scalar(hint, whole, quoted=True)
    return _scalar(hint, text if kind is str else text.strip(), quoted=False)


def _unquoted(text: str) -> str | None:
    """The inside of a text that is in quotes from end to end; None for another."""
    mark = text[:1]
    if mark not in _QUOTES or not mark or not re.fullmatch(rf"{mark}(?:[^{mark}\\]|\\.)*{mark}", text, re.DOTALL):
        return None
    return re.sub(r"\\([\\'\"])", r"\1", text[1:-1])


def _scalar(hint: Any, text: str, quoted: bool) -> Any:
    """A value without parts."""
    inner, optional = schema.without_null(hint)
    kind = schema.bare(inner)[0]
    if not quoted and (optional or kind is Any) and (text == "null" or (kind is not str and text.lower() == "null")):
        return None
    if kind is str or quoted or "${" in text or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return text
    if kind in (bool, Any) and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind in (int, float, Any) and len(text) <= MAX_DIGITS:
        if _INTEGER.fullmatch(text):
            return int(text)
        if kind is not int and _FLOAT.fullmatch(text):
            return float(text)
    return text


class _Reader:
    """Lists and mappings in brackets: `[a,b]`, `{a:1,b:[2,3]}`, with quotes where a text has the characters of the notation."""

    def __init__(self, text: str):
        self.text, self.at, self.depth = text, 0, 0

    def whole(self, hint: Any) -> Any:
        read = self._value(hint)
        self._skip()
        if self.at < len(self.text):
            raise _Unreadable(f"{schema.show(self.text[self.at :])} follows its end")
        return read

    def _skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def _next(self) -> str:
        self._skip()
        return self.text[self.at : self.at + 1]

    def _value(self, hint: Any) -> Any:
        kind = schema.bare(schema.without_null(hint)[0])[0]
        options, opening = typing.get_args(kind), self._next()
        if opening not in ("[", "{"):
            text, quoted = self._token(",]}")
            return _scalar(hint, text, quoted)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Unreadable(f"more than {MAX_DEPTH} brackets are open")
        self.at += 1
        read: Any
        if opening == "[":
            read = self._list(options[0] if typing.get_origin(kind) is list else Any)
        else:
            read = self._mapping(options[1] if typing.get_origin(kind) is dict else Any)
        self.depth -= 1
        return read

    def _list(self, hint: Any) -> list[Any]:
        read: list[Any] = []
        while self._next() != "]" or read:
            read.append(self._value(hint))
            if self._end("]"):
                return read
        self.at += 1
        return read

    def _mapping(self, hint: Any) -> dict[str, Any]:
        read: dict[str, Any] = {}
        while self._next() != "}" or read:
            name, _ = self._token(":,]}")
            if self._next() != ":":
                raise _Unreadable(f"a colon must follow the name {schema.show(name)}")
            self.at += 1
            if name in read:
                raise _Unreadable(f"the name {schema.show(name)} is given twice")
            read[name] = self._value(hint)
            if self._end("}"):
                return read
        self.at += 1
        return read

    def _end(self, closing: str) -> bool:
        """Whether a list or mapping ends here; else a comma is passed."""
        found = self._next()
        if found not in (closing, ","):
            raise _Unreadable(
                f"{schema.show(found)} stands where a comma or {closing} must" if found else f"{closing} is missing"
            )
        self.at += 1
        return found == closing

    def _token(self, ends: str) -> tuple[str, bool]:
        """A text up to one of `ends`, which is not taken, and whether it was in quotes."""
        self._skip()
        if match := re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL).match(self.text, self.at):
            self.at = match.end()
            return _unquoted(match[0]) or "", True
        # References are passed over as a whole, and a backslash takes its meaning from what follows.
        pattern = re.compile(rf"(?:\\.|\$\{{[^{{}}]*\}}|[^\\{re.escape(ends)}])*", re.DOTALL)
        match = pattern.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return re.sub(r"\\([\\,:\[\]{}'\" ])", r"\1", match[0].strip()), False


def written(key_or_value: Any) -> str:
    """A value as `read` takes it for any key that has such values: text in quotes, so that no character means anything."""
    value = key_or_value
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{name if _PLAIN.fullmatch(name) else _quoted(name)}:{written(v)}" for name, v in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, str):
        return _quoted(re.sub(r"(\\*)\$\{", r"\1\1\\${", value))
    return (
        value.name
        if isinstance(value, enum.Enum)
        else "null"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else repr(value)
    )


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def resolve(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a description in which references such as `${run.seed}` are replaced by the value of that key.

    Nothing else can be referred to: what the environment, files or programs hold never gets into a description, which is stored
    and shown. Raises ValueError naming the place.
    """
    return _References(plain).resolved()


class _References:
    def __init__(self, plain: Mapping[str, Any]):
        self.plain = plain
        self.known: dict[str, Any] = {}  # values by key, so that each is looked up once
        self.above: list[str] = []  # keys that are being looked up

    def resolved(self) -> dict[str, Any]:
        return {
            group: {name: self._item(item, f"{group}.{name}") for name, item in keys.items()}
            if isinstance(keys, dict)
            else keys
            for group, keys in self.plain.items()
        }

    def _item(self, item: Any, place: str) -> Any:
        if isinstance(item, dict):
            return {name: self._item(part, f"{place}.{schema.show(name)}") for name, part in item.items()}
        if isinstance(item, list):
            return [self._item(part, f"{place}[{number}]") for number, part in enumerate(item)]
        if not isinstance(item, str) or "${" not in item:
            return item
        match, entry = _REFERENCE.fullmatch(item), schema.entries().get(place)
        if match and not match[1]:
            found = self._look_up(match, place, item)
            text_key = entry is not None and schema.bare(schema.without_null(entry.hint)[0])[0] is str
            return schema.show(found) if text_key and isinstance(found, bool | int | float) else found

        def text(match: re.Match[str]) -> str:
            slashes = match[1][: len(match[1]) // 2]
            if len(match[1]) % 2:
                return f"{slashes}${{{match[2]}{match[3]}"
            found = self._look_up(match, place, item)
            return slashes + (found if isinstance(found, str) else schema.show(found))

        replaced = _REFERENCE.sub(text, item)
        if len(replaced) > MAX_TEXT:
            shown = f"{place}={schema.show(item)}"
            raise ValueError(f"{shown}: more than {MAX_TEXT} characters with its references replaced; use fewer")
        return replaced

    def _look_up(self, match: re.Match[str], place: str, item: str) -> Any:
        """The value that a reference stands for."""
        name, shown = match[2].strip(), f"{place}={schema.show(item)}"
        if ":" in name:
            kind = schema.show(name.partition(":")[0])
            reason = "what the environment, files or programs hold would be stored with the run"
            raise ValueError(
                f"{shown}: the resolver {kind} is not offered: {reason}; write the value, or ${{group.key}}"
            )
        if not match[3]:
            raise ValueError(f"{shown}: ${{ begins a reference, as in ${{run.seed}}; write \\${{ for these characters")
        group, _, key = name.partition(".")
        keys = self.plain.get(group)
        if name not in schema.entries() or not isinstance(keys, dict):
            raise ValueError(f"{shown}: '{schema.show(name)}' not found; a reference names a key, as in ${{run.seed}}")
        if name in self.above:
            raise ValueError(f"{shown}: refers to itself, by way of {', '.join(self.above)}")
        if name not in self.known:
            self.above.append(name)
            self.known[name] = self._item(keys.get(key), name)
            self.above.pop()
        if isinstance(self.known[name], list | dict):
            raise ValueError(f"{shown}: {name} is a list or mapping; a reference names a single value")
        return self.known[name]
