"""The run on Weights & Biases: offline by default, one run per job, never in the way of training.

* **Step axis.** Every point carries `train/step`, declared as the step metric of all others; W&B's own step, which must
  never decrease, is left to itself. A run that resumes from an older checkpoint therefore loses no point: every step it
  computes is recorded. Steps that were computed twice (after the checkpoint, before the crash) keep both points on W&B,
  at the same place of the axis; `metrics.jsonl` keeps only the later one.
* **Identity.** The run id is that of WANDB_RUN_ID, else that of the checkpoint, else a fresh one. It is kept in the
  checkpoint, passed with `resume="allow"` online and offline, and ends the run's name, which is therefore unique. Offline,
  wandb gives each process its own folder, `<run folder>/wandb/offline-run-<time>-<id>`, and notes the id and the wish to
  resume in it; `wandb sync` uploads the folders of one id in order of their start (wandb 0.31).
* **Failure.** An exception of wandb is reported once on stderr and training goes on. Settings that wandb refuses and a
  missing or wrong key are mistakes of the configuration; they stop the job before its first step.
"""

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from recipes.config import TelemetryConfig, WandbMode
from recipes.telemetry.environment import git_state
from recipes.text import printable, redact

STEP_METRIC = "train/step"

# `finish` waits for uploads. An outage at the end must not hold a whole allocation; what was not uploaded stays in the
# run folder for `wandb sync`.
FINISH_TIMEOUT_SECONDS = 300.0


class RunLogger(Protocol):
    """Where the points of a run go."""

    run_id: str | None  # to keep in the checkpoint

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record `values` at optimizer step `step` (1-based); training and evaluation share this axis."""

    def finish(self, failed: bool) -> None:
        """End the run, marked failed when any rank failed; later calls do nothing."""


class NullLogger:
    """Records nothing: ranks other than 0, and `telemetry.wandb_mode=disabled`. Keeps the id of a resumed run."""

    def __init__(self, run_id: str | None = None) -> None:
        self.run_id = run_id

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        return

    def finish(self, failed: bool) -> None:
        return


class WandbLogger:
    """One W&B run. Build it once per job, on rank 0, through `open_run`.

    Args:
        run_folder: existing folder; wandb's files go to `<run_folder>/wandb`, or where WANDB_DIR says.
        telemetry: mode (offline or online), project, entity and group.
        run_id: from `choose_run_id`.
        config: the resolved configuration, plain containers and scalars.

    Raises:
        ValueError: wandb refuses the settings, or has no valid key for online.
    """

    def __init__(self, run_folder: Path, telemetry: TelemetryConfig, run_id: str, config: Mapping[str, Any]) -> None:
        online = telemetry.wandb_mode is WandbMode.online
        if not online:
            # wandb reports its own crashes to its makers over the network unless told otherwise; offline means offline.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.run_id: str | None = run_id
        self._run: Any = None
        self._outage_reported = False
        try:
            with _arguments_without_passwords():
                self._run = wandb.init(
                    # None: wandb reads its own variable.
                    dir=None if os.environ.get("WANDB_DIR") else run_folder,
                    mode="online" if online else "offline",
                    id=run_id,
                    resume=None if os.environ.get("WANDB_RESUME") else "allow",
                    name=None if os.environ.get("WANDB_NAME") else f"{run_folder.name}-{run_id}",
                    project=telemetry.wandb_project,
                    entity=telemetry.wandb_entity,
                    group=telemetry.wandb_group,
                    config=dict(config),
                    allow_val_change=True,  # a resumed run may, for example, train for more steps than before
                    force=True,  # online without a key is an error, not a silent change of mode
                    settings=wandb.Settings(**_ours(), finish_timeout=FINISH_TIMEOUT_SECONDS),
                )
            self._run.define_metric(STEP_METRIC)
            self._run.define_metric("*", step_metric=STEP_METRIC)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            way_out = "run `wandb login`, set WANDB_API_KEY or use telemetry.wandb_mode=offline and `wandb sync` later"
            if not online:
                way_out = "correct telemetry.wandb_project, wandb_entity or wandb_group, or a variable WANDB_*"
            raise ValueError(f"telemetry.wandb_mode={telemetry.wandb_mode.value}: {error} ({way_out})") from error
        except Exception as error:  # noqa: BLE001 (reason in _guard)
            self._report_once("start the run", error)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._guard("record a point", self._run.log, {STEP_METRIC: step, **values})

    def finish(self, failed: bool) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            self._guard("finish the run", run.finish, exit_code=int(failed))

    def _guard(self, action: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        # Any exception: an outage shows as wandb.Error, OSError, TimeoutError, an assertion or an error private to
        # wandb's service process. Only wandb's code runs inside the call, and its failure is not worth a training run.
        try:
            call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001
            self._report_once(action, error)

    def _report_once(self, action: str, error: Exception) -> None:
        if self._outage_reported:
            return
        self._outage_reported = True
        message = printable(redact(f"W&B could not {action} ({type(error).__name__}: {error}); training goes on"))
        print(f"{message}, every step is in metrics.jsonl", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _arguments_without_passwords() -> Iterator[None]:
    """Inside, the command line that W&B records has none; nothing else reads it any more."""
    given = sys.argv
    sys.argv = [redact(word) for word in given]
    try:
        yield
    finally:
        sys.argv = given


def _ours() -> dict[str, Any]:
    """The console is ours, unless a variable says otherwise: wandb neither wraps the streams nor prints its summary.

    Of git it gets the commit of this library: a look of its own would find the repository of the launch directory, and the address
    of a remote, in which there may be a key.
    """
    settings = {"console": "off", "quiet": True}
    found = {key: value for key, value in settings.items() if not os.environ.get(f"WANDB_{key.upper()}")}
    return found | {"disable_git": True, "git_commit": (git_state() or {}).get("commit")}


def choose_run_id(stored: str | None) -> str:
    """The run id that WANDB_RUN_ID names (a sweep agent does), else `stored` in a checkpoint, else a fresh one."""
    named = os.environ.get("WANDB_RUN_ID")
    if named and stored not in (None, named):
        print(f"W&B run {named}, as WANDB_RUN_ID; the checkpoint's is {stored}", flush=True)
    return named or stored or secrets.token_hex(4)


def open_run(
    run_folder: Path, telemetry: TelemetryConfig, is_rank_zero: bool, run_id: str | None, config: Mapping[str, Any]
) -> RunLogger:
    """The logger of this process: W&B on rank 0, nothing elsewhere or when disabled (wandb is then not even imported).

    Args:
        run_id: from the checkpoint that is resumed; None starts a new run.

    Raises:
        ValueError: see `WandbLogger`.
    """
    if telemetry.wandb_mode is WandbMode.disabled or not is_rank_zero:
        return NullLogger(run_id)
    return WandbLogger(run_folder, telemetry, choose_run_id(run_id), config)
