"""Routing that learns nothing, to measure what learned routing is worth: a fixed table of token ids, and chance.

Both depend on the seed, the layer and the tokens of the document up to the one that is routed, so that no layout, batch or resumed
run changes them, and evaluation and generation do as training does.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from recipes.data.packing import Documents


def hash_table(vocab_size: int, num_experts: int, topk: int, seed: int, layer: int) -> torch.Tensor:
    """Experts of each token id: int64 [V, K] (Roller et al. 2021, arXiv 2106.04426, sec. 3.1, random hash).

    Each expert has as many ids as any other, or one more, in each of the K columns; how often ids occur is not considered.
    """
    generator = _generator(f"{seed}:hash:{layer}")
    first_V = torch.empty(vocab_size, dtype=torch.int64)
    first_V[torch.randperm(vocab_size, generator=generator)] = torch.arange(vocab_size) % num_experts
    steps_K = torch.randperm(num_experts, generator=generator)[:topk]
    return (first_V[:, None] + steps_K) % num_experts


def prefix_keys(tokens_BS: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
    """A number for each token that depends on it and on all before it in its document, or sequence (None): int64 [B, S]."""
    batch, sequence = tokens_BS.shape
    documents = [[sequence]] * batch if documents is None else documents
    starts = [np.repeat(np.cumsum(lengths) - lengths, lengths) for lengths in documents]
    starts_BS = torch.from_numpy(np.stack(starts)).to(tokens_BS.device)
    positions_BS = torch.arange(sequence, device=tokens_BS.device) - starts_BS
    own_BS = _mix(tokens_BS + (positions_BS << 32))
    sums_BS = own_BS.cumsum(1)  # modulo 2^64, as is what is taken off again
    return _mix(sums_BS - (sums_BS - own_BS).gather(1, starts_BS))


def salts(num_experts: int, seed: int, layer: int) -> torch.Tensor:
    """What makes the chances of one layer: int64 [E]."""
    return torch.randint(-(2**63), 2**63 - 1, (num_experts,), generator=_generator(f"{seed}:random:{layer}"))


def random_choice(keys_T: torch.Tensor, salts_E: torch.Tensor, topk: int) -> torch.Tensor:
    """K different experts per token, all equally likely: int64 [T, K]."""
    return _mix(keys_T[:, None] ^ salts_E).topk(topk, dim=1).indices


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 64-bit numbers of which every bit depends on all (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _generator(name: str) -> torch.Generator:
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
