"""`telemetry.profile_steps=[first,last]`: a torch profiler trace of a window of steps.

Each rank writes `<folder>/trace_rank<R>_steps<A>-<B>.json.gz` in Chrome's trace format (open it in ui.perfetto.dev).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.files import own_folder

if TYPE_CHECKING:
    import torch


class NoProfile:
    """Takes the place of `ProfileWindow` in a run that is not profiled."""

    def step(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        return


class ProfileWindow:
    """Profiles optimizer steps `start` to `stop`, 1-based and inclusive.

        with window.step(step): train_step()
        window.close()

    Raises:
        ValueError: the window is empty or starts before step 1.
    """

    def __init__(self, start: int, stop: int, folder: Path, rank: int) -> None:
        if not 1 <= start <= stop:
            raise ValueError(f"telemetry.profile_steps=[{start},{stop}]: needs 1 <= first <= last, for example [10,12]")
        self._steps = range(start, stop + 1)
        self._folder = folder
        self._rank = rank
        self._profiler: torch.profiler.profile | None = None
        self._recorded: list[int] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Run the body as optimizer step `step`; it shows in the trace as `step N` when it lies in the window."""
        if step not in self._steps:
            yield
            return
        from torch.profiler import record_function

        if self._profiler is None:
            self._profiler = _start()
        with record_function(f"step {step}"):
            yield
        self._recorded.append(step)
        if step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Stop and write what was recorded; also for a run that ends inside the window. Later calls do nothing."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if self._recorded:
            name = f"trace_rank{self._rank}_steps{self._recorded[0]}-{self._recorded[-1]}.json.gz"
            path = own_folder(self._folder) / name
            path.unlink(missing_ok=True)  # of an earlier attempt, or a link
            profiler.export_chrome_trace(str(path))


def _start() -> "torch.profiler.profile":
    import torch
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    profiler.start()
    return profiler
