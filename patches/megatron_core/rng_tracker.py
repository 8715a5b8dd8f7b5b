"""The random state tracker reads, seeds and restores the CUDA generator only, so dropout in a region fails on CPU.

Without CUDA the one generator there is, torch's default CPU generator, takes the part of the device's. Some of the
calls do not even fail: `torch.cuda.manual_seed` and `_set_cuda_rng_state` queue work for a CUDA start that never comes.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from patches.megatron_core.torch_view import torch_view
from patches.record import Patch, without_cuda

_MODULE = "megatron.core.tensor_parallel.random"


def _one_generator(torch: ModuleType) -> ModuleType:
    nothing = torch.empty(0, dtype=torch.uint8)
    return torch_view(
        torch,
        cuda={"get_rng_state": torch.get_rng_state, "manual_seed": torch.default_generator.manual_seed},
        # No generator is left for the host: saving, comparing and restoring its state are vacuous. Otherwise each fork
        # would warn that it moved the host's generator.
        host={"get_rng_state": lambda: nothing, "set_rng_state": lambda _state: None},
    )


def _get_default_state(_get_cuda_rng_state: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    return get_state


def _set_default_state(_set_cuda_rng_state: Callable[..., None]) -> Callable[..., None]:
    import torch

    def set_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    return set_state


PATCH = Patch(
    name="megatron_core.rng_tracker",
    library="megatron-core",
    versions=">=0.16.1,!=0.17.*,!=0.18.*,<0.20",
    why="seeds, dropout regions and recomputation need a CUDA generator",
    upstream="megatron/core/tensor_parallel/random.py: CudaRNGStatesTracker, _set_cuda_rng_state",
    wrappers={
        f"{_MODULE}:torch": _one_generator,
        f"{_MODULE}:_get_cuda_rng_state": _get_default_state,
        f"{_MODULE}:_set_cuda_rng_state": _set_default_state,
    },
    condition=without_cuda,
)
