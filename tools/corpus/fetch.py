"""Get a pinned package file through its own client and check its SHA-256.

The clients run as the user configured them (index, proxy, mirror); this module names no host. Only files that passed
the check get their final name in the cache, so a killed run leaves nothing to be mistaken for a package.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tools.corpus.archives import file_sha256
from tools.corpus.table import FALLBACK_DIR, Package

CLIENT_TIMEOUT_SECONDS = 300


class UnavailableError(Exception):
    """The package cannot be had here (no network, no client, version gone); the message says why in one line."""


def standard_library() -> Path:
    """The folder of the running interpreter's own modules."""
    return Path(sysconfig.get_paths()["stdlib"])


def fetch(package: Package, cache: Path, offline: bool = False) -> Path:
    """Return the path of the package's file (of the folder, for the interpreter's standard library).

    Raises:
        UnavailableError: the file is not in the cache and ``offline`` is set or its client fails.
        ValueError: a file is there, but its SHA-256 is not the pinned one.
    """
    if package.client == "interpreter":
        return standard_library()
    if package.client == "committed":
        return _checked(FALLBACK_DIR / package.file, package, "restore it with git checkout")
    path = cache / package.file
    if path.exists():
        return _checked(path, package, "delete it and run again")
    if offline:
        raise UnavailableError("--offline, and not in the cache")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".partial-") as folder:
        _run_client(package, Path(folder))
        downloaded = Path(folder) / package.file
        if not downloaded.is_file():
            raise UnavailableError(f"{package.client} fetched {os.listdir(folder)}, not {package.file}")
        advice = (
            f"check which index {package.client} uses and clear its cache, or pass --offline for the committed text"
        )
        os.replace(_checked(downloaded, package, advice), path)
    return path


def _checked(path: Path, package: Package, advice: str) -> Path:
    found = file_sha256(path)
    if found != package.sha256:
        raise ValueError(f"{path} ({package.pin}): SHA-256 is {found}, expected {package.sha256}; {advice}")
    return path


def _command(package: Package) -> list[str]:
    """The client's command that downloads the package's file, and nothing else, into the current folder."""
    if package.client == "pip":
        own_pip = importlib.util.find_spec("pip") is not None  # some environments are made without pip
        return [
            *([sys.executable, "-m", "pip"] if own_pip else ["pip"]),
            *("--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=15"),
            *("download", "--dest=.", "--no-deps", "--only-binary=:all:", f"{package.name}=={package.version}"),
        ]
    if package.client == "apt":
        return ["apt-get", "-o", "Acquire::Retries=1", "download", f"{package.name}={package.version}"]
    assert package.client == "npm", package.client
    return ["npm", "pack", "--ignore-scripts", "--fetch-retries=0", f"{package.name}@{package.version}"]


def _run_client(package: Package, folder: Path) -> None:
    command = _command(package)
    if shutil.which(command[0]) is None:
        raise UnavailableError(f"there is no {command[0]} here")
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CLIENT_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{package.client} took longer than {CLIENT_TIMEOUT_SECONDS} s") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith(("e:", "error", "npm err", "npm error"))]
        reason = (errors or lines[-1:] or [f"exit status {done.returncode}"])[0]
        raise UnavailableError(f"{package.client}: {reason[:200]}")
