"""Compiled libraries, kept in a folder of the user that nobody else can write to.

    key of source, flags and machine -> cached -> the library, compiled now if need be -> loadable -> a path to load it by

A file's name has the key and the SHA-256 of its content, so that one that was cut off or changed is not taken for the library. It
is loaded from memory: what happens to the file afterwards, or between the check and the loading, changes nothing.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

_MAX_BYTES = 1 << 24  # of a library; ours has 100 kB
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Below XDG_CACHE_HOME, or ~/.cache. Raises OSError for a path that is not absolute, RuntimeError without a home."""
    home = os.environ.get("HOME")
    base = Path(os.environ.get("XDG_CACHE_HOME") or (Path.home() if home is None else Path(home)) / ".cache")
    if not base.is_absolute():
        raise OSError(f"{base}: a cache folder must be an absolute path")
    return base / "sparse-pretraining-recipes"


def private(folder: Path) -> Path:
    """The folder, made if need be, for this user alone. Raises OSError for a link, and for what others own or can write to."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise OSError(f"{folder} belongs to user {found.st_uid}, not to {os.geteuid()}")
        if found.st_mode & _OTHERS_WRITE:
            raise OSError(f"{folder} can be written by others (mode {stat.S_IMODE(found.st_mode):o}); remove it")
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return folder


def cached(folder: Path, key: str, compile_to: Callable[[Path], None]) -> tuple[Path, bytes]:
    """Where the library `key` lies in `folder`, and its content; `compile_to` writes it to a path if it is not there.

    Raises OSError for a folder that is not `private` or cannot be written, and what `compile_to` raises.
    """
    private(folder)
    for path in sorted(folder.glob(f"{key}-*.so")):
        if (library := _read(path)) is not None and path.name == _name(key, library):
            return path, library
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch, f"{key}.so")
        compile_to(made)
        made.chmod(0o600)
        library = made.read_bytes()
        path = made.replace(folder / _name(key, library))  # at once: another process may do the same at this moment
    return path, library


def _name(key: str, library: bytes) -> str:
    return f"{key}-{hashlib.sha256(library).hexdigest()}.so"


def _read(path: Path) -> bytes | None:
    """The content of a regular file that this user alone can write; None for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        mine = found.st_uid == os.geteuid() and found.st_nlink == 1 and not found.st_mode & _OTHERS_WRITE
        if not stat.S_ISREG(found.st_mode) or not mine or found.st_size > _MAX_BYTES:
            return None
        return file.read(_MAX_BYTES)


def loadable(library: bytes) -> Path:
    """A path by which this process can load exactly these bytes, as long as it lives. Raises OSError where that cannot be."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no files in memory to load a library from")
    descriptor = os.memfd_create("library")  # kept open: the loader knows libraries by their paths
    with open(descriptor, "wb", closefd=False) as file:
        file.write(library)
    return Path(f"/proc/self/fd/{descriptor}")
