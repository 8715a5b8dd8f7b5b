"""The process group, and every collective that this library issues itself.

Ranks meet once (`start`), agree on small JSON values, and add up numbers. Gradients travel through DeepSpeed.
"""

from __future__ import annotations

import datetime
import json
import os
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, imported later, then does not search and warn

# A rank that died closes its sockets and is noticed at once; this bounds the wait for one that hangs.
TIMEOUT = datetime.timedelta(minutes=10)


def start() -> None:
    """Join the default process group described by the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    A process without WORLD_SIZE, or with 1, is alone and needs no port. Raises ValueError when the port is taken.
    """
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if os.environ.get("WORLD_SIZE", "1") == "1":
        dist.init_process_group(backend, timeout=TIMEOUT, store=dist.HashStore(), rank=0, world_size=1)
        return
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = f"MASTER_PORT={os.environ['MASTER_PORT']}"
        raise ValueError(
            f"{port} is in use, perhaps by another job; give this one another by --master_port N"
        ) from error


def stop() -> None:
    """Leave the process group."""
    dist.destroy_process_group()


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def rank() -> int:
    """Number of this process among all."""
    return dist.get_rank()


def sum_over_ranks(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Add `value` over the ranks of `group`, in place, and return it."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(value, group=group)
    return value


def max_over_ranks(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The largest `value` of the ranks of `group`, element by element, in place."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value


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
    dist.all_gather(sizes, torch.tensor([payload.numel()], device=device()))
    widest = max(int(size) for size in sizes)
    padded = torch.zeros(widest, dtype=torch.uint8, device=device())
    padded[: payload.numel()] = payload
    gathered = [torch.zeros_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded)
    return [
        json.loads(bytes(row[: int(size)].cpu().tolist()).decode()) for row, size in zip(gathered, sizes, strict=True)
    ]


def same_on_all_ranks(value: Any) -> bool:
    """Whether all ranks gave the same JSON-able value."""
    first, *others = gather_json(value)
    return all(other == first for other in others)


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier()


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
