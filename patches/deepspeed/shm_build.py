"""DeepSpeed compiles a shared-memory collective whenever a process group starts on CPU.

`TorchBackend.__init__` calls `build_shm_op`, which runs the C++ compiler at the first start (tens of seconds). A
process killed meanwhile leaves a lock file behind, on which every later start waits for ever. No option turns it off;
gloo does the same collectives.
"""

from collections.abc import Callable
from typing import Any

from patches.record import Patch, without_cuda


def _never_built(_build_shm_op: Callable[[], Any]) -> Callable[[], None]:
    def build_shm_op() -> None:
        return None  # what upstream returns where the op is not compatible: collectives then go to gloo

    return build_shm_op


PATCH = Patch(
    name="deepspeed.shm_build",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    why="init_distributed runs a C++ compiler on CPU, and a killed build leaves a lock that hangs later starts",
    upstream="https://github.com/deepspeedai/DeepSpeedExamples/issues/302 (wait on the lock of a JIT build)",
    wrappers={"deepspeed.comm.torch:build_shm_op": _never_built},
    condition=without_cuda,
)
