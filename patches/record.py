"""What a patch is: the record that every file under patches/ fills in, and the conditions they share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Wrapper = Callable[[Any], Any]


def always() -> bool:
    """The condition of a defect that shows everywhere."""
    return True


def without_cuda() -> bool:
    """Whether torch finds no CUDA device on this machine."""
    import torch

    return not torch.cuda.is_available()


@dataclass(frozen=True)
class Patch:
    """One upstream defect and its correction.

    Attributes:
        name: `<library>.<file>`, as it appears in messages and in the run folder.
        library: distribution whose installed version is checked.
        versions: PEP 440 specifier of the affected versions, with an upper bound.
        why: the defect and its effect, one sentence.
        upstream: link to the report, or the place in the upstream source.
        wrappers: target `module:attribute.path` -> function from the original object to its replacement.
        condition: whether the defect can show on this machine; the patch is left out where it cannot.
    """

    name: str
    library: str
    versions: str
    why: str
    upstream: str
    wrappers: Mapping[str, Wrapper]
    condition: Callable[[], bool] = always
