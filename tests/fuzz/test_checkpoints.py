"""Damaged and forged checkpoints: each is refused in one message, passed over for an older one, or was not changed at all.

FUZZ=10 python -m pytest tests/fuzz/test_checkpoints.py tries ten times as many; a seed that fails is kept in SEEDS.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recipes.config import Config, OptimizerName, WandbMode
from recipes.validation import prepare
from tests.fuzz.judging import FACTOR
from tests.fuzz.mutations import folders, mutate
from tests.ranks import run_ranks
from tests.tiny import tiny_moe_config

CASES = int(300 * FACTOR)
SEEDS: list[int] = []  # that once failed, tried beside the first CASES
SECONDS, BYTES = 20, 10**9  # that one case may take, beyond what the files take
LIMIT = 60 * max(1.0, FACTOR)  # seconds for all
PARTS = 2


@pytest.fixture(scope="module")
def runs(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of two ranks with other seeds; each with checkpoints after its two steps."""
    root, found = tmp_path_factory.mktemp("fuzz"), []
    for seed in (1, 2):
        config = tiny_moe_config(run__seed=seed, train__steps=2, train__micro_batch_size=4, train__eval_samples=2)
        config.moe.moe_router_enable_expert_bias, config.optimizer.name = True, OptimizerName.adamw
        config.data.path, config.run.dir = str(tiny_data), str(root / str(seed))
        config.checkpoint.save_interval, config.telemetry.wandb_mode = 1, WandbMode.disabled
        config.schedule.lr_warmup_steps = 1
        run_ranks("run_job", 2, prepare(config, 2, launch_dir=root))
        found.append(root / str(seed))
    return found


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_damage_is_loaded_in_silence(runs: list[Path], tmp_path: Path, part: int) -> None:
    seeds = [*SEEDS, *range(CASES)][part::PARTS]
    (counts,) = run_ranks("tests.fuzz.test_checkpoints:fuzz", 1, seeds, *runs, tmp_path, limit=LIMIT)
    print(counts)
    assert sum(counts.values()) == len(seeds)
    assert counts["passed over"] > len(seeds) / 2 and counts["unchanged"] > 0, (
        f"the changes are not those meant: {counts}"
    )


def test_the_command_line_tells_damage_in_one_line(runs: list[Path], tmp_path: Path) -> None:
    """As users meet it: a step by name is an error, a run folder and a resumed run fall back."""
    run = tmp_path / "run"
    shutil.copytree(runs[0], run)
    damaged = folders(run)[-1] / "model-00001-of-00002.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1 << 6  # an exponent
    damaged.write_bytes(data)
    reason = f"{damaged}: its bytes changed after it was written (sha256 differs)"

    def call(*words: object) -> tuple[int, str, list[str]]:
        command = [sys.executable, "-m", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
        return done.returncode, done.stdout, [line for line in done.stderr.splitlines() if reason in line]

    assert call("tools.evaluate", folders(run)[-1]) == (2, "", [f"error: {reason}"])
    code, out, told = call("tools.evaluate", run)
    assert code == 0 and told == [f"passed over: {reason}"] and "after step 1" in out


def fuzz(rank: int, world_size: int, seeds: list[int], run: Path, other: Path, scratch: Path) -> dict[str, int]:
    """Try all seeds in this process; returns how often what came of it."""
    from recipes.checkpoint.format import open_checkpoint
    from recipes.checkpoint.trainer import check_trainer
    from recipes.launcher import rank_environment
    from recipes.train.job import start_process

    config = check_trainer(open_checkpoint(folders(run)[-1]))
    config.parallel.data_parallel_size, config.train.micro_batch_size = 1, 8
    start_process(config, rank_environment(os.environ))
    subject = Subject(config, run)
    assert (outcome := subject.outcome(run)) == "unchanged", outcome
    used, copy = _peak(), scratch / "run"
    counts: dict[str, int] = {}
    failures: list[str] = []
    signal.signal(signal.SIGALRM, _too_long)
    for seed in seeds:
        shutil.copytree(run, copy)
        mutation = mutate(random.Random(seed), copy, other)
        case = f"seed {seed}: {mutation.name}"
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            outcome = subject.outcome(copy)
            assert outcome != "changed" or not mutation.detected, "was loaded"
        except Exception:  # noqa: BLE001 - all are told at the end
            failures.append(f"{case}: {traceback.format_exc(limit=-3)}")
            outcome = "failed"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert _peak() - used < BYTES, f"{case}: took {(_peak() - used) / 1e9:.1f} GB"
        counts[outcome] = counts.get(outcome, 0) + 1
        shutil.rmtree(copy)
    assert not failures, f"{len(failures)} of {len(seeds)}:\n" + "\n".join(failures[:20])
    return counts


def _peak() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"took more than {SECONDS} s")


class Subject:
    """A live engine that loads checkpoints as a resumed run does, and the tool that evaluates them."""

    def __init__(self, config: Config, run: Path):
        from recipes.engine import make_engine
        from recipes.model.gpt import GPT, registry

        self.config = config
        self.model = GPT(config)
        self.engine = make_engine(self.model, registry(self.model, config), config)
        self.originals = [self._load([path], []) for path in folders(run)]

    def outcome(self, run: Path) -> str:
        """What a resumed run makes of `run`: "refused", "passed over" (an older checkpoint), "unchanged" or "changed".

        `tools.evaluate`, of the run and of its newest checkpoint by name, ends with a number or with one message.
        """
        from tools.evaluate import main

        for named in (run, folders(run)[-1] if folders(run) else run / "checkpoints"):
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
                code = main([str(named)])
            errors = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
            assert (code, len(errors), bool(out.getvalue())) in ((0, 0, True), (2, 1, False)), err.getvalue()
            assert "nan" not in out.getvalue(), out.getvalue()
        return self._resumed(run)

    def _resumed(self, run: Path) -> str:
        from recipes.checkpoint.rotate import candidates

        said: list[str] = []
        try:
            found, passed_over = candidates(run / "checkpoints")
            if not found:
                return "refused"
            loaded = self._load(found, passed_over, said.append)
        except ValueError as error:
            assert str(error) and "\x1b" not in str(error)
            return "refused"
        assert all(line.isprintable() for line in said)
        if loaded not in self.originals:
            return "changed"
        return "passed over" if said else "unchanged"

    def _load(
        self, found: list[Path], passed_over: list[str], say: Callable[[str], object] = print
    ) -> tuple[bytes, str]:
        """As `train.job` does; returns all that the engine then holds, and the trainer state."""
        from recipes.checkpoint.choose import Places, sound_together
        from recipes.checkpoint.load import load_engine
        from recipes.train.guard import SpikeGuard

        checkpoint = sound_together(Places(found, passed_over), say)
        state = checkpoint.trainer
        SpikeGuard(self.config.train).load(state["guard"])
        assert self.model.moe is not None
        self.model.moe.load(state["moe"] or {})
        load_engine(checkpoint, self.engine)
        held = [t for entry in self.engine.parameters for t in self.engine.fragment(entry.parameter).states.values()]
        return torch.cat([t.reshape(-1) for t in held]).numpy().tobytes(), json.dumps(state, sort_keys=True)
