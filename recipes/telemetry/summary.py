"""JSON files of the run folder that are replaced as a whole: `summary.json`, `environment.json`."""

import json
import math
from pathlib import Path
from typing import Any

from recipes.files import replace_text


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
