"""The process group, and every collective that this library issues itself.

Ranks meet once (`start`), agree on small JSON values, and add up numbers. Gradients travel through DeepSpeed. A thread that
must not meet the collectives of the main thread works `apart`.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from recipes.launcher import Ranks, rank_environment
from recipes.meeting import Meeting, Member, join

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, imported later, then does not search and warn

# A rank that died closes its sockets and is noticed at once; this bounds the wait for one that hangs.
TIMEOUT = datetime.timedelta(minutes=10)
_MEETING = "sparse-pretraining-recipes"  # prefix of our keys in a launcher's store
_store: dist.Store | None = None
_apart = threading.local()


def start(ranks: Ranks | None = None, settings: str = "") -> None:
    """Join the default process group as `ranks` says; None: as the environment does.

    `settings`: what must be equal on all ranks. Raises ValueError when it is not, when two ranks have the same device, or
    when the port is another job's.
    """
    global _store
    ranks = ranks or rank_environment(os.environ)
    cuda = torch.cuda.is_available()
    member = Member(ranks.rank, ranks.job, settings, socket.gethostname(), _device_name() if cuda else "")
    _store = dist.HashStore() if ranks.world_size == 1 else _meet(ranks, member)
    group_store = dist.PrefixStore("group", _store)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, store=group_store, rank=ranks.rank, world_size=ranks.world_size)


def _meet(ranks: Ranks, member: Member) -> dist.Store:
    """A key-value store of this job alone, in the process of rank 0, at a port that the system has chosen."""
    launchers = None
    limit = TIMEOUT.total_seconds()
    if ranks.shared_store:  # the launcher's own, which dies with the launcher
        launchers = dist.PrefixStore(_MEETING, dist.TCPStore(ranks.master_addr, ranks.master_port, timeout=TIMEOUT))
        ranks = replace(ranks, master_addr=_own_address(ranks), master_port=0, job=f"{ranks.job} {ranks.master_port}")
        if ranks.rank != 0:
            ranks = replace(ranks, master_addr=launchers.get("host").decode(), job=launchers.get("job").decode())
        member = replace(member, job=ranks.job)
    if ranks.rank != 0:
        port = join(ranks, member, limit)["port"]
        return dist.TCPStore(ranks.master_addr, port, is_master=False, timeout=TIMEOUT)
    meeting = Meeting(ranks, member)
    if launchers is not None:
        launchers.set("job", ranks.job)
        launchers.set("host", ranks.master_addr)
    meeting.gather(limit)
    store = dist.TCPStore(ranks.master_addr, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    meeting.answer({"port": store.port})
    return store


def _own_address(ranks: Ranks) -> str:
    """Where other nodes reach this process: from where it speaks to the launcher's host."""
    family, kind, _, _, address = socket.getaddrinfo(ranks.master_addr, ranks.master_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return ranks.master_addr if own.startswith("127.") or own == "::1" else own


def _device_name() -> str:
    """The current CUDA device, by a name that says the same in every process of the host."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def store() -> dist.Store:
    """The key-value store of this job; for use beside the process group, in another thread."""
    assert _store is not None
    return _store.clone()  # type: ignore[attr-defined]


def stop() -> None:
    """Leave the process group."""
    global _store
    dist.destroy_process_group()
    _store = None


def device() -> torch.device:
    """Where this rank computes, and where collectives of the calling thread take their tensors."""
    if torch.cuda.is_available() and not _is_apart():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside, collectives of this thread travel over groups of their own, on the CPU, beside whatever other threads wait for.

    The groups are made at their first use, by gloo. Reading CUDA tensors does not wait for what they are computing.
    """
    _apart.groups = {}
    stream = torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else contextlib.nullcontext()
    try:
        with stream:
            yield
    finally:
        _apart.groups = None


def _is_apart() -> bool:
    return getattr(_apart, "groups", None) is not None


def _own(group: dist.ProcessGroup | None) -> Any:  # ProcessGroupGloo, whose collectives torch does not declare
    """This thread's group of the same ranks. torch would name a new group by how many there are, which ranks differ in."""
    members = tuple(dist.get_process_group_ranks(group))
    if members not in _apart.groups:
        name = f"apart/{hashlib.sha256(str(members).encode()).hexdigest()}"
        place = (members.index(dist.get_rank()), len(members))
        _apart.groups[members] = dist.ProcessGroupGloo(dist.PrefixStore(name, store()), *place, TIMEOUT)
    return _apart.groups[members]


def _all_reduce(value: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> torch.Tensor:
    if dist.get_world_size(group) == 1:
        return value
    if not _is_apart():
        dist.all_reduce(value, op=op, group=group)
        return value
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]
    _own(group).allreduce([value], options).wait()
    return value


def _all_gather(parts: list[torch.Tensor], value: torch.Tensor) -> None:
    if _is_apart():
        _own(None).allgather([parts], [value]).wait()
    else:
        dist.all_gather(parts, value)


def rank() -> int:
    """Number of this process among all."""
    return dist.get_rank()


def sum_over_ranks(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Add `value` over the ranks of `group`, in place, and return it."""
    return _all_reduce(value, dist.ReduceOp.SUM, group)


def max_over_ranks(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The largest `value` of the ranks of `group`, element by element, in place."""
    return _all_reduce(value, dist.ReduceOp.MAX, group)


def join_fragments(flat: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Fill an fp32 tensor of which each rank holds a disjoint part, zero elsewhere; in place, bit for bit.

    The sum is taken over the bit patterns, since 0.0 + -0.0 is 0.0 but 0 + x is x for integers.
    """
    assert flat.dtype == torch.float32
    sum_over_ranks(flat.view(torch.int32), group)
    return flat


def broadcast_json(value: Any, source: int = 0) -> Any:
    """Rank `source`'s JSON-able value on all ranks."""
    return gather_json(value)[source]


def gather_json(value: Any) -> list[Any]:
    """The JSON-able values of all ranks, in rank order, on every rank."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return [json.loads(json.dumps(value))]
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device())
    sizes = [torch.zeros(1, dtype=torch.int64, device=device()) for _ in range(world_size)]
    _all_gather(sizes, torch.tensor([payload.numel()], device=device()))
    widest = max(int(size) for size in sizes)
    padded = torch.zeros(widest, dtype=torch.uint8, device=device())
    padded[: payload.numel()] = payload
    gathered = [torch.zeros_like(padded) for _ in range(world_size)]
    _all_gather(gathered, padded)
    return [
        json.loads(bytes(row[: int(size)].cpu().tolist()).decode()) for row, size in zip(gathered, sizes, strict=True)
    ]


def same_on_all_ranks(value: Any) -> bool:
    """Whether all ranks gave the same JSON-able value."""
    first, *others = gather_json(value)
    return all(other == first for other in others)


def barrier() -> None:
    """Wait for all ranks."""
    if not _is_apart():
        dist.barrier()
    elif dist.get_world_size() > 1:
        _own(None).barrier().wait()


def send(value: torch.Tensor, rank: int) -> None:
    """Send a tensor to a rank, which must `receive` it."""
    dist.send(value.contiguous(), rank)


def receive(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    """The tensor that a rank has sent."""
    value = torch.empty(shape, dtype=dtype, device=device())
    dist.recv(value, rank)
    return value


def group_size(group: dist.ProcessGroup) -> int:
    """Ranks in a group."""
    return dist.get_world_size(group)


def exchange_equal(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Row i of `rows` [P, ...] goes to rank i of the group; row i of the result came from there."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows.contiguous(), group=group)
    return received


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup):
        ctx.back = (received, sent, group)
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _all_to_all(grad, *ctx.back), None, None, None


def _all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def exchange_rows(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """All-to-all of uneven pieces: the first sent[0] rows go to rank 0, and so on; gradients travel back the same way."""
    return _ExchangeRows.apply(rows, sent, received, group)
