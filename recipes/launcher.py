"""What starts a process: arguments, rank and world. Torch-free.

argv     -> split_arguments  -> flags of this program, Hydra overrides untouched, launcher flags dropped
environ  -> rank_environment -> Ranks, from torchrun or deepspeed, else mpirun, else srun, else a single process
"""

from __future__ import annotations

import collections
import hashlib
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from recipes.text import shown

_SWITCHES = {"--help": "help", "-h": "help", "--version": "version", "--dry-run": "dry_run"}
_LOCAL_RANK_FLAGS = ("--local_rank", "--local-rank")
_DEEPSPEED_FLAGS = ("--deepspeed", "--deepspeed_config", "--deepspeed_mpi", "--deepscale", "--deepscale_config")
_PORTS, _FIRST_PORT, _NUM_PORTS = (
    30,
    20000,
    10000,
)  # tried by ranks that meet by name; below those of outgoing connections


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
    """The place of this process among those of the run.

    `job`: what only the ranks of this job are called, "" where a launcher gives no such name. `shared_store`: the launcher
    itself has a key-value store at `master_addr`:`master_port`. `master_port` 0: the ranks find each other by `job`.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    job: str = ""
    shared_store: bool = False

    def environment(self) -> dict[str, str]:
        """The variables by which torch.distributed and DeepSpeed know their place."""
        names = ("rank", "local_rank", "world_size", "local_world_size", "master_addr", "master_port")
        return {name.upper(): str(getattr(self, name)) for name in names}

    def ports(self) -> list[int]:
        """Where rank 0 listens: on the first of these that is free, the others ask each who it is."""
        if self.master_port:
            return [self.master_port]
        digests = [hashlib.sha256(f"{self.job} {number}".encode()).hexdigest() for number in range(_PORTS)]
        return [_FIRST_PORT + int(digest, 16) % _NUM_PORTS for digest in digests]


def split_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> Arguments:
    """Sort a command line into flags and Hydra overrides, which stay as they are.

    Launchers add `--local_rank=N`, and DeepSpeed scripts carry `--deepspeed --deepspeed_config FILE`; both are dropped
    in any form and position. Raises ValueError for an unknown flag, a missing value, or a local rank that is not
    LOCAL_RANK.
    """
    words = list(reversed(argv))  # the next one is the last
    overrides: list[str] = []
    ignored: list[str] = []
    switches: dict[str, bool] = {}
    json: str | None = None
    while words:
        word = words.pop()
        flag, has_value, value = word.partition("=")
        if not word.startswith("-"):
            overrides.append(word)
        elif flag in _LOCAL_RANK_FLAGS:
            _check_local_rank(flag, value if has_value else _next(words, flag), environ)
        elif flag in _DEEPSPEED_FLAGS:
            # A file name may follow as a word of its own; an override has "=" or starts with "~".
            follows = words and not has_value and "=" not in words[-1] and words[-1][0:1] not in ("-", "~")
            ignored.append(" ".join([word, words.pop()]) if follows else word)
        elif flag == "--json":
            json = value if has_value else _next(words, flag)
        elif word in _SWITCHES:
            switches[_SWITCHES[word]] = True
        else:
            flags = ", ".join([*_SWITCHES, "--json FILE"])
            raise ValueError(
                f"{shown(word)}: unknown flag; there are {flags}. Settings are written key=value, without dashes"
            )
    if json is not None and "dry_run" not in switches:
        raise ValueError(f"--json {shown(json)}: writes the plan of --dry-run; give both or neither")
    return Arguments(tuple(overrides), json=json, ignored=tuple(ignored), **switches)


def _next(words: list[str], flag: str) -> str:
    if not words or words[-1].startswith("--"):
        raise ValueError(f"{flag}: a value must follow")
    return words.pop()


def _check_local_rank(flag: str, value: str, environ: Mapping[str, str]) -> None:
    """The argument repeats what LOCAL_RANK says; -1 is the customary "not set"."""
    try:
        argument = int(value)
    except ValueError:
        raise ValueError(f"{flag}={shown(value)}: must be an integer; launchers add it, so leave it out") from None
    expected = environ.get("LOCAL_RANK")
    if expected is not None and argument not in (-1, _integer(environ, "LOCAL_RANK")):
        raise ValueError(f"{flag}={shown(value)} but LOCAL_RANK={expected} in the environment; leave the argument out")


def rank_environment(environ: Mapping[str, str], launcher: str = "") -> Ranks:
    """This process's place, which `Ranks.environment` spells out for torch.distributed.

    torchrun's and deepspeed's variables come first, then those of mpirun, then of an srun job step, else it is a single
    process. `launcher`: the identity of the launcher process above this one. Raises ValueError when a set of variables is
    incomplete or contradicts itself or another.
    """
    step = "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ  # a batch script alone has none
    srun = (_integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_NTASKS")) if step else None
    tool, mpi = _mpi_place(environ)
    if "RANK" in environ:
        ranks = _from_torchrun(environ, launcher)
        if "TORCHELASTIC_RUN_ID" not in environ and "CROSS_SIZE" not in environ:  # those may be started once per node
            _check_same(ranks, {tool: mpi, "srun": srun})
    elif srun and mpi in (None, srun):  # srun also serves MPI programs
        ranks = _from_slurm(environ)
    elif mpi:
        ranks = _from_mpi(environ, tool, launcher)
    elif environ.get("WORLD_SIZE", "1") != "1":
        world = environ["WORLD_SIZE"]
        raise ValueError(f"WORLD_SIZE={world} but RANK is not set; start with deepspeed, torchrun or srun, or unset it")
    else:
        _refuse_unknown(environ)
        ranks = Ranks(master_port=free_port())
    if not 0 <= ranks.rank < ranks.world_size or not 0 <= ranks.local_rank < ranks.local_world_size:
        place = f"rank {ranks.rank} of {ranks.world_size}, local rank {ranks.local_rank} of {ranks.local_world_size}"
        raise ValueError(f"{place}: each must lie below its count; check the variables that the launcher sets")
    if (not ranks.job and not ranks.master_port) or not 0 <= ranks.master_port < 65536:
        raise ValueError(f"MASTER_PORT={ranks.master_port} must lie in 1 .. 65535; give the launcher another")
    return ranks


def launch_note(environ: Mapping[str, str], ranks: Ranks) -> str | None:
    """What a single process should say when the allocation around it is for more tasks."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if ranks.world_size > 1 or tasks == "1" or "SLURM_STEP_ID" in environ or "RANK" in environ:
        return None
    return f"SLURM_NTASKS={tasks}, but this is one process of its own; start one task per rank by srun"


def _check_same(ranks: Ranks, others: Mapping[str, tuple[int, int] | None]) -> None:
    """Raise ValueError when variables set by hand and those of a launcher cannot both be right.

    More ranks than a launcher started may be: each of its processes may have started several.
    """
    for tool, place in others.items():
        if place is None or place[1] < ranks.world_size:
            continue
        if place[1] > 1 and place != (ranks.rank, ranks.world_size):
            raise ValueError(
                f"RANK={ranks.rank} and WORLD_SIZE={ranks.world_size}, but {tool} started this as rank {place[0]} of "
                f"{place[1]}; unset RANK, LOCAL_RANK and WORLD_SIZE, or start without {tool}"
            )


def _from_torchrun(environ: Mapping[str, str], launcher: str) -> Ranks:
    """From torchrun, deepspeed, or variables set by hand on one node."""
    local_size = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environ), "WORLD_SIZE")
    run_id = environ.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's word for "not set"
    ranks = Ranks(
        rank=_integer(environ, "RANK"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        world_size=_integer(environ, "WORLD_SIZE"),
        local_world_size=_integer(environ, local_size),
        master_addr=_text(environ, "MASTER_ADDR"),
        master_port=_integer(environ, "MASTER_PORT"),
        job="" if run_id == "none" else f"torchrun {run_id}",
        shared_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    if environ.get("CROSS_SIZE") == "1" and launcher:
        # deepspeed on one node, where two jobs are given the same port by default.
        return replace(ranks, master_port=0, job=f"deepspeed {launcher}")
    return ranks


# Rank, ranks, rank on the node, ranks on the node.
_MPI = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MVAPICH": tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
# What tells that a launcher started this process, perhaps as one of several, but not everything that a rank has to know.
_UNKNOWN = (
    "PMIX_RANK",
    "PMI_RANK",
    "MPI_LOCALRANKID",
    "PALS_RANKID",
    "ALPS_APP_PE",
    "FLUX_TASK_RANK",
    "JSM_NAMESPACE_RANK",
)
_SIZES = (*(names[1] for names in _MPI.values()), "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE")


def _mpi_place(environ: Mapping[str, str]) -> tuple[str, tuple[int, int] | None]:
    """The MPI library whose launcher started this process as one of several, its rank and their number."""
    for tool, (rank, size, *_) in _MPI.items():
        if rank in environ and environ.get(size, "1") != "1":
            return tool, (_integer(environ, rank), _integer(environ, size))
    return "", None


def _from_mpi(environ: Mapping[str, str], tool: str, launcher: str) -> Ranks:
    rank, world_size, local_rank, local_size = (_integer(environ, name) for name in _MPI[tool])
    ranks = Ranks(rank, local_rank, world_size, local_size)
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return replace(ranks, master_addr=environ["MASTER_ADDR"], master_port=_integer(environ, "MASTER_PORT"))
    if local_size < world_size or not launcher:
        raise ValueError(
            f"{tool} started this as rank {rank} of {world_size}, which do not know where to meet; pass MASTER_ADDR (the "
            "host of rank 0) and MASTER_PORT on to all of them, by mpirun -x or -genv"
        )
    return replace(ranks, job=f"mpirun {launcher}")


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    """Raise ValueError rather than train once in each of several processes."""
    found = next((name for name in _UNKNOWN if name in environ), None)
    if found is not None and not any(environ.get(size) == "1" for size in _SIZES):
        raise ValueError(
            f"{found}={environ[found]}: a launcher started this, perhaps as one of several processes, but does not say all that "
            "a rank has to know; set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each, or "
            f"unset {found} for a process of its own"
        )


def _from_slurm(environ: Mapping[str, str]) -> Ranks:
    nodes = expand_hosts(environ.get("SLURM_STEP_NODELIST") or _text(environ, "SLURM_JOB_NODELIST"))
    # "2(x3),1": two tasks on each of three nodes, then one.
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(repeat or 1)
    world_size = _integer(environ, "SLURM_NTASKS")
    node = int(environ.get("SLURM_NODEID", "0"))
    # A job that was requeued keeps its number.
    job = f"{_text(environ, 'SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']} {environ.get('SLURM_RESTART_COUNT', '0')}"
    return Ranks(
        rank=_integer(environ, "SLURM_PROCID"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=counts[node] if node < len(counts) else -(-world_size // len(nodes)),
        master_addr=environ.get("MASTER_ADDR", nodes[0]),
        master_port=_integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else 0,
        job=f"srun {job}",
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


_reserved: collections.deque[socket.socket] = collections.deque(maxlen=256)  # a dropped one is closed


def free_port() -> int:
    """A TCP port on which nobody listens, and which no other call on this host returns while this process lives.

    Of a process that asks for more than 256 the oldest are given up.
    """
    reservation = socket.socket()
    # Bound without listening, it keeps the port from those who ask for any, not from a server that asks for this one.
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    _reserved.append(reservation)
    return reservation.getsockname()[1]
