"""How the ranks of a job find each other, and tell the ranks of another job apart. Torch-free.

rank 0 listens on the first free port of `Ranks.ports` -> each rank says who it is -> all get rank 0's answer, or the problem

One JSON object per line. Ports are held only until all ranks have met, so that two jobs with the same port take turns.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from recipes.launcher import Ranks
from recipes.process import readable

_HELLO = "sparse-pretraining-recipes"
_LONGEST = 1 << 16  # bytes of a line
_ANSWER_WITHIN = 5.0  # seconds until a server that does not speak like rank 0 is taken for another program
_PORT_WITHIN = 10.0  # seconds that a port may be in use before this job gives up
_GRACE = 3.0  # seconds for the right rank to come after one with other settings that may belong to another job


@dataclass(frozen=True)
class Member:
    """What a rank tells of itself. `settings`: digest of its description; `device`: the accelerator it computes on, or ""."""

    rank: int
    job: str
    settings: str
    host: str
    device: str = ""


class _Other(Exception):
    """Somebody else listens there: another job, or another program."""


class Meeting:
    """Rank 0's side: made before the others can be answered, `gather` waits for them, `answer` lets them go."""

    def __init__(self, ranks: Ranks, member: Member) -> None:
        self.ranks, self.member = ranks, member
        self.server = _listen(ranks)
        self.port: int = self.server.getsockname()[1]
        self._came: dict[int, tuple[socket.socket, Member]] = {}
        self._doubtful: list[tuple[socket.socket, Member]] = []  # other settings: another job's, or a mistake

    def gather(self, limit: float) -> None:
        """Wait for all ranks. Raises ValueError, which every rank is told, when they do not fit together."""
        deadline, settled = time.monotonic() + limit, 0.0
        while len(self._came) < self.ranks.world_size - 1:
            missing = set(range(1, self.ranks.world_size)) - self._came.keys()
            settled = settled or time.monotonic()
            if missing - {member.rank for _, member in self._doubtful}:
                settled = 0.0
            elif time.monotonic() - settled > _GRACE:
                self._refuse("the ranks were given different settings; start all of them with the same overrides")
            if time.monotonic() > deadline:
                shown = ", ".join(map(str, sorted(missing)[:8]))
                self._refuse(f"of {self.ranks.world_size} ranks {shown} did not come within {limit:.0f} s")
            if readable(self.server, 0.2):
                self._receive()
        members = [self.member, *(member for _, member in self._came.values())]
        if problem := problem_of(members):
            self._refuse(problem)

    def answer(self, value: dict[str, Any]) -> None:
        """Give every rank `value`, those of other jobs the port."""
        self._close({"value": value})

    def _receive(self) -> None:
        connection, _ = self.server.accept()
        connection.settimeout(_ANSWER_WITHIN)
        try:
            told = _read(connection.makefile("rb"))
            member = Member(**told["member"])
            if told["hello"] != _HELLO or told["world_size"] != self.ranks.world_size or member.job != self.member.job:
                raise _Other
            if not 0 < member.rank < self.ranks.world_size or member.rank in self._came:
                raise _Other
        except (_Other, OSError, ValueError, KeyError, TypeError):
            _send(connection, {"other": True})
            connection.close()
            return
        _send(connection, {"wait": True})
        if member.settings != self.member.settings and not self.member.job:
            self._doubtful.append((connection, member))
        else:
            self._came[member.rank] = connection, member

    def _refuse(self, problem: str) -> None:
        self._close({"problem": problem}, told=self._doubtful)
        raise ValueError(problem)

    def _close(self, message: dict[str, Any], told: list[tuple[socket.socket, Member]] | None = None) -> None:
        for connection, _ in [*self._came.values(), *(told or [])]:
            _send(connection, message)
        for connection, _ in self._doubtful:
            _send(connection, {"other": True})
        for connection, _ in [*self._came.values(), *self._doubtful]:
            connection.close()
        self.server.close()


def problem_of(members: list[Member]) -> str | None:
    """Why these ranks cannot be one job: other settings, or one device for two of them."""
    if len({member.settings for member in members}) > 1:
        return "the ranks were given different settings; start all of them with the same overrides"
    seen: dict[tuple[str, str], int] = {}
    for member in sorted(members, key=lambda member: member.rank):
        place = (member.host, member.device)
        if member.device and place in seen:
            return (
                f"ranks {seen[place]} and {member.rank} on {member.host} have the same device ({member.device}); start as many "
                "ranks per node as it has devices, or let the launcher show each rank another"
            )
        seen[place] = member.rank
    return None


def join(ranks: Ranks, member: Member, limit: float) -> dict[str, Any]:
    """Meet the others, as a rank other than 0: the value that rank 0 answers. Raises ValueError for what it refuses."""
    started, taken_since, other = time.monotonic(), 0.0, ""
    while time.monotonic() - started < limit:
        taken = False
        for port in ranks.ports():
            with contextlib.suppress(OSError):  # nobody listens there (yet), or it went away
                try:
                    return _ask(ranks, member, port, limit)
                except _Other as error:
                    taken, other = True, str(error)
        # A port of this job's own may be taken for a while, until that job has met; with several, others are free.
        taken_since = (taken_since or time.monotonic()) if taken and ranks.master_port else 0.0
        if taken_since and time.monotonic() - taken_since > _PORT_WITHIN + _GRACE:
            raise ValueError(_in_use(ranks, other))
        time.sleep(0.1)
    raise ConnectionError(f"Timed out waiting for rank 0 at {ranks.master_addr}")


def _ask(ranks: Ranks, member: Member, port: int, limit: float) -> dict[str, Any]:
    with socket.create_connection((ranks.master_addr, port), _ANSWER_WITHIN) as connection:
        _send(connection, {"hello": _HELLO, "world_size": ranks.world_size, "member": asdict(member)})
        lines = connection.makefile("rb")
        try:
            told = _read(lines)
        except (TimeoutError, ValueError) as error:
            raise _Other("another program") from error
        if told.get("other"):
            raise _Other("another job")
        connection.settimeout(limit)
        told = _read(lines) if told.get("wait") else told
    if told.get("other"):
        raise _Other("another job")
    if "problem" in told:
        raise ValueError(told["problem"])
    return told["value"]


def _listen(ranks: Ranks) -> socket.socket:
    deadline = time.monotonic() + _PORT_WITHIN
    while True:
        for port in ranks.ports():
            with contextlib.suppress(OSError):
                if socket.has_dualstack_ipv6():
                    return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
                return socket.create_server(("", port), backlog=1024)
        if time.monotonic() > deadline:
            raise ValueError(_in_use(ranks, "another job or program"))
        time.sleep(0.2)


def _in_use(ranks: Ranks, other: str) -> str:
    ports = ranks.ports()
    where = f"MASTER_PORT={ports[0]}" if ranks.master_port else f"each of the ports {min(ports)} .. {max(ports)}"
    return (
        f"{where} on {ranks.master_addr} is in use by {other}; give this job another by --master_port N (MASTER_PORT)"
    )


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever left is missed later
        connection.sendall(json.dumps(message).encode() + b"\n")


def _read(lines: BinaryIO) -> dict[str, Any]:
    """One line. Raises OSError when the other side is gone, ValueError when it does not speak like this."""
    line = lines.readline(_LONGEST)
    if not line:
        raise ConnectionResetError("closed")
    told = json.loads(line)
    if not isinstance(told, dict):
        raise ValueError("not an object")
    return told
