"""The random number generators of a rank as tensors: Python, NumPy, torch (CPU and CUDA), megatron-core's tracker."""

from __future__ import annotations

import random

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

_TRACKER = "tracker/"


def rng_state() -> dict[str, torch.Tensor]:
    """Every generator's state."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": torch.tensor([version, *numbers], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy_keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state | {f"{_TRACKER}{name}": value for name, value in get_cuda_rng_tracker().get_states().items()}


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Restore what `rng_state` returned."""
    version, *numbers = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(numbers), gauss[0] if gauss else None))
    position, has_gauss = state["numpy_position"].tolist()
    keys = state["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(state["numpy_gauss"])))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tracked = {name.removeprefix(_TRACKER): value for name, value in state.items() if name.startswith(_TRACKER)}
    get_cuda_rng_tracker().set_states(tracked)
