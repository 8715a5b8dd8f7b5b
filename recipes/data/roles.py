"""Which tokens have a role (BOS, EOS, PAD, UNK ...), by whatever file beside a tokenizer names them.

    tokenizer_config.json, special_tokens_map.json     "eos_token": "</s>" or {"content": "</s>"}; lists of special tokens
    generation_config.json, config.json                "eos_token_id": 2 or [2, 7]

For each role the first of these files that has its key decides, null included; every token that any of them names is
special, so that text must never become its id.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.files import parse_json

ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
ROLE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_MAX_BYTES = 1 << 26  # of one of these files


@dataclass(frozen=True)
class Roles:
    """What the files beside a tokenizer say.

    ids: role -> its id, None where a file says that there is none; special: every id named, with its spelling;
    files: those that name any.
    """

    ids: dict[str, int | None] = field(default_factory=dict)
    special: dict[int, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)


def read_roles(folder: Path, to_id: Callable[[str], int | None], to_token: Callable[[int], str | None]) -> Roles:
    """The roles named by the files in `folder`; `to_id`, `to_token`: the tokenizer's vocabulary, None for what is not in it.

    Raises ValueError naming the file for what is not JSON, a value of a wrong type, and an EOS that the tokenizer lacks.
    """
    roles = Roles()
    for path in (folder / name for name in ROLE_FILES):
        if not path.is_file():
            continue
        values = _read_object(path)
        found = False
        for role in ROLES:
            for key in (f"{role}_token", f"{role}_token_id"):
                if key not in values:
                    continue
                tokens = _tokens(values[key], f"{path}: {key}")
                known = [_lookup(token, to_id, to_token) for token in tokens]
                if role == "eos" and role not in roles.ids and known and known[0] is None:
                    raise ValueError(
                        f"{path}: {key}={tokens[0]!r} is not in the tokenizer's vocabulary; name one that is"
                    )
                named = [pair for pair in known if pair is not None]
                roles.ids.setdefault(role, named[0][0] if named else None)
                roles.special.update(named)
                found = True
        for token in _special_tokens(values, path):
            pair = _lookup(token, to_id, to_token)
            if pair is not None:
                roles.special.update([pair])
                found = True
        if found:
            roles.files.append(path)
    return roles


def _read_object(path: Path) -> dict[str, Any]:
    if (size := path.stat().st_size) > _MAX_BYTES:
        raise ValueError(f"{path}: {size} bytes, more than the limit of {_MAX_BYTES}")
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _tokens(value: Any, where: str) -> list[str | int]:
    """The tokens that one value names: a spelling, an object with one under "content", an id, or a list of those."""
    tokens: list[str | int] = []
    for item in value if isinstance(value, list) else [value]:
        token = item.get("content") if isinstance(item, dict) else item
        if not isinstance(token, str | None) and type(token) is not int:
            raise ValueError(f'{where} is {value!r:.80}; write a token, an object with its "content", an id, or a list')
        if token is not None and token != -1:  # -1 is written for "none"
            tokens.append(token)
    return tokens


def _special_tokens(values: dict[str, Any], path: Path) -> Sequence[str | int]:
    """Spellings in the lists of special tokens, and ids in `added_tokens_decoder` whose tokens are flagged special."""
    found: list[str | int] = []
    for key in _LISTS:
        listed = values.get(key)
        found += _tokens(list(listed.values()) if isinstance(listed, dict) else listed, f"{path}: {key}")
    decoder = values.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and token.get("special") is True and number.isdecimal():
            found.append(int(number[:12]))
    return found


def _lookup(
    token: str | int, to_id: Callable[[str], int | None], to_token: Callable[[int], str | None]
) -> tuple[int, str] | None:
    """(id, spelling) of a token given by either; None where the vocabulary has none."""
    if isinstance(token, str):
        index = to_id(token)
        return None if index is None else (index, token)
    spelling = to_token(token) if token >= 0 else None
    return None if spelling is None else (token, spelling)
