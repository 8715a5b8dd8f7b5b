"""Large tensors in memory that an earlier tensor has left.

The C library gives large blocks back to the system at once, and the system hands them out again page by page, filled with
zeros: writing a new gradient of 64 experts of 1 MB each takes three times as long as writing over an old one. (On CUDA torch's
own allocator keeps them.)
"""

from __future__ import annotations

import threading

import torch

_LEAST_BYTES = 1 << 20  # smaller blocks stay within the C library
_OWN = 2  # holders of a kept storage that are ours: the tensor and the Python object of the storage


class Recycler:
    """Keeps the memory of the tensors that it has made, and makes new ones of it when no other tensor has it.

    A tensor takes at most half as much again as it needs. What is kept is at most a quarter more than was once in use at the
    same time; beyond that, what has been unused for longest is given back.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}  # bytes by address, last given out last
        self._most = 0  # bytes in use at the same time
        self._lock = threading.Lock()  # backward passes of several devices run in threads of their own

    def empty_like(self, other: torch.Tensor) -> torch.Tensor:
        """As torch.empty_like of a contiguous tensor."""
        return self.empty(tuple(other.shape), other)

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """As like.new_empty(shape)."""
        size = torch.Size(shape).numel() * like.element_size()
        if like.device.type != "cpu" or size < _LEAST_BYTES:
            return like.new_empty(shape)
        with self._lock:
            memory = self._unused(size)
            return memory[:size].view(like.dtype).view(shape)

    def _unused(self, size: int) -> torch.Tensor:
        unused = {
            address: len(memory) for address, (memory, storage) in self._kept.items() if _holders(storage) == _OWN
        }
        kept = sum(len(memory) for memory, _ in self._kept.values())
        in_use = kept - sum(unused.values())
        if fitting := [address for address, length in unused.items() if size <= length <= 1.5 * size]:
            address = min(fitting, key=unused.__getitem__)
            self._kept[address] = self._kept.pop(address)
            self._most = max(self._most, in_use + unused[address])
            return self._kept[address][0]
        step = 1 << (size.bit_length() - 4)  # up to an eighth more: numbers of rows vary from step to step
        length = -(-size // step) * step
        self._most = max(self._most, in_use + length)
        for address in unused:
            if kept + length <= 1.25 * self._most:
                break
            kept -= unused[address]
            del self._kept[address]
        memory = torch.empty(length, dtype=torch.uint8)
        self._kept[memory.data_ptr()] = memory, memory.untyped_storage()
        return memory


def _holders(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


recycler = Recycler()
