"""Command lines of the tools: each mistake is one message with exit code 2, and a path means what it means to a shell."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from recipes.rules import MAX_COUNT, Range, user_path
from recipes.text import error_line, shown


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are told in one line, like all others."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave with exit code 2."""
        message = re.sub(r"^argument ([^:]+): (?=.*: must )", r"\1 ", message, flags=re.DOTALL)
        line = error_line(message if len(message) < 2000 else f"{message[:2000]}...").replace("\n", "\\n")
        self.exit(2, f"{line}; see {self.prog} --help\n")


def file_path(text: str) -> Path:
    """The path of a file or folder, as `recipes.rules.user_path` has it."""
    try:
        return user_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text) or repr(text)}: {error}") from error


def file_name(text: str) -> str:
    """`file_path` as text."""
    return str(file_path(text))


def unicode_text(value: str) -> str:
    """Text that can be stored: line breaks are welcome, bytes that are no UTF-8 are not."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(
            f"{shown(value)}: must be valid Unicode: some of its bytes are no UTF-8"
        ) from error
    return value


def integer(least: int = 0, most: int = MAX_COUNT) -> Callable[[str], int]:
    """A parser of integers from `least` to `most`."""
    legal = Range(least, most)

    def parsed(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,30}", text, re.ASCII):
            raise argparse.ArgumentTypeError(f"{shown(text) or repr(text)}: must be an integer, {legal}")
        if int(text) not in legal:
            raise argparse.ArgumentTypeError(f"{text}: must be {legal}")
        return int(text)

    return parsed


def number(low: float, high: float, above: bool = False) -> Callable[[str], float]:
    """A parser of numbers from `low` (or above it) to `high`."""
    legal = Range(low, high, above=above)

    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if value not in legal:
            raise argparse.ArgumentTypeError(f"{shown(text) or repr(text)}: must be a finite number, {legal}")
        return value

    return parsed


def refuse(error: Exception) -> int:
    """Tell a mistake of the user; returns the exit code 2."""
    print(error_line(error), file=sys.stderr)
    return 2
