"""Files that nobody vouches for: read only if regular, parsed as strict JSON, and written without following a link.

open_regular, read_small, parse_json      reading; what does not fit is a ValueError that names the file
replace_bytes, replace_text               a whole file, old or new at any moment; a link at its place is replaced, not followed
open_append, own_folder                   a file that grows, a folder to write into; a link at their place is refused
"""

import io
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

MAX_DEPTH = 64  # of JSON; ours nests at most ten deep


@contextmanager
def open_regular(path: Path) -> Iterator[io.FileIO]:
    """Open a regular file for reading; ValueError naming the path for a missing file, a link, a pipe, a folder."""
    try:
        # Opening refuses a link and waits for no pipe's writer; on network disks it also refreshes the size.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: is missing") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read as a regular file ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: is not a regular file")
    with open(descriptor, "rb", buffering=0) as file:
        yield file


def read_small(path: Path, limit: int) -> bytes:
    """The whole file, which must be regular and have at most `limit` bytes."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise ValueError(f"{path}: {size} bytes, more than the limit of {limit}")
        return file.read(limit)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for all that strict JSON lacks (NaN, numbers that become infinite) and for
    nesting deeper than MAX_DEPTH, which would exhaust the stack of whoever walks through it."""
    try:
        value = json.loads(text, parse_constant=_not_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inside = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in inside if isinstance(item, dict | list)]
    if level:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        _not_finite(text)
    return value


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text:.40} is no finite number")


def replace_bytes(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that a reader, or a crash at any moment, sees the old file or the new one, never a part.

    A link at `path` is replaced; what it points to stays as it is.

    Raises:
        OSError: the folder is missing, full or not writable; `path` is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # a rename is atomic only within one file system
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:  # creates; follows no link that was put there
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """`replace_bytes` of UTF-8."""
    replace_bytes(path, text.encode())


def open_append(path: Path) -> TextIO:
    """Open a text file to write behind its end, made if need be. Raises ValueError naming a link, a pipe, a folder."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if not (path.is_symlink() or path.exists()):
            raise
        raise ValueError(f"{path}: {_kind(path)}; move it away ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: {_kind(path)}; move it away")
    return open(descriptor, "a", encoding="utf-8")


def own_folder(path: Path, make: bool = True) -> Path:
    """Make the folder `path`, with those above it, unless it is there; returns it. ValueError for a link or a file, so that
    nothing is written outside the folder that it lies in. `make` false: only look."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ValueError(f"{path}: {_kind(path)}; move it away, or link the whole run folder instead")
    if make:
        path.mkdir(parents=True, exist_ok=True)
    return path


def _kind(path: Path) -> str:
    if path.is_symlink():
        return "is a link, which is not written through"
    return "cannot be written" if path.is_file() else "is not a regular file" if not path.is_dir() else "is a folder"
