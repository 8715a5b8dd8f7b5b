"""What a fuzzer knows of a command: it answers, or refuses with exit code 2 and one message, soon and in little memory."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

LONGEST = 5.0  # seconds of this process's time for one command
FACTOR = float(os.environ.get("FUZZ", "1"))  # multiple of the cases that the suite tries


@dataclass(frozen=True)
class Verdict:
    """How a command ended. `crash`: the traceback of an exception that is no exit."""

    code: int | None
    out: str
    err: str
    seconds: float
    crash: str = ""


def run(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> Verdict:
    """`main(argv)` in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))  # as strict as a terminal
    code, crash, before = None, "", time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as ended:  # argparse
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:  # noqa: BLE001 - that is what is looked for
            crash = traceback.format_exc()
    seconds = time.process_time() - before
    out.flush()
    err.flush()
    texts = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return Verdict(code, *texts, seconds, crash)


def fault(verdict: Verdict) -> str | None:
    """What is wrong with how it ended; None when it answered, or refused in order."""
    if verdict.crash or "Traceback" in verdict.out + verdict.err:
        return f"a traceback:\n{verdict.crash or verdict.err}"
    if verdict.code not in (0, 2):
        return f"exit code {verdict.code}: {verdict.err}"
    if verdict.seconds > LONGEST:
        return f"{verdict.seconds:.1f} s"
    if verdict.code == 2:
        first, *rest = verdict.err.splitlines()[:1000] or [""]
        if not first.startswith("error: ") or len(first) < 15:
            return f"exit code 2 without a message: {verdict.err[:500]!r}"
        if any(not line.startswith("  - ") for line in rest):
            return f"more than one message: {verdict.err[:1000]!r}"
        if control := re.search(r"[^\n\x20-\x7e\xa0-\U0010ffff]|[\ud800-\udfff]", verdict.err):
            return f"a control character: {control[0]!r}"
    return None


def try_all(
    main: Callable[[Sequence[str]], int], cases: Iterator[Sequence[str]], seconds: float = 20.0
) -> tuple[int, int]:
    """Run cases until `seconds` (times FUZZ) are over; returns how many were answered and refused.

    AssertionError names the first one that ended in another way.
    """
    ended, counts = time.monotonic() + seconds * FACTOR, {0: 0, 2: 0}
    for argv in cases:
        verdict = run(main, argv)
        found = fault(verdict)
        assert found is None, f"{list(argv)!r:.3000}\n{found}"
        assert verdict.code is not None
        counts[verdict.code] += 1
        if time.monotonic() > ended:
            break
    return counts[0], counts[2]
