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

    A tensor takes at most half as much again as it needs; whenever nothing suitable is left, all that is unused is given back.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, torch.UntypedStorage]] = []  # bytes
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
        unused = [memory for memory, storage in self._kept if _holders(storage) == _OWN]
        if fitting := [memory for memory in unused if size <= len(memory) <= 1.5 * size]:
            return min(fitting, key=len)
        del unused
        self._kept = [(memory, storage) for memory, storage in self._kept if _holders(storage) > _OWN]
        step = 1 << (size.bit_length() - 4)  # up to an eighth more: numbers of rows vary from step to step
        memory = torch.empty(-(-size // step) * step, dtype=torch.uint8)
        self._kept.append((memory, memory.untyped_storage()))
        return memory


def _holders(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


recycler = Recycler()
