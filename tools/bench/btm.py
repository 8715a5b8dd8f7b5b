"""`python -m tools.bench.btm`: what Branch-Train-Merge costs.

ensemble   held-out loss of an ensemble of N models against the N models one by one: processor seconds of one thread, which do
           not depend on what else the machine does, in interleaved rounds
workers    two branches by one worker after another, and by two at once: tokens per second from start to end, in turns
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.arguments import Parser, file_path, integer, refuse

EXAMPLES = """examples:
  python -m tools.bench.btm ensemble --rounds 20 --json report/btm_ensemble.json
  python -m tools.bench.btm workers --rounds 2 train.steps=60 --json report/btm_workers.json
"""


def ensemble_cost(overrides: Sequence[str], rounds: int) -> dict[str, Any]:
    """One micro-batch of random ids of the experiment's model, 8 models from as many seeds. `ratio`: to the sum of the models."""
    import torch

    from recipes.btm.model import Ensemble, Weighing
    from recipes.config import Config, PosteriorForm
    from recipes.launcher import Ranks
    from recipes.model.gpt import GPT
    from recipes.train.job import start_process
    from tools.bench.rounds import interleave, median_and_iqr, ratio

    start_process(Config(), Ranks())
    models = [GPT(_described([*overrides, f"run.seed={seed}"])).eval() for seed in range(8)]
    config = models[0].config
    shape = (config.train.micro_batch_size, config.model.seq_length + 1)
    ids = torch.randint(0, config.model.vocab_size or 0, shape, generator=torch.Generator().manual_seed(1))
    inputs, labels = ids[:, :-1], ids[:, 1:].contiguous()
    ensembles = {
        form.value: Ensemble(models, Weighing(form, (1 / len(models),) * len(models), None, None)).eval()
        for form in PosteriorForm
    }

    def one_by_one() -> None:
        for model in models:
            model(inputs, labels)

    work: dict[str, Callable[[], object]] = {"models": one_by_one}
    for name, ensemble in ensembles.items():
        work[name] = partial(ensemble, inputs, labels)
    with torch.inference_mode():
        seconds = interleave(work, rounds, 1, clock=time.process_time)
    found: dict[str, Any] = {"models": len(models), "tokens": inputs.numel(), "rounds": rounds}
    found["seconds"] = {name: median_and_iqr(each) for name, each in seconds.items()}
    return found | {"ratio": {name: ratio(seconds[name], seconds["models"]) for name in ensembles}}


def workers_speed(overrides: Sequence[str], rounds: int) -> dict[str, Any]:
    """Two jobs of the experiment on one domain each, one thread each. `speedup`: of two workers over one, per pair of turns."""
    from recipes.btm.pool import Job, command, device_shares, run_jobs
    from recipes.data.dataset import load_dataset
    from tools.bench.rounds import median_and_iqr

    config = _described(overrides)
    domains = list(load_dataset(str(config.data.path)).domains)[:2]
    tokens = 2 * config.train.steps * config.train.global_batch_size * config.model.seq_length
    speed: dict[int, list[float]] = {1: [], 2: []}
    for number in range(rounds):
        for workers in (1, 2) if number % 2 == 0 else (2, 1):
            with tempfile.TemporaryDirectory() as folder:
                jobs = []
                for domain in domains:
                    own = [f"data.domain_weights={{{domain}:1}}", f"run.dir={folder}/{domain}", "train.eval_samples=0"]
                    words = [
                        "experiment=btm_8domains",
                        "checkpoint.save_final=false",
                        "telemetry=disabled",
                        *overrides,
                        *own,
                    ]
                    jobs.append(Job(domain, command(words, 1), Path(folder) / f"{domain}.log"))
                start = time.perf_counter()
                run_jobs(jobs, workers, 0, lambda job: None, print, shares=device_shares(1))
                speed[workers].append(tokens / (time.perf_counter() - start))
    pairs = [two / one for one, two in zip(speed[1], speed[2], strict=True)]
    return {"tokens": tokens, "tokens_per_second": speed, "speedup": median_and_iqr(pairs), "each": pairs}


def _described(overrides: Sequence[str]) -> Any:
    """The complete description. Raises ValueError when it cannot run."""
    from recipes.pretrain import compose
    from recipes.validation import prepare, problems

    config = compose(["experiment=btm_8domains", *overrides])
    if found := problems(config, 1, launch_dir=Path.cwd()):
        raise ValueError("\n  - ".join(found))
    return prepare(config, 1, launch_dir=Path.cwd())


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 on bad input."""
    top = Parser(
        "python -m tools.bench.btm",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("what", choices=["ensemble", "workers"])
    top.add_argument("overrides", nargs="*", help="settings of btm_8domains as for recipes.pretrain")
    top.add_argument(
        "--rounds", type=integer(1), default=4, help="measured rounds, or pairs of turns (default %(default)s)"
    )
    top.add_argument("--json", type=file_path, help="write the numbers and the machine there too")
    arguments = top.parse_intermixed_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        measure = ensemble_cost if arguments.what == "ensemble" else workers_speed
        found = measure(arguments.overrides, max(1, arguments.rounds))
    except (ValueError, OSError) as error:
        return refuse(error)
    print(json.dumps(found, indent=2))
    if arguments.json:
        from recipes.telemetry.environment import describe_environment

        report = {"benchmark": f"btm {arguments.what}", "overrides": arguments.overrides, **found}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report | {"environment": describe_environment([])}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
