"""Which text a run reads: recorded in its checkpoints, and compared when it goes on.

data set -> record() -> {"eod": 2, "domains": {"en": {"train": {"tokens": 1000, "documents": 3, "bin": SHA-256, "idx": SHA-256}}}}
record, data set -> changes() -> what differs, in both

Digests are those of `dataset.json`. For data sets that have none they are taken from the files, of large .bin files at evenly
spread places.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from recipes.data.dataset import DatasetInfo

_WHOLE_BYTES = 1 << 26  # files up to this size are read as a whole
_BLOCKS, _BLOCK_BYTES = 256, 1 << 16
_SAMPLED = "sampled:"
_SHOWN = 3  # differences in one message


def record(info: DatasetInfo) -> dict[str, Any]:
    """As plain JSON."""
    domains = {
        domain: {
            split: {
                "tokens": size.tokens,
                "documents": size.documents,
                **(size.content or _digests(info, domain, split)),
            }
            for split, size in splits.items()
        }
        for domain, splits in info.domains.items()
    }
    return {"eod": info.eod, "domains": domains}


def changes(recorded: Any, info: DatasetInfo) -> tuple[str, str] | None:
    """What was recorded and what `info` has where they differ, as text; None when they are the same.

    Raises ValueError when `recorded` is not what `record` makes.
    """
    try:
        old = {
            (domain, split): size for domain, splits in recorded["domains"].items() for split, size in splits.items()
        }
        new = {(domain, split): size for domain, splits in info.domains.items() for split, size in splits.items()}
        different = [place for place in old if place not in new or not _same(old[place], info, *place)]
        different += [place for place in new if place not in old]
        if not different:
            return None
        theirs = [_show(place, old.get(place)) for place in different[:_SHOWN]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the record of the data is damaged ({error!r:.80}); take another step") from error
    now = record(info)["domains"]
    ours = [_show(place, now.get(place[0], {}).get(place[1])) for place in different[:_SHOWN]]
    more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
    return ", ".join(theirs) + more, ", ".join(ours) + more


def _same(recorded: dict[str, Any], info: DatasetInfo, domain: str, split: str) -> bool:
    size = info.domains[domain][split]
    if (recorded["tokens"], recorded["documents"]) != (size.tokens, size.documents):
        return False
    digests = size.content
    if digests is None or recorded["bin"].startswith(_SAMPLED):
        digests = _digests(info, domain, split, sample=recorded["bin"].startswith(_SAMPLED))
    return all(recorded[suffix] == digests[suffix] for suffix in ("bin", "idx"))


def _show(place: tuple[str, str], size: dict[str, Any] | None) -> str:
    name = f"{place[0]:.40} {place[1]:.8}"
    return f"no {name}" if size is None else f"{name} {size['tokens']:,} tokens {size['bin'].removeprefix(_SAMPLED):.8}"


def _digests(info: DatasetInfo, domain: str, split: str, sample: bool | None = None) -> dict[str, str]:
    """SHA-256 of both files; of the .bin with `sample` at some places only (default: when it is large)."""
    prefix = info.folder / f"{domain}_{split}"
    data, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    sample = data.stat().st_size > _WHOLE_BYTES if sample is None else sample
    return {"bin": _sampled(data) if sample else _whole(data), "idx": _whole(index)}


def _whole(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sampled(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for block in range(_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * block // (_BLOCKS - 1) if size > _BLOCK_BYTES else 0)
            digest.update(file.read(_BLOCK_BYTES))
    return _SAMPLED + digest.hexdigest()
