"""What another value of a key means when a run goes on from a checkpoint: said in the type of each field of
`recipes/config.py`.

    seed: Identity[int] = 1234        micro_batch_size: Said[int] = 8        load_step: Free[int | None] = None
"""

from __future__ import annotations

import enum
import typing
from typing import Annotated, TypeVar

T = TypeVar("T")
# What is no key of the description but part of a run's identity all the same, as run.resume_with names it.
TOKENIZER, CONTENT = "data.tokenizer", "data.content"


class OnResume(enum.Enum):
    """The class of a key on resume."""

    identity = "identity"  # it would be another run: refused, unless run.resume_with names the key
    said = "said"  # it may change, and is said in one line
    free = "free"  # it says how this job starts, or has no effect in `recipes.pretrain`


Identity = Annotated[T, OnResume.identity]
Said = Annotated[T, OnResume.said]
Free = Annotated[T, OnResume.free]


def classes(schema: type) -> dict[str, OnResume]:
    """The class of each field of a group's dataclass. Raises TypeError for a field without one."""
    hints = typing.get_type_hints(schema, include_extras=True)
    found = {}
    for name, hint in hints.items():
        given = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, OnResume)]
        if len(given) != 1:
            raise TypeError(f"{schema.__name__}.{name}: annotate it as Identity[...], Said[...] or Free[...]")
        found[name] = given[0]
    return found
