"""How a process of a run ends: by a failure, by a signal, or because its launcher died. Torch-free.

watch -> a thread that hears signals and the end of launchers at any time, also while the main thread waits in a library
job   -> run_guarded -> exit code; the rank that failed speaks first, nobody waits for anybody

Until a run has something to lose a signal ends the process at once; then whoever called `on_request` hears of it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from recipes.text import error_line, printable, redact

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
STARTER = "RECIPES_STARTER"  # variable that names the process which started a launcher, and without which it is to end
_PEER_DELAY = 2.0  # seconds by which ranks that only lost their peers let the failing one speak first
_LEAVE_WITHIN = 5.0  # seconds from a signal that ends this process at once to its end
_LOOK_EVERY = 1.0  # seconds between looks at the launchers
_DEEPSPEED_INNER = "deepspeed.launcher.launch"
_LAUNCHERS = {
    *("deepspeed", "ds", "deepspeed.launcher.runner", _DEEPSPEED_INNER),
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    *("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "orted", "prted", "hydra_pmi_proxy"),
}
Listener = Callable[[signal.Signals], None]
_listener: Listener | None = None
_watched: Launchers | None = None
# What launchers call a rank; the first that is set counts.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_LOCAL_RANK = (
    *("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
)


class Signalled(KeyboardInterrupt):
    """A signal as an exception, so that `finally` blocks of the job run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)


def watch(environ: Mapping[str, str]) -> Launchers:
    """Begin to hear signals and the end of the launchers above this process, once per process, as early as possible."""
    global _watched
    if _watched is not None:
        return _watched
    _watched = launchers = Launchers(environ)
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    for number in SIGNALS:
        # Ignored by nohup, for example; Ctrl-C alone is heard even in the background of a script, where shells ignore it.
        if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)
    threading.Thread(target=_hear, args=(receiver, launchers), name="signals", daemon=True).start()
    return launchers


def on_request(listener: Listener | None) -> None:
    """From now on signals are told to `listener`, in another thread; None: they end this process at once again."""
    global _listener
    _listener = listener


def _on_signal(number: int, frame: object) -> None:
    if _listener is None:
        raise Signalled(number)


def _hear(receiver: socket.socket, launchers: Launchers) -> NoReturn:
    """Python's handlers run in the main thread, after what it waits for; the wakeup descriptor tells this thread at once."""
    alive = True
    while True:
        if alive and (gone := launchers.gone()):
            alive = False
            tell(f"{name()}: {gone}; this rank ends as by SIGTERM")
            os.kill(os.getpid(), signal.SIGTERM)
        if readable(receiver, _LOOK_EVERY):
            number = receiver.recv(1)[0]
            if number in SIGNALS:
                _tell(signal.Signals(number))


def readable(receiver: socket.socket, seconds: float) -> bool:
    """Whether something comes within `seconds`, in a process with any number of open files."""
    poll = select.poll()
    poll.register(receiver, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _tell(number: signal.Signals) -> None:
    deadline = time.monotonic() + _LEAVE_WITHIN
    while (listener := _listener) is None:
        if time.monotonic() > deadline:
            end(128 + number, f"{name()}: {number.name} while it waited for the other ranks")
        time.sleep(0.1)
    listener(number)


def name() -> str:
    """This rank in messages, before and after the ranks are known."""
    return f"rank {_first(os.environ, _RANK)}"


def _first(environ: Mapping[str, str], names: Sequence[str]) -> str:
    return next((environ[name] for name in names if name in environ), "0")


class Launchers:
    """The launchers above this process, and whoever started them, each of which has to stay alive."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        parents = psutil.Process().parents()
        self.found = [parent for parent in parents if _words(parent) & _LAUNCHERS]
        self._dead = _already_gone(environ, parents, self.found)
        starter = environ.get(STARTER)
        if starter is not None:
            pid = int(starter.partition(":")[0])
            if identity(pid) == starter:
                self.found.append(psutil.Process(pid))
            else:
                self._dead = f"the process that started it (pid {pid}) has died"

    @property
    def identity(self) -> str:
        """A name for the nearest launcher that no other process on this host has had; "" without launcher."""
        return identity(self.found[0].pid) if self.found else ""

    def gone(self) -> str:
        """What died, or ""."""
        for launcher in self.found:
            if not self._dead and not _alive(launcher):
                self._dead = f"its launcher (pid {launcher.pid}) has died"
        return self._dead


def _already_gone(environ: Mapping[str, str], parents: list[psutil.Process], launchers: list[psutil.Process]) -> str:
    """Which launcher the environment tells of that is no longer there; who lost its parent has a process of the system's."""
    if os.getppid() == 0:  # the parent is outside of this container
        return ""
    if "CROSS_SIZE" in environ:  # from deepspeed, which starts an inner launcher, which starts the ranks
        inner = next((place for place, parent in enumerate(parents) if _DEEPSPEED_INNER in _words(parent)), None)
        if inner is None:
            return "its launcher (deepspeed.launcher.launch) has died"
        above = parents[inner + 1 : inner + 2]
        remote = any(word.startswith("--node_rank") for word in _command(parents[inner]))  # started over ssh
        if not remote and not any(map(_starts_launchers, above)):
            return "the launcher of its launcher (deepspeed) has died"
    elif "TORCHELASTIC_RUN_ID" in environ and not launchers and not any(map(_starts_launchers, parents)):
        return "its launcher (torchrun) has died"
    return ""


def _starts_launchers(process: psutil.Process) -> bool:
    """Launchers are Python programs, by whatever name; process 1 adopts orphans."""
    interpreter = os.path.basename(next(iter(_command(process)), ""))
    return interpreter.startswith(("python", "pypy")) and (process.pid != 1 or bool(_words(process) & _LAUNCHERS))


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it ended just now, or belongs to another user
        return []


def _words(process: psutil.Process) -> set[str]:
    return {os.path.basename(word) for word in _command(process)[:6]}


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def identity(pid: int) -> str:
    """A process as no other on this host was or will be called: its number and when it was started; "" when it is gone."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        if stat.exists():
            return f"{pid}:{stat.read_text().rpartition(')')[2].split()[19]}"
        return f"{pid}:{psutil.Process(pid).create_time()}"
    except (OSError, psutil.Error):
        return ""


def fail(error: ValueError, environ: Mapping[str, str]) -> int:
    """Report a mistake found before the ranks join; returns the exit code 2.

    Every rank finds it, and rank 0 alone prints it. The others give it the time to do so before their end makes the
    launcher stop everybody; a node that alone has the problem (a missing folder) is heard after that.
    """
    if _first(environ, _RANK) == "0":
        tell(error_line(error))
        return 2
    time.sleep(_PEER_DELAY)
    if any(name in environ for name in _LOCAL_RANK) and _first(environ, _LOCAL_RANK) == "0":
        tell(error_line(error).replace("error", f"error on {socket.gethostname()}", 1))
    return 2


def run_guarded(job: Callable[[], None], rank: int) -> int:
    """Run `job` and return 0; on any failure say why and end this process at once, whatever its peers are doing.

    Exit codes: 2 for a ValueError that this library raised (a mistake of the user), 128 + n for signal n, 1 for everything
    else, whose traceback is printed. A rank that merely lost its peers waits and prints one line.
    """
    watch(os.environ)
    try:
        job()
    except Signalled as stopped:
        end_by(stopped)
    except KeyboardInterrupt:  # raised by a library
        end(128 + signal.SIGINT, f"rank {rank}: interrupted")
    except Exception as error:  # noqa: BLE001 - reported in full, and the process ends
        if is_user_error(error):
            # Usually every rank meets the same mistake: the first one speaks, and its launcher ends the others.
            if rank != 0:
                time.sleep(_PEER_DELAY)
            end(2, error_line(error) if rank == 0 else f"rank {rank}: {error_line(error)}")
        if is_lost_contact(error):
            time.sleep(_PEER_DELAY)
            reason = str(error).strip().splitlines() or [type(error).__name__]
            end(1, f"rank {rank}: lost contact with the other ranks; see the first traceback ({reason[0]})")
        end(1, f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}")
    return 0


@contextlib.contextmanager
def heavy_imports() -> Iterator[None]:
    """Import large libraries without looking for garbage among objects that stay, neither now nor later or at the end.

    They make half a million; collections cost a quarter of the time from start to first step, and 2 s at the end.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def end(code: int, message: str) -> NoReturn:
    """Leave without the interpreter's shutdown, which may wait for threads of a collective that nobody will finish."""
    if message:
        tell(message.rstrip())
    os._exit(code)


def end_by(stopped: Signalled) -> NoReturn:
    """Leave because of a signal at a time when there is nothing to save."""
    end(128 + stopped.signal, f"{name()}: ended by {stopped.signal.name}")


def tell(message: str) -> None:
    """Print on stderr without passwords, if anybody still reads: a terminal that was closed is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        print(printable(redact(message)), file=sys.stderr, flush=True)


def is_user_error(error: BaseException) -> bool:
    """Whether it is a ValueError raised by this library's own code; one raised inside torch or numpy is a crash."""
    if not isinstance(error, ValueError) or error.__traceback__ is None:
        return False
    frame = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return frame.f_globals.get("__name__", "").startswith("recipes.")


# What gloo, NCCL and the TCP store say when a peer is gone.
_LOST_CONTACT = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Timed out waiting|Application timeout|recvValue failed"
    r"|ncclRemoteError|remote process exited"
)


def is_lost_contact(error: BaseException) -> bool:
    """Whether a collective failed only because a peer is gone."""
    return isinstance(error, RuntimeError | ConnectionError) and _LOST_CONTACT.search(str(error)) is not None
