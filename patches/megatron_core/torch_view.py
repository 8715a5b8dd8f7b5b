"""A stand-in for the name `torch` inside single megatron-core modules, with some functions replaced.

Rebinding `torch` in the modules that need it leaves `torch.cuda` as it is for every other library: a global replacement
of, say, `torch.cuda.current_device` would tell all of them that there is a device.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

Functions = Mapping[str, Callable[..., Any]]


def torch_view(torch: ModuleType, cuda: Functions, host: Functions | None = None) -> ModuleType:
    """Return a module equal to `torch`, with the functions `host` in it and `cuda` in its `cuda`.

    `torch` and `torch.cuda` themselves stay untouched.
    """
    return _copy(torch, {**(host or {}), "cuda": _copy(torch.cuda, cuda)})


def _copy(module: ModuleType, replaced: Mapping[str, Any]) -> ModuleType:
    copy = ModuleType(module.__name__, module.__doc__)
    vars(copy).update(vars(module))
    # An attribute that the original gets later (a submodule imported meanwhile) is looked up there.
    vars(copy).update(replaced, __getattr__=lambda name: getattr(module, name))
    return copy
