"""JSON files of the run folder that are replaced as a whole: `summary.json`, `environment.json`."""

import json
import math
import os
from pathlib import Path
from typing import Any


def replace_text(path: Path, text: str) -> None:
    """Put `text` at `path` so that a reader, or a crash at any moment, sees the old file or the new one, never a part.

    Raises:
        OSError: the folder is missing, full or not writable; `path` is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # a rename is atomic only within one file system
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write `values` to `path` atomically as strict, indented JSON; NaN and infinities, which it lacks, become null."""
    text = json.dumps(_null_nonfinite(values), indent=2, ensure_ascii=False, allow_nan=False)
    replace_text(path, text + "\n")


def _null_nonfinite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _null_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_null_nonfinite(item) for item in value]
    return value
