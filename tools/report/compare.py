"""Numbers by which runs are compared, from their folders."""

from __future__ import annotations

from typing import Any

from recipes.plan.size import active_parameters, flops_per_token, total_parameters
from tools.report.runs import Run

TIME_TO_LOSS = (
    "seconds of training (start-up, evaluation and checkpoints not counted) after which the held-out loss is first at or "
    "below the final held-out loss of the dense run of the same seed; linear between two evaluations; null: never"
)


def seconds_to_loss(run: Run, target: float) -> float | None:
    """Seconds of training after which the held-out loss of `run` is first <= `target` nats; None: never.

    Between two evaluations the loss is taken to be linear in time, which is late rather than early for a curve that flattens.
    """
    previous = None
    for now in run.evaluations:
        if now.nll <= target:
            if previous is None:
                return now.seconds
            share = (previous.nll - target) / (previous.nll - now.nll)
            return previous.seconds + share * (now.seconds - previous.seconds)
        # After a loss that is not finite there is no line to follow.
        previous = now if now.nll < float("inf") else None
    return None


def final_nll(run: Run) -> float | None:
    """Held-out loss after the last step, nats per token; None when the run was not evaluated then."""
    last = run.evaluations[-1] if run.evaluations else None
    return last.nll if last is not None and last.step == run.steps else None


def evaluated(run: Run) -> Run:
    """The run itself. Raises ValueError when it was not evaluated after its last step."""
    if final_nll(run) is None:
        raise ValueError(
            f"{run.folder}: not evaluated after its last step, {run.steps}; let the run end, with text to evaluate on"
        )
    return run


def row(run: Run, dense: Run | None = None) -> dict[str, Any]:
    """The run in numbers; `seconds_to_dense_loss` (see TIME_TO_LOSS) only when a dense run is given."""
    nll = final_nll(run)
    values: dict[str, Any] = {
        "name": run.name,
        "seed": run.config.run.seed,
        "total_params": total_parameters(run.config),
        "active_params": active_parameters(run.config),
        "flops_per_token": flops_per_token(run.config),
        "nll": nll,
        "nll_by_domain": {} if nll is None else run.evaluations[-1].by_domain,
        "tokens_per_second": run.tokens_per_second,
        "steps": run.steps,
        "seconds": run.seconds,
        "wall_seconds": run.summary.get("seconds"),
        "run_dir": str(run.folder),
    }
    if dense is not None:
        target = final_nll(dense)
        values["seconds_to_dense_loss"] = None if target is None else seconds_to_loss(run, target)
    return values
