"""Pins every package that `make setup` installs, with hashes, in requirements.lock: from the ranges in pyproject.toml, by uv.

Versions stay as they are unless a range excludes them or they are named by --upgrade. Hashes are those of all files of a release,
for any platform. One version may have builds that lie on no index, such as torch's for CPUs: --also FILE adds the hash of one, and
what was added stays as long as the version does.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.arguments import Parser, file_path, refuse

LOCK = Path("requirements.lock")
_TOOLS = "pip\nsetuptools\n"  # what installs and builds the rest
_HEADER = """\
# Every package that `make setup` installs, and the SHA-256 of each file that may be taken for it. Made by `make lock` from
# pyproject.toml: do not edit. It constrains: what a marker excludes, or nothing needs (CUDA's packages, where torch is a build for
# CPUs), is not installed.
"""
_PIN = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>\S+)(?P<marker> ;[^\\\n]*?)?(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})+)$",
    re.M,
)
_HASH = re.compile(r"[0-9a-f]{64}")

Pins = dict[tuple[str, str, str], list[str]]  # name, version, marker (" ; ..." or "") -> hashes


def parse(text: str) -> Pins:
    """The pins of a lock file. Raises ValueError naming a line that is none."""
    found = {(m["name"], m["version"], m["marker"] or ""): _HASH.findall(m["hashes"]) for m in _PIN.finditer(text)}
    rest = [line for line in _PIN.sub("", text).splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if rest:
        raise ValueError(f"{LOCK}: {rest[0]!r:.100} is no pin with hashes")
    return found


def write(pins: Pins) -> str:
    """The text of a lock file."""
    lines = [_HEADER]
    for (name, version, marker), hashes in sorted(pins.items()):
        lines.append(
            " \\\n".join([f"{name}=={version}{marker}", *(f"    --hash=sha256:{each}" for each in hashes)]) + "\n"
        )
    return "".join(lines)


def joined(new: Pins, old: Pins, files: Sequence[Path]) -> Pins:
    """`new` with the hashes that `old` has of the same versions, and those of `files`.

    Raises ValueError for a file that is no wheel, or of a version that is not pinned.
    """
    kept = {key[:2]: hashes for key, hashes in old.items()}
    added: dict[tuple[str, str], list[str]] = {}
    for path in files:
        name, version, *_ = path.name.split("-")
        key = (
            re.sub(r"[-_.]+", "-", name).lower(),
            version.partition("+")[0],
        )  # +cpu: another build of the same version
        if path.suffix != ".whl" or not any(pin[:2] == key for pin in new):
            raise ValueError(f"--also {path}: no wheel of a version that is pinned")
        added.setdefault(key, []).append(hashlib.sha256(path.read_bytes()).hexdigest())
    return {key: sorted({*hashes, *kept.get(key[:2], []), *added.get(key[:2], [])}) for key, hashes in new.items()}


def compiled(uv: Path, upgrade: Sequence[str]) -> str:
    """What uv makes of pyproject.toml, starting from the versions that are pinned now. Raises CalledProcessError."""
    command = [
        str(uv),
        "pip",
        "compile",
        "pyproject.toml",
        "-",
        "--extra",
        "dev",
        "--universal",
        "--python-version",
        "3.11",
    ]
    command += [
        "--generate-hashes",
        "--no-annotate",
        "--no-header",
        "--system-certs",
        "--quiet",
        "--output-file",
        str(LOCK),
    ]
    command += ["--upgrade"] if "all" in upgrade else [f"--upgrade-package={name}" for name in upgrade]
    return subprocess.run(
        command, input=_TOOLS, text=True, check=True, capture_output=True, env=_without_indexes()
    ).stdout


def _without_indexes() -> dict[str, str]:
    """The environment without indexes and folders that only this machine has."""
    return {key: value for key, value in os.environ.items() if not re.match(r"UV_.*(INDEX|FIND_LINKS)", key)}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 on bad input; 1 when uv finds no versions that go together."""
    parser = Parser("python -m tools.lock", description=__doc__)
    parser.add_argument("--uv", type=file_path, required=True, help="the program uv")
    parser.add_argument(
        "--upgrade", nargs="*", default=[], metavar="NAME", help="packages to take the newest version of, or: all"
    )
    parser.add_argument(
        "--also", nargs="*", type=file_path, default=[], metavar="FILE", help="wheels whose hash is allowed too"
    )
    arguments = parser.parse_args(argv)
    try:
        before = LOCK.read_text() if LOCK.exists() else ""
        old = parse(before)
        try:
            compiled(arguments.uv, arguments.upgrade)
            LOCK.write_text(write(joined(parse(LOCK.read_text()), old, arguments.also)))
        except BaseException:
            LOCK.write_text(before)
            raise
    except (ValueError, OSError) as error:
        return refuse(error)
    except subprocess.CalledProcessError as error:
        print(f"error: uv: {error.stderr.strip()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
