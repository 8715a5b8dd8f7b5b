"""What a value of the description may be, besides its type. A rule stands beside the type, in `typing.Annotated`.

    steps: Annotated[int, Range(1, MAX_COUNT)] = 1000     name: Annotated[str, Text(128, without="/")] = "pretrain"

`recipes.schema` reads the rules and applies them to every value, whether it comes from a command line, a YAML file or a checkpoint.
"""

from __future__ import annotations

import os
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from recipes.text import redact

MAX_COUNT = 2**31 - 1  # of things that are counted one by one: products of two or three of them are exact everywhere
MAX_LAYERS = 10_000
MAX_FACTOR = 1e9  # of coefficients: in fp32 they may be multiplied by whatever a run has


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `above`, `below`: the bound itself is not legal."""

    low: float
    high: float
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        return (value > self.low if self.above else value >= self.low) and (
            value < self.high if self.below else value <= self.high
        )

    def __str__(self) -> str:
        low, high = (str(bound) if isinstance(bound, int) else f"{bound:g}" for bound in (self.low, self.high))
        return f"{'above' if self.above else 'at least'} {low} and {'below' if self.below else 'at most'} {high}"


@dataclass(frozen=True)
class Text:
    """Text that is not blank, of at most `most` bytes in UTF-8, without control characters, passwords and those of `without`."""

    most: int = 256
    without: str = ""

    def problem(self, text: str) -> str | None:
        """What is wrong with `text`, as in "must not be empty"; None when it is legal."""
        if not text.strip():
            return "must not be empty"
        if any(unicodedata.category(character) == "Cs" for character in text):
            return "must be valid Unicode: some of its bytes are no UTF-8"
        if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in text):
            return "must not contain line breaks or other control characters"
        if len(text.encode()) > self.most:
            return f"must be at most {self.most} bytes long, not {len(text.encode())}"
        if redact(text) != text:
            return "must not contain a password or key, which would be stored and shown with the run"
        if found := [character for character in self.without if character in text]:
            return f"must not contain {' or '.join(repr(character) for character in found)}"
        return None


@dataclass(frozen=True)
class PathText(Text):
    """The path of a file or folder, below which a run has room for its own. `~` is the home folder, as in a shell."""

    most: int = 3072  # of PATH_MAX = 4096
    longest_name: int = 255  # NAME_MAX of every common file system

    def problem(self, text: str) -> str | None:
        if (found := super().problem(text)) is not None:
            return found
        if any(len(name.encode()) > self.longest_name for name in text.split("/")):
            return f"must have names of at most {self.longest_name} bytes between its slashes"
        return None


@dataclass(frozen=True)
class Length:
    """Lists and mappings of at most `most` items."""

    most: int

    def __str__(self) -> str:
        return f"at most {self.most} items"


Count = Annotated[int, Range(1, MAX_COUNT)]
CountOrNone = Annotated[int, Range(0, MAX_COUNT)]  # 0 has a meaning of its own
BatchSize = Annotated[int, Range(1, 2**24)]
Layers = Annotated[int, Range(1, MAX_LAYERS)]
Width = Annotated[int, Range(1, 2**24)]
Heads = Annotated[int, Range(1, 2**16)]
Experts = Annotated[int, Range(1, 2**16)]
GroupSize = Annotated[int, Range(1, 2**12)]  # ranks that share matrices, or stages
BucketSize = Annotated[int, Range(1, 2**40)]
Positive = Annotated[float, Range(1e-30, MAX_FACTOR)]  # what fp32 can hold
Factor = Annotated[float, Range(0.0, MAX_FACTOR)]
Share = Annotated[float, Range(0.0, 1.0)]
ShareAboveZero = Annotated[float, Range(0.0, 1.0, above=True)]
ShareBelowOne = Annotated[float, Range(0.0, 1.0, below=True)]
Folder = Annotated[str, PathText()]
FolderPart = Annotated[str, Text(128, without="/")]
Name = Annotated[str, Text(255)]
Label = Annotated[str, Text(128, without="/\\#?%:")]  # as W&B has it for the name of a project
Item = TypeVar("Item")
PerLayer = Annotated[list[Item], Length(MAX_LAYERS)]
Names = Annotated[list[Name], Length(4096)]
ByName = Annotated[dict[Name, Item], Length(4096)]


def user_path(text: str) -> Path:
    """The path that a user of the shell means: `~` and `~name` at its start are home folders, relative ones start here.

    Raises ValueError saying what no path can be.
    """
    if (problem := PathText().problem(text)) is not None:
        raise ValueError(problem)
    expanded = os.path.expanduser(text)  # pathlib would take ./~x for the home folder of x
    if text.startswith("~") and expanded == text:
        raise ValueError(f"{text.split('/')[0]} is no home folder; write ./{text} for a folder of that name")
    path = Path(expanded)
    if (problem := PathText().problem(str(path))) is not None:
        raise ValueError(problem)
    return path
