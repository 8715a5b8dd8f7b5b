"""Which rank reads which samples: index arithmetic, nothing else.

Training: step s (from 0) holds samples [s G, (s + 1) G) of the blend, G = micro batch x micro batches x data-parallel
size. Micro step m takes the m-th contiguous piece of them, and rank r the r-th contiguous piece of that, so that the
set of samples of a micro step does not depend on how many ranks share it.

Evaluation: the first N windows of a split in file order, each counted once, with as many batches on every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from recipes.data.blend import Blend, TokenSource
from recipes.data.indexed import num_windows


def step_indices(
    step: int, micro_batch_size: int, num_micro_batches: int, dp_rank: int = 0, dp_size: int = 1
) -> np.ndarray:
    """Global sample numbers of one rank at one step: int64 [num_micro_batches, micro_batch_size]."""
    assert 0 <= dp_rank < dp_size and step >= 0
    shape = (num_micro_batches, dp_size, micro_batch_size)
    first = step * micro_batch_size * num_micro_batches * dp_size
    return (first + np.arange(np.prod(shape), dtype=np.int64)).reshape(shape)[:, dp_rank]


def global_batch(
    blend: Blend, step: int, micro_batch_size: int, num_micro_batches: int, dp_rank: int = 0, dp_size: int = 1
) -> list[np.ndarray]:
    """The rank's micro batches of one step, each int64 [micro_batch_size, seq_length + 1]."""
    return [blend.samples(row) for row in step_indices(step, micro_batch_size, num_micro_batches, dp_rank, dp_size)]


@dataclass(frozen=True)
class EvalBatch:
    """tokens_BS1: int64 [batch, seq_length + 1]; weight_B: float32, 1 for a sample that counts and 0 for padding."""

    tokens_BS1: np.ndarray
    weight_B: np.ndarray


@dataclass(frozen=True)
class EvalSet:
    """The first `num_samples` windows of a source, in file order and unshuffled, dealt to ranks in equal batches.

    A mean over all ranks weighted by `weight_B` is the mean over `num_used` distinct samples, whatever the layout.
    """

    source: TokenSource
    seq_length: int
    num_samples: int
    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def num_used(self) -> int:
        """Samples that count: those asked for, or all there are if fewer. Never a repeat."""
        return min(self.num_samples, num_windows(len(self.source.ids), self.seq_length))

    @property
    def note(self) -> str | None:
        """What to tell the user when the split is smaller than asked for."""
        if self.num_used == self.num_samples:
            return None
        return (
            f"evaluation of {self.source.name}: the split has {self.num_used} samples of {self.seq_length} tokens, "
            f"{self.num_samples} were asked for; using {self.num_used}"
        )

    def __len__(self) -> int:
        """Batches, equal on every rank."""
        return -(-self.num_used // (self.micro_batch_size * self.dp_size))

    def __iter__(self) -> Iterator[EvalBatch]:
        for batch in range(len(self)):
            index_B = step_indices(batch, self.micro_batch_size, 1, self.dp_rank, self.dp_size)[0]
            weight_B = (index_B < self.num_used).astype(np.float32)
            begins_B = np.where(index_B < self.num_used, index_B, 0) * self.seq_length
            tokens_BS1 = np.stack([self.source.ids[b : b + self.seq_length + 1] for b in begins_B]).astype(np.int64)
            yield EvalBatch(tokens_BS1, weight_B)
