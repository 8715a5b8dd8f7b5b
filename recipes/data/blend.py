"""A weighted blend of domains whose k-th sample depends on (seed, k) and the data, and on nothing else.

Not on the number of steps, ranks, micro batches or workers, nor on what was read before; so a run may be resumed,
extended or laid out anew at any sample in constant time. (`megatron.core.datasets.GPTDataset` shuffles over the number
of samples asked for: another number of steps is another order.) The global generators of numpy and torch are not used.

1. `BlendOrder`: k -> (domain, j), the j-th sample of that domain.
2. `_Pass`: pass e over a domain shuffles its documents, joins them, and cuts windows of seq_length + 1 ids that overlap
   by one id; the windows are shuffled too. Sample j is window j mod n of pass j // n.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from recipes.data.dataset import DatasetInfo
from recipes.data.indexed import check_ids, num_windows

# Weights are rounded to 1 / PERIOD; the order of the domains repeats after about so many samples.
PERIOD = 1 << 18
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class TokenSource(Protocol):
    """`ids`: every id of a domain [num_tokens]; `offsets`: where documents begin and the end, int64 [documents + 1]."""

    name: str
    ids: np.ndarray
    offsets: np.ndarray


def resolve_weights(tokens: Mapping[str, int], weights: str | Mapping[str, float] = "proportional") -> dict[str, float]:
    """Sampling probability of each domain used, sorted by name, summing to 1.

    tokens: size of each domain. weights: "proportional" (to tokens; also {}), "uniform", or a weight per domain, those
    not named being left out. Raises ValueError for an unknown domain, an empty one, or an illegal weight.
    """
    if weights == "proportional" or not weights:
        given: dict[str, float] = dict(tokens)
    elif weights == "uniform":
        given = {name: float(count > 0) for name, count in tokens.items()}
    elif isinstance(weights, str):
        raise ValueError(f"data.domain_weights={weights!r}: use proportional, uniform, or a weight per domain")
    else:
        given = dict(weights)
    for name, weight in given.items():
        if name not in tokens:
            raise ValueError(f"data.domain_weights.{name}: no such domain, the data has {', '.join(sorted(tokens))}")
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"data.domain_weights.{name}={weight}: a weight is a finite number >= 0")
        if weight > 0 and tokens[name] == 0:
            raise ValueError(
                f"data.domain_weights.{name}={weight}: this domain has no tokens in the split; leave it out"
            )
    total = math.fsum(given.values())
    if total == 0:
        raise ValueError(f"data.domain_weights={weights}: all weights are 0; the data has {', '.join(sorted(tokens))}")
    return {name: weight / total for name, weight in sorted(given.items()) if weight > 0}


class BlendOrder:
    """Which domain the k-th sample comes from: a fixed interleaving, spread as evenly as the weights allow.

    In one period domain i has n_i = round(PERIOD w_i) samples; its j-th stands at time (j + phase_i) / n_i, and the
    domains' samples are merged by time. Phases follow the golden ratio, so that equal domains do not come in bursts.
    """

    def __init__(self, weights: Sequence[float]):
        per_period = np.maximum(1, np.rint(np.asarray(weights, np.float64) * PERIOD)).astype(np.int64)
        phases = np.arange(1, len(per_period) + 1) * _GOLDEN_RATIO % 1.0
        ranks = [np.arange(count) for count in per_period]
        times = np.concatenate([(rank + phase) / len(rank) for rank, phase in zip(ranks, phases, strict=True)])
        order = np.argsort(times, kind="stable")
        self._per_period = per_period
        self._sources = np.repeat(np.arange(len(per_period)), per_period)[order]
        self._ranks = np.concatenate(ranks)[order]

    def locate(self, k: int) -> tuple[int, int]:
        """(index of the domain, number of earlier samples from that domain) of sample k >= 0."""
        if k < 0:
            raise ValueError(f"sample {k}: samples count from 0")
        period, position = divmod(k, len(self._sources))
        source = int(self._sources[position])
        return source, period * int(self._per_period[source]) + int(self._ranks[position])

    def counts(self, num_samples: int) -> np.ndarray:
        """How many of the first `num_samples` come from each domain: int64 [num_domains]."""
        periods, rest = divmod(num_samples, len(self._sources))
        return periods * self._per_period + np.bincount(self._sources[:rest], minlength=len(self._per_period))


class _Pass:
    """Pass `index` over one source: shuffled documents joined to one stream, windows cut from it and shuffled.

    A source shorter than one window is repeated within the pass until it fills one. The windows leave up to
    seq_length - 1 ids unused; the stream's start is random within that slack, so every id is used in some pass.
    """

    def __init__(self, source: TokenSource, seq_length: int, seed: int, index: int):
        name = int.from_bytes(hashlib.sha256(source.name.encode()).digest()[:8])
        # Raw bits of a bit generator are stable across numpy versions (NEP 19); Generator.permutation is not.
        bits = np.random.Philox(np.random.SeedSequence([seed, name, index]))
        lengths = np.diff(source.offsets)
        repeats = -(-(seq_length + 1) // len(source.ids))
        documents = [np.argsort(bits.random_raw(len(lengths)), kind="stable") for _ in range(repeats)]
        self._source, self._seq_length = source, seq_length
        self._documents = np.concatenate(documents)
        self._ends = np.cumsum(lengths[self._documents], dtype=np.int64)
        windows = num_windows(int(self._ends[-1]), seq_length)
        slack = int(self._ends[-1]) - 1 - windows * seq_length
        self._start = int(bits.random_raw()) % (slack + 1)
        self._windows = np.argsort(bits.random_raw(windows), kind="stable")

    def window(self, index: int) -> np.ndarray:
        """int64 [seq_length + 1]"""
        begin = self._start + int(self._windows[index]) * self._seq_length
        end = begin + self._seq_length + 1
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        documents = self._documents[first : last + 1]
        lows, highs = self._source.offsets[documents], self._source.offsets[documents + 1]
        lows[0] = highs[0] - (self._ends[first] - begin)
        highs[-1] -= self._ends[last] - end
        parts = [self._source.ids[low:high] for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]
        return np.concatenate(parts, dtype=np.int64)


class Blend:
    """Random access to the endless sequence of training samples.

    sources: one per domain; weights: their sampling probabilities, in the same order; seq_length: ids per sample - 1;
    vocab_size: every sample's ids must be below it (None: not checked). Raises ValueError for a source without ids, and at
    a sample with an id beyond the vocabulary.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        weights: Sequence[float],
        seq_length: int,
        seed: int,
        vocab_size: int | None = None,
    ):
        for source in sources:
            if len(source.ids) == 0:
                raise ValueError(f"domain {source.name!r} has no tokens; leave it out of the blend")
        names = [source.name for source in sources]
        assert len(weights) == len(names) == len(set(names)) > 0 and seq_length > 0 and seed >= 0
        self.sources, self.seq_length, self.seed, self.vocab_size = list(sources), seq_length, seed, vocab_size
        self.order = BlendOrder(weights)
        self._passes: list[dict[int, _Pass]] = [{} for _ in sources]

    def source_of(self, k: int) -> int:
        """Index of the source that sample k comes from."""
        return self.order.locate(k)[0]

    def sample(self, k: int) -> np.ndarray:
        """Sample k: int64 [seq_length + 1], a fresh array."""
        index, j = self.order.locate(k)
        source = self.sources[index]
        windows = max(1, num_windows(len(source.ids), self.seq_length))
        ids = self._pass(index, j // windows).window(j % windows)
        if self.vocab_size is not None:
            check_ids(ids, self.vocab_size, f"{source}, sample {k}")
        return ids

    def samples(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """The samples named, stacked: int64 [len(indices), seq_length + 1]."""
        return np.stack([self.sample(int(k)) for k in indices])

    def _pass(self, index: int, number: int) -> _Pass:
        """The pass asked for; the last two of each source are kept, as a batch may straddle a border."""
        kept = self._passes[index]
        if number not in kept:
            if len(kept) == 2:
                del kept[next(iter(kept))]
            kept[number] = _Pass(self.sources[index], self.seq_length, self.seed, number)
        return kept[number]


def open_blend(
    info: DatasetInfo, weights: str | Mapping[str, float], seq_length: int, seed: int, split: str = "train"
) -> Blend:
    """The blend of a data set's domains; `weights` as in `resolve_weights`."""
    resolved = resolve_weights(info.tokens(split), weights)
    sources = [info.open(name, split) for name in resolved]
    return Blend(sources, list(resolved.values()), seq_length, seed, info.vocab_size)


def require_samples(
    info: DatasetInfo, weights: str | Mapping[str, float], seq_length: int, num_samples: int, split: str = "train"
) -> None:
    """Raises ValueError if a run of `num_samples` would see some domain more than once (for `data.wrap=false`)."""
    resolved = resolve_weights(info.tokens(split), weights)
    needed = BlendOrder(list(resolved.values())).counts(num_samples)
    available = [info.num_samples(name, split, seq_length) for name in resolved]
    short = [
        f"{name} has {have} of the {need} needed"
        for name, have, need in zip(resolved, available, needed.tolist(), strict=True)
        if need > have
    ]
    if short:
        raise ValueError(
            f"data.wrap=false: the run draws {num_samples} samples of {seq_length} tokens and the {split} data has "
            f"{sum(available)}; {', '.join(short)}. Lower train.steps, change data.domain_weights, "
            "add data, or set data.wrap=true"
        )
