"""`metrics.jsonl`: one strict JSON object per line, flushed line by line, each step once however often the run resumes.

JSON has no NaN or infinity. A non-finite value is written as null, and the object's `nonfinite` names what stood there:

    {"step": 7, "lm_loss": null, "grad_norm": 1.5, "nonfinite": {"lm_loss": "nan"}}

The kind is kept, not only the key: "inf" (overflow) and "nan" (inf - inf, 0 / 0) point to different causes.
`read_metrics` puts the floats back, so writing and reading is a round trip.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.files import open_append, parse_json, replace_text

Scalar = float | int | str | bool | None
_NONFINITE = ("nan", "inf", "-inf")


class MetricsFile:
    """Appends the metrics of steps to a file.

    Args:
        path: the file; its folder must exist.
        resume_step: None starts a new file. s continues after optimizer step s: lines of later steps, which the resumed
            run computes again, and a last line torn by a crash are removed first.

    Raises:
        ValueError: the file exists in a new run, or a line of it cannot be read.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        if resume_step is None:
            if path.exists():
                raise ValueError(f"{path} exists and this run is new; set run.resume=auto or choose another run.dir")
        elif path.exists():
            kept = [line for line, row in _parse(path) if row["step"] <= resume_step]
            replace_text(path, "".join(f"{line}\n" for line in kept))
        self._file = open_append(path)

    def write(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Append one line for optimizer step `step` (1-based). `values` are plain Python scalars."""
        row: dict[str, Any] = {"step": step, **values}
        nonfinite = {key: str(v) for key, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        if nonfinite:
            row |= dict.fromkeys(nonfinite, None) | {"nonfinite": nonfinite}
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class NoMetrics:
    """Records nothing, for ranks other than 0."""

    def write(self, step: int, values: Mapping[str, Scalar]) -> None:
        return

    def close(self) -> None:
        return


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics file in order, non-finite values as floats again; a torn last line is left out.

    Raises:
        ValueError: a line before the last is not a JSON object with an integer `step`.
    """
    rows = []
    for _, row in _parse(path):
        row |= {key: float(kind) for key, kind in row.pop("nonfinite", {}).items()}
        rows.append(row)
    return rows


def _parse(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(text, object) of each complete line. Only a last line without its newline may be incomplete."""
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path}: is missing, or no regular file")
    # A torn line may end inside a character: replace what does not decode, the line is dropped anyway.
    *lines, _torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not _is_row(row):
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with an integer 'step', found {line[:80]!r}; "
                "remove the line, or move the file away to start a new one"
            )
        parsed.append((line, row))
    return parsed


def _is_row(row: Any) -> bool:
    """Whether it is what `write` writes: a step, and of what is not finite the kind."""
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < 2**63:
        return False
    kinds = row.get("nonfinite", {})
    return isinstance(kinds, dict) and all(isinstance(kind, str) and kind in _NONFINITE for kind in kinds.values())
