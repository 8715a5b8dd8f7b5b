"""Ranks of a job find each other and nobody else, in threads."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from recipes import meeting
from recipes.launcher import Ranks, free_port
from recipes.meeting import Meeting, Member, join, problem_of


def member(ranks: Ranks, settings: str = "s", **more: str) -> Member:
    return Member(ranks.rank, ranks.job, settings, "here", **more)


def start(ranks: Ranks, settings: str, found: list, answer: int) -> threading.Thread:
    """A rank that appends to `found` its job's answer, or what it was refused with."""

    def run() -> None:
        try:
            if ranks.rank == 0:
                host = Meeting(ranks, member(ranks, settings))
                host.gather(20)
                host.answer({"port": answer})
                found.append((answer, host.port))
            else:
                found.append((answer, join(ranks, member(ranks, settings), 20)["port"]))
        except ValueError as error:
            found.append((answer, str(error)))

    return threading.Thread(target=run)


def run_all(threads: list[threading.Thread], seed: int = 0) -> None:
    random.Random(seed).shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_64_jobs_that_start_together_have_64_ports():
    found: list = []
    jobs = [Ranks(world_size=3, local_world_size=3, job=f"deepspeed {job}") for job in range(64)]
    run_all([start(replace(ranks, rank=r), "same", found, job) for job, ranks in enumerate(jobs) for r in range(3)])
    hosts = dict(found[place] for place in range(len(found)) if found[place][1] >= 20000)
    assert len(hosts) == len(set(hosts.values())) == 64
    assert sorted(value for value in found if value[1] < 20000) == sorted(
        (job, job) for job in range(64) for _ in range(2)
    )


def test_jobs_that_were_given_one_port_take_turns():
    """Nothing but their settings tells them apart."""
    port, found = free_port(), list[tuple]()
    ranks = [Ranks(rank, world_size=2, local_world_size=2, master_port=port) for rank in range(2)]
    run_all([start(rank, f"settings {job}", found, job) for job in range(3) for rank in ranks])
    assert sorted(found) == sorted([(job, port) for job in range(3)] + [(job, job) for job in range(3)])


@pytest.mark.parametrize("job", ["", "srun 1.0"])
def test_ranks_with_other_settings_are_refused_everywhere(job, monkeypatch):
    monkeypatch.setattr(meeting, "_GRACE", 0.3)
    found: list = []
    ranks = [Ranks(rank, world_size=2, local_world_size=2, job=job, master_port=free_port()) for rank in range(2)]
    ranks[1] = replace(ranks[1], master_port=ranks[0].master_port)
    run_all([start(rank, f"settings {rank.rank}", found, 0) for rank in ranks])
    assert found == [(0, "the ranks were given different settings; start all of them with the same overrides")] * 2


def test_two_ranks_on_one_device_are_refused():
    ranks = [member(Ranks(rank), device="GPU-7") for rank in range(3)]
    assert problem_of([ranks[0], replace(ranks[1], device="GPU-8"), replace(ranks[2], host="there")]) is None
    assert problem_of([replace(rank, device="") for rank in ranks]) is None  # on CPU
    problem = problem_of([ranks[2], replace(ranks[1], device="GPU-8"), ranks[0]])
    assert problem is not None and problem.startswith(
        "ranks 0 and 2 on here have the same device (GPU-7); start as many"
    )


@pytest.mark.parametrize(
    "act", [lambda ranks: Meeting(ranks, member(ranks)), lambda ranks: join(ranks, member(ranks), 9)]
)
def test_a_port_of_another_program_is_named(act: Callable[[Ranks], object], monkeypatch):
    """One that listens and never answers."""
    monkeypatch.setattr(meeting, "_PORT_WITHIN", 0.2)
    monkeypatch.setattr(meeting, "_GRACE", 0.2)
    monkeypatch.setattr(meeting, "_ANSWER_WITHIN", 0.3)
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        ranks = Ranks(1, world_size=2, local_world_size=2, master_port=port)
        with pytest.raises(
            ValueError, match=rf"MASTER_PORT={port} on 127\.0\.0\.1 is in use by another .*program; give this job"
        ):
            act(ranks)


def test_who_speaks_otherwise_or_leaves_disturbs_nobody():
    found: list = []
    ranks = [Ranks(rank, world_size=2, local_world_size=2, master_port=free_port()) for rank in range(2)]
    ranks[1] = replace(ranks[1], master_port=ranks[0].master_port)
    host = start(ranks[0], "s", found, 5)
    host.start()
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b'{"hello": "other"}\n', b"\xff\n", b"{" * 70000 + b"\n", b""):
        for _ in range(100):
            try:
                with socket.create_connection(("127.0.0.1", ranks[0].master_port), 5) as visitor:
                    visitor.sendall(said)
                break
            except ConnectionRefusedError:
                continue
            except OSError:  # it closed before it had read everything
                break
    run_all([start(ranks[1], "s", found, 5)])
    host.join(20)
    assert sorted(found) == [(5, 5), (5, ranks[0].master_port)]


def test_ports_that_were_given_out_are_not_given_again():
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == 300
    with socket.create_server(("127.0.0.1", ports[0])):  # what they are for
        pass
