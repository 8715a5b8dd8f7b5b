"""Members of package archives, read in memory: wheels, npm and source tarballs, Debian packages, plain files.

Nothing is ever written: a member's name is only a label. A name that would leave the archive's folder is still an
error, because no honest package has one.
"""

import hashlib
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

MAX_MEMBER_BYTES = 128 * 2**20  # the largest pinned member, a database, has 86 MB

Member = tuple[str, bytes]


def read_members(path: Path, pattern: str = "") -> Iterator[Member]:
    """Yield ``(name, content)`` of the regular files whose names match ``pattern`` (``re.search``).

    Zip members come sorted by name, tar members in archive order. A folder yields its ``.py`` files, sorted.

    Raises:
        ValueError: an unreadable archive, an unsafe member name, or a member above ``MAX_MEMBER_BYTES``.
    """
    wanted = re.compile(pattern)
    try:
        if path.is_dir():
            yield from _folder_members(path, wanted)
        elif path.suffix in {".whl", ".zip"}:
            yield from _zip_members(path, wanted)
        elif path.suffix == ".deb":
            yield from _deb_members(path, wanted)
        elif path.name.endswith((".tar.gz", ".tgz")):
            with path.open("rb") as file:
                yield from _tar_members(path, file, wanted)
        else:
            yield path.name, path.read_bytes()
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path}: not a readable archive ({error}); delete it and run again") from error


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def members_sha256(members: Iterable[Member]) -> str:
    """SHA-256 over names and contents, for inputs that are no single file."""
    digest = hashlib.sha256()
    for name, content in members:
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _check(path: Path, name: str, size: int) -> None:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if ".." in parts or name.startswith(("/", "\\")) or (parts and parts[0].endswith(":")):
        raise ValueError(f"{path}: member name {name!r} leaves the archive; get the package from a trusted index")
    if size > MAX_MEMBER_BYTES:
        raise ValueError(f"{path}: member {name!r} has {size:,} bytes, the limit is {MAX_MEMBER_BYTES:,}")


def _zip_members(path: Path, wanted: re.Pattern[str]) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        for info in sorted(archive.infolist(), key=lambda info: info.filename):
            if not info.is_dir() and wanted.search(info.filename):
                _check(path, info.filename, info.file_size)
                yield info.filename, archive.read(info)


def _tar_members(path: Path, file: IO[bytes], wanted: re.Pattern[str]) -> Iterator[Member]:
    with tarfile.open(fileobj=file, mode="r|*") as archive:
        for info in archive:
            name = info.name.removeprefix("./")
            if info.isfile() and wanted.search(name):
                _check(path, name, info.size)
                content = archive.extractfile(info)
                assert content is not None  # extractfile returns None only for what is no regular file
                yield name, content.read()


def _deb_members(path: Path, wanted: re.Pattern[str]) -> Iterator[Member]:
    """A .deb is an ``ar`` archive (deb(5)): 60-byte headers, name in bytes 0-15, decimal size in 48-57."""
    with path.open("rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise ValueError(f"{path}: not a Debian package; delete it and run again")
        while len(header := file.read(60)) == 60:
            if header.startswith(b"data.tar"):
                yield from _tar_members(path, file, wanted)
                return
            size = int(header[48:58])
            file.seek(size + size % 2, os.SEEK_CUR)  # members start at even offsets
    raise ValueError(f"{path}: a Debian package without data.tar; delete it and run again")


def _folder_members(folder: Path, wanted: re.Pattern[str]) -> Iterator[Member]:
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and wanted.search(name):
            yield name, path.read_bytes()
