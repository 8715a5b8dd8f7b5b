"""What starts a process and how it ends: arguments, rank and world, and one clear account of a failure. Torch-free.

argv     -> split_arguments  -> flags of this program, Hydra overrides untouched, launcher flags dropped
environ  -> rank_environment -> Ranks, from torchrun or deepspeed, else srun, else a single process
job      -> run_guarded      -> exit code; the rank that failed speaks first, nobody waits for anybody
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NoReturn

from recipes.text import error_line, printable, redact

_SWITCHES = {"--help": "help", "-h": "help", "--version": "version", "--dry-run": "dry_run"}
_LOCAL_RANK_FLAGS = ("--local_rank", "--local-rank")
_DEEPSPEED_FLAGS = ("--deepspeed", "--deepspeed_config", "--deepspeed_mpi", "--deepscale", "--deepscale_config")
_PEER_DELAY = 2.0  # seconds by which ranks that only lost their peers let the failing one speak first
ONE_REQUEST = 3.0  # seconds; a terminal and a launcher pass the same Ctrl-C on, as two signals to every rank
_LEAVE_WITHIN = 5.0  # seconds from a signal that ends this process to its end


@dataclass(frozen=True)
class Arguments:
    """The command line, sorted. `ignored` are DeepSpeed's own flags, which have no effect here."""

    overrides: tuple[str, ...]
    help: bool = False
    version: bool = False
    dry_run: bool = False
    json: str | None = None  # file that receives the plan of a dry run
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ranks:
    """The place of this process among those of the run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def environment(self) -> dict[str, str]:
        """The variables by which torch.distributed and DeepSpeed find each other."""
        return {field.name.upper(): str(getattr(self, field.name)) for field in fields(self)}


def split_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> Arguments:
    """Sort a command line into flags and Hydra overrides, which stay as they are.

    Launchers add `--local_rank=N`, and DeepSpeed scripts carry `--deepspeed --deepspeed_config FILE`; both are dropped
    in any form and position. Raises ValueError for an unknown flag, a missing value, or a local rank that is not
    LOCAL_RANK.
    """
    words = list(argv)
    overrides: list[str] = []
    ignored: list[str] = []
    switches: dict[str, bool] = {}
    json: str | None = None
    while words:
        word = words.pop(0)
        flag, has_value, value = word.partition("=")
        if not word.startswith("-"):
            overrides.append(word)
        elif flag in _LOCAL_RANK_FLAGS:
            _check_local_rank(flag, value if has_value else _next(words, flag), environ)
        elif flag in _DEEPSPEED_FLAGS:
            # A file name may follow as a word of its own; an override has "=" or starts with "~".
            follows = words and not has_value and "=" not in words[0] and words[0][0:1] not in ("-", "~")
            ignored.append(" ".join([word, words.pop(0)]) if follows else word)
        elif flag == "--json":
            json = value if has_value else _next(words, flag)
        elif word in _SWITCHES:
            switches[_SWITCHES[word]] = True
        else:
            flags = ", ".join([*_SWITCHES, "--json FILE"])
            raise ValueError(f"{word}: unknown flag; there are {flags}. Settings are written key=value, without dashes")
    if json is not None and "dry_run" not in switches:
        raise ValueError(f"--json {json}: writes the plan of --dry-run; give both or neither")
    return Arguments(tuple(overrides), json=json, ignored=tuple(ignored), **switches)


def _next(words: list[str], flag: str) -> str:
    if not words or words[0].startswith("--"):
        raise ValueError(f"{flag}: a value must follow")
    return words.pop(0)


def _check_local_rank(flag: str, value: str, environ: Mapping[str, str]) -> None:
    """The argument repeats what LOCAL_RANK says; -1 is the customary "not set"."""
    try:
        argument = int(value)
    except ValueError:
        raise ValueError(f"{flag}={value}: must be an integer; launchers add it, so leave it out") from None
    expected = environ.get("LOCAL_RANK")
    if expected is not None and argument not in (-1, _integer(environ, "LOCAL_RANK")):
        raise ValueError(f"{flag}={value} but LOCAL_RANK={expected} in the environment; leave the argument out")


def rank_environment(environ: Mapping[str, str]) -> Ranks:
    """This process's place, which `Ranks.environment` spells out for torch.distributed.

    torchrun's and deepspeed's variables come first, then those of an srun job step, else it is a single process with a
    free port. Raises ValueError when a set of variables is incomplete or contradicts itself.
    """
    if "RANK" in environ:
        ranks = _from_torchrun(environ)
    elif "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:  # a batch script alone has no step
        ranks = _from_slurm(environ)
    elif environ.get("WORLD_SIZE", "1") != "1":
        world = environ["WORLD_SIZE"]
        raise ValueError(f"WORLD_SIZE={world} but RANK is not set; start with deepspeed, torchrun or srun, or unset it")
    else:
        ranks = Ranks(master_port=free_port())
    if not 0 <= ranks.rank < ranks.world_size or not 0 <= ranks.local_rank < ranks.local_world_size:
        place = f"rank {ranks.rank} of {ranks.world_size}, local rank {ranks.local_rank} of {ranks.local_world_size}"
        raise ValueError(f"{place}: each must lie below its count; check the variables that the launcher sets")
    if not 0 < ranks.master_port < 65536:
        raise ValueError(f"MASTER_PORT={ranks.master_port} must lie in 1 .. 65535; give the launcher another")
    return ranks


def _from_torchrun(environ: Mapping[str, str]) -> Ranks:
    world_size = _integer(environ, "WORLD_SIZE")
    # torchrun, deepspeed, or variables set by hand on one node.
    local_size = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environ), "WORLD_SIZE")
    return Ranks(
        rank=_integer(environ, "RANK"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=_integer(environ, local_size),
        master_addr=_text(environ, "MASTER_ADDR"),
        master_port=_integer(environ, "MASTER_PORT"),
    )


def _from_slurm(environ: Mapping[str, str]) -> Ranks:
    nodes = expand_hosts(environ.get("SLURM_STEP_NODELIST") or _text(environ, "SLURM_JOB_NODELIST"))
    # "2(x3),1": two tasks on each of three nodes, then one.
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(repeat or 1)
    world_size = _integer(environ, "SLURM_NTASKS")
    node = int(environ.get("SLURM_NODEID", "0"))
    # Steps of one job may run at once on the same nodes, so the port depends on both.
    job = f"{_text(environ, 'SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
    return Ranks(
        rank=_integer(environ, "SLURM_PROCID"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=counts[node] if node < len(counts) else -(-world_size // len(nodes)),
        master_addr=environ.get("MASTER_ADDR", nodes[0]),
        master_port=int(environ.get("MASTER_PORT", 20000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 10000)),
    )


def expand_hosts(nodelist: str) -> list[str]:
    """Host names of a Slurm node list: `node[03-05,7],login` -> node03, node04, node05, node7, login."""
    hosts: list[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", entry):
            names = [name + part for name in names for part in ([text] if text else _expand_ranges(ranges))]
        hosts += names
    if not hosts:
        raise ValueError(f"node list {nodelist!r} names no host; expected something like node[01-04]")
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"node list range [{ranges}]: {part!r} is not a number or a range like 01-04")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ValueError(f"{name} is not set in the environment; start with deepspeed, torchrun, srun, or python alone")
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    value = _text(environ, name)
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII):
        raise ValueError(f"{name}={value} in the environment must be an integer from 0 up; check the launcher")
    return int(value)


def free_port() -> int:
    """A TCP port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fail(error: ValueError, environ: Mapping[str, str]) -> int:
    """Report a mistake found before the ranks join; returns the exit code 2.

    Every rank finds it, and rank 0 alone prints it. The others give it the time to do so before their end makes the
    launcher stop everybody; a node that alone has the problem (a missing folder) is heard after that.
    """
    if environ.get("RANK", environ.get("SLURM_PROCID", "0")) == "0":
        print(error_line(error), file=sys.stderr)
        return 2
    time.sleep(_PEER_DELAY)
    if environ.get("LOCAL_RANK", environ.get("SLURM_LOCALID")) == "0":
        print(error_line(error).replace("error", f"error on {socket.gethostname()}", 1), file=sys.stderr)
    return 2


def run_guarded(job: Callable[[], None], rank: int) -> int:
    """Run `job` and return 0; on any failure say why and end this process at once, whatever its peers are doing.

    Exit codes: 2 for a ValueError that this library raised (a mistake of the user), 130 and 143 for Ctrl-C and SIGTERM,
    1 for everything else, whose traceback is printed. A rank that merely lost its peers waits and prints one line.
    """
    signal.signal(signal.SIGTERM, _on_terminate)
    _watch_signals(rank)
    try:
        job()
    except KeyboardInterrupt:
        _end(130, f"rank {rank}: interrupted")
    except _Terminated:
        _end(143, f"rank {rank}: terminated (SIGTERM)")
    except Exception as error:  # noqa: BLE001 - reported in full, and the process ends
        if is_user_error(error):
            # Usually every rank meets the same mistake: the first one speaks, and its launcher ends the others.
            if rank != 0:
                time.sleep(_PEER_DELAY)
            _end(2, error_line(error) if rank == 0 else f"rank {rank}: {error_line(error)}")
        if is_lost_contact(error):
            time.sleep(_PEER_DELAY)
            reason = str(error).strip().splitlines() or [type(error).__name__]
            _end(1, f"rank {rank}: lost contact with the other ranks; see the first traceback ({reason[0]})")
        _end(1, f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}")
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


class _Terminated(BaseException):
    """SIGTERM as an exception, so that `finally` blocks of the job run."""


def _on_terminate(signum: int, frame: object) -> NoReturn:
    raise _Terminated


def _watch_signals(rank: int) -> None:
    """See to it that signals end this process even while its main thread waits in a library for a rank that never comes.

    Python's handlers run in the main thread, after such a wait; a wakeup descriptor tells another thread at once.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_end_when_stuck, args=(receiver, rank), daemon=True).start()


def _end_when_stuck(receiver: socket.socket, rank: int) -> None:
    first = math.inf
    while True:
        number, now = receiver.recv(1)[0], time.monotonic()
        if number not in (signal.SIGINT, signal.SIGTERM):
            continue
        # A job that finishes its step first has another handler; a second request ends that one too.
        at_once = signal.getsignal(number) in (_on_terminate, signal.default_int_handler)
        if at_once or now - first > ONE_REQUEST:
            time.sleep(_LEAVE_WITHIN)
            _end(128 + number, f"rank {rank}: {signal.Signals(number).name} while it waited for the other ranks")
        first = min(first, now)


def _end(code: int, message: str) -> NoReturn:
    """Leave without the interpreter's shutdown, which may wait for threads of a collective that nobody will finish."""
    sys.stdout.flush()
    sys.stderr.write(printable(redact(message.rstrip())) + "\n")
    sys.stderr.flush()
    os._exit(code)


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
