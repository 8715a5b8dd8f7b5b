"""The folder of a run: made by one job alone, kept from others while it runs, left as it was when the job is refused."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import itertools
from pathlib import Path

from recipes.config import Resume, RunConfig
from recipes.files import open_append

_LOCK = ".lock"


def fresh_folder(name: str) -> Path:
    """Make `outputs/<name>-<date>-<time>`; jobs that start in the same second get `-2`, `-3` and so on at its end."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = Path(f"outputs/{name}-{stamp}" + (f"-{number}" if number > 1 else "")).absolute()
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("numbers do not end")


def discard(folder: Path) -> None:
    """Remove a `fresh_folder`, and `outputs` around it, unless somebody has put something there."""
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


class RunFolder:
    """`run.dir`, or a fresh folder, locked for this job; `shared`: for all jobs that share it.

    Raises ValueError when it exists and is not to be gone on with, and when a job runs there.
    """

    def __init__(self, run: RunConfig, *, shared: bool = False):
        self._made = True
        if run.dir is None:
            self.path = fresh_folder(run.name)
        else:
            self.path = Path(run.dir).absolute()
            self._made = self._make(run.resume)
        self._lock_made = not (self.path / _LOCK).exists()
        self._lock = open_append(self.path / _LOCK)
        try:
            fcntl.flock(self._lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            why = "a job is running there; wait for it, or choose another folder"
            raise ValueError(f"run.dir={self.path}: {why}") from error
        except OSError as error:  # some network file systems have no locks
            print(f"no lock on {self.path} ({error.strerror}): start no second job there", flush=True)

    def _make(self, resume: Resume) -> bool:
        """Make the folder; whether it was not there."""
        try:
            self.path.mkdir(parents=True)
        except FileExistsError as error:
            if resume is Resume.never:
                why = "exists; choose another folder, or go on by run.resume=auto"
                raise ValueError(f"run.dir={self.path} {why}") from error
            return False
        return True

    def close(self) -> None:
        """Let others in."""
        self._lock.close()

    def abandon(self) -> None:
        """Leave the folder as it was before: what this job has made of it (itself, its lock) is removed."""
        if self._lock_made:
            (self.path / _LOCK).unlink(missing_ok=True)
        if self._made:
            with contextlib.suppress(OSError):  # somebody else has put something there
                self.path.rmdir()
        self.close()
