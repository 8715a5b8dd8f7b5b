"""Embeddings, linear layers and collectives allocate on `torch.cuda.current_device()`, which raises without CUDA.

`use_cpu_initialization` covers parameters at construction only; rotary embeddings, sequence parallel regions and
gathers allocate in the forward and backward pass.
"""

from types import ModuleType

from patches.megatron_core.torch_view import torch_view
from patches.record import Patch, without_cuda

_MODULES = (
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.utils",
    "megatron.core.utils",  # the buffer of gathers under sequence parallelism
)


def _on_cpu(torch: ModuleType) -> ModuleType:
    return torch_view(torch, cuda={"current_device": lambda: torch.device("cpu")})


PATCH = Patch(
    name="megatron_core.current_device",
    library="megatron-core",
    versions=">=0.16.1,!=0.17.*,!=0.18.*,<0.20",
    why="rotary embeddings, linear layers and tensor parallel regions allocate on a CUDA device",
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/6270 (the same assumption elsewhere, for conversion on CPU)",
    wrappers={f"{module}:torch": _on_cpu for module in _MODULES},
    condition=without_cuda,
)
