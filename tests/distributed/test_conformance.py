"""`tools.conformance` passes what is right, and names what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import signal
import sys

import numpy as np
import pytest

from recipes.config import MoeBackend
from tests.distributed.launching import LaunchedJob, running, wait_until
from tests.ranks import forked
from tests.tiny import tiny_config
from tools.conformance import sampling, sweep
from tools.conformance.__main__ import main

pytestmark = pytest.mark.distributed
FAULTS = "tests.distributed.conformance_faults"


@pytest.fixture
def conformance(monkeypatch, tmp_path):
    """Runs the command on some of the layouts, with a fault planted: (exit code, rows of the JSON file)."""

    def conformance(recipe, world_size, *wanted, plant=None, limit=60.0, precision="fp32", layouts="6"):
        everything = sweep.plan

        def chosen(config, world_size, layouts, *more):
            if not wanted:
                return everything(config, world_size, layouts, *more)
            plan = everything(config, world_size, "all", *more)
            cases, _ = sampling.legal_cases(plan.small, world_size)
            return dataclasses.replace(plan, cases=[next(filter(found, cases)) for found in wanted])

        with monkeypatch.context() as patched:
            for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
                patched.setenv(name, "")  # undone afterwards
            fault = None if plant is None else f"{FAULTS}:{plant}"
            patched.setattr(sweep, "plan", chosen)
            patched.setattr(sweep, "sweep", functools.partial(sweep.sweep, plant=fault, limit=limit))
            file = tmp_path / "rows.json"
            words = [f"experiment={recipe}", "--world-size", str(world_size), "--precision", precision]
            code = main([*words, "--layouts", layouts, "--json", str(file)])
        return code, json.loads(file.read_text())["rows"]

    return conformance


def layout(name, zero=None, backend=MoeBackend.grouped, accumulation=1):
    """Chooses the case of this layout."""

    def found(case):
        same = str(case) == name and case.accumulation == accumulation and case.backend in (backend, None)
        return same and zero in (None, case.layout.zero_stage)

    return found


STAGES = layout("pp2 tp1 ep1 etp1 dp1", zero=1)


def test_six_layouts_of_four_ranks_are_equal_to_one_process(conformance):
    code, rows = conformance("top2_8e", 4)
    assert code == 0 and len(rows) == 6
    assert all(row["ok"] and row["sgd_err"] > 0 and row["adamw_err"] > 0 for row in rows)
    assert {row["zero"] for row in rows} == {0, 1, 2} and {row["backend"] for row in rows} == {"grouped", "deepspeed"}
    assert {"tp1", "tp2", "tp4", "pp2", "pp4", "sp"} <= {word for row in rows for word in row["layout"].split()}


def test_tied_copies_stay_equal_on_three_data_parallel_ranks(conformance):
    """Sums over more than two ranks depend on their order, which differs between stages."""
    wanted = [layout("pp2 tp1 dp3", zero=0), layout("pp2 tp1 dp3 offload", zero=1, accumulation=2)]
    code, rows = conformance("dense", 6, *wanted)
    assert code == 0 and [row["replica_err"] for row in rows] == [0.0, 0.0]


def test_offloaded_optimizers_clip_in_bf16(conformance):
    wanted = [layout("tp1 dp2 offload", zero=stage) for stage in (1, 2, 3)] + [layout("pp2 tp1 dp1 offload", zero=1)]
    code, rows = conformance("dense", 2, *wanted, precision="bf16")
    assert code == 0 and len(rows) == 5 and all(0.01 < row["sgd_err"] < 0.3 for row in rows)


def test_bf16_layouts_err_as_one_process_in_bf16_does(conformance):
    code, rows = conformance("switch_8e", 2, precision="bf16", layouts="4")
    alone, layouts = rows[:-4], rows[-4:]
    assert code == 0 and {row["world_size"] for row in alone} == {1} and len(alone) >= 2
    assert all(1e-3 < row["grad_median"] < 0.05 and not row["bounds"] for row in alone)
    assert all(row["ok"] and row["bounds"] and row["grad_median"] > 1e-3 for row in layouts)


def test_a_fault_is_caught_in_bf16(conformance):
    code, (_, row) = conformance("switch_8e", 2, STAGES, plant="balance_twice_on_last_stage", precision="bf16")
    assert code == 1 and not row["ok"] and row["problem"] is None and row["aux_err"] > 0.3


@forked
def test_no_two_documents_of_a_batch_begin_alike():
    from tools.conformance.worker import EOD, batch

    config = tiny_config()
    ids_BS1 = batch(config, 0)
    documents = [part for row in ids_BS1 for part in np.split(row, np.flatnonzero(row == EOD) + 1) if len(part)]
    assert len(documents) > 1.5 * len(ids_BS1) and ids_BS1.min() >= 0 and ids_BS1.max() < config.model.vocab_size
    begins = [part[0] for part in documents]
    assert EOD not in begins and len(set(begins)) == len(begins)
    assert np.array_equal(ids_BS1, batch(config, 0)) and not np.array_equal(ids_BS1, batch(config, 1))


SWAPPED = ("experts.5.up.weight", "experts.5.gate.weight")  # either is as wrong as the other


@pytest.mark.parametrize(
    ("plant", "wanted", "column", "size", "tensor"),
    [
        ("expert_gradient_twice", layout("tp1 ep2 etp1 dp2", zero=1), "grad_err", (0.999, 1.001), "experts.5.down.weight"),
        ("router_not_summed", layout("tp2 sp ep2 etp1 dp1", zero=1), "replica_err", (0.1, 10), "moe.router.weight"),
        ("router_not_summed", layout("tp2 ep1 etp2 dp1", zero=0), "grad_err", (0.1, 10), "moe.router.weight"),
        ("norm_not_summed", layout("tp2 sp ep1 etp2 dp1", zero=2), "replica_err", (0.1, 10), "layers.0.attention_norm.weight"),
        ("expert_left_out_of_norm", layout("tp1 ep2 etp1 dp2", zero=0), "norm_err", (3e-5, 0.5), "layers.1.moe.experts.5"),
        ("balance_per_shard", layout("tp1 ep1 etp1 dp2", zero=1), "aux_err", (1e-3, 0.5), "moe.router.weight"),
        ("balance_per_shard", layout("tp2 ep2 etp1 dp1", zero=1), "aux_err", (1e-3, 0.5), "moe.router.weight"),
        ("stage_offset_off_by_one", STAGES, "grad_err", (1, math.inf), "layers.3.attention_norm.weight"),
        ("balance_twice_on_last_stage", STAGES, "aux_err", (0.3, 0.7), "layers.3.moe.router.weight"),
        ("tied_copies_not_summed", STAGES, "replica_err", (0.1, 10), "embedding.weight"),
        ("replica_perturbed", layout("tp1 ep2 etp1 dp2", zero=0), "replica_err", (9e-4, 1.1e-3), "layers.0.attention.q.weight"),
        ("moment_lost", layout("tp2 ep1 etp2 dp1", zero=0), "checkpoint_err", (0.99, 1.01), "sq/layers.0.attention.out.weight"),
        ("boxes_swapped", layout("tp1 ep2 etp1 dp2", zero=1), "checkpoint_err", (0.1, 10), SWAPPED),
        ("moment_not_loaded", layout("tp1 ep1 etp1 dp2", zero=2), "checkpoint_err", (0.99, 1.01), "weight"),
        ("part_of_another_rank_loaded", layout("tp2 ep2 etp1 dp1", zero=1), "checkpoint_err", (0.1, 10), "0.attention.q.weight"),
        ("steps_not_loaded", STAGES, "checkpoint_err", (1, 1), "applied_steps"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_caught_and_named(conformance, plant, wanted, column, size, tensor):
    code, (row,) = conformance("switch_8e", 2, wanted, plant=plant)
    assert code == 1 and not row["ok"] and row["problem"] is None
    assert row[column] is None if math.inf in size else size[0] <= row[column] <= size[1]  # infinity is not in JSON
    assert row["worst_tensor"].endswith(tensor)


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        ("owner_by_true_elements", "the ranks do not agree on which of them writes which part of the model"),
        ("owner_by_true_elements_unnoticed", "was written by no rank"),
    ],
)
def test_ranks_that_decide_alone_who_writes_what_are_caught(conformance, plant, reason):
    """The padding of the vocabulary is on the last tensor-parallel rank."""
    code, (row,) = conformance("dense", 4, layout("tp2 dp2", zero=1), plant=plant)
    assert code == 1 and not row["ok"] and row["problem"] is None and row["grad_err"] < 2e-5
    assert row["checkpoint_err"] is None and reason in row["worst_tensor"]  # infinity is not in JSON


def test_a_layout_that_raises_or_hangs_is_a_row_and_the_sweep_goes_on(conformance, capsys):
    wanted = [layout("tp1 dp2", zero=stage) for stage in (0, 1, 2, 0)]
    code, rows = conformance("dense", 2, *wanted, plant="stage_one_raises_and_stage_two_hangs", limit=20)
    assert code == 1
    assert [row["ok"] for row in rows] == [True, False, False, True]
    assert [row["problem"] is None for row in rows] == [True, False, False, True]
    assert rows[1]["problem"].startswith("rank 1: ZeroDivisionError: planted fault (conformance_faults.py:")
    assert (
        rows[2]["problem"].startswith("no answer in 20 s: ")
        and "rank 1 in conformance_faults.py:" in rows[2]["problem"]
    )
    assert rows[1]["grad_err"] is None and rows[1]["seconds"] < 20 <= rows[2]["seconds"]
    assert "planted fault" in capsys.readouterr().out


def test_an_interrupted_sweep_leaves_no_process(tmp_path):
    words = ["experiment=dense", "--world-size", "2", "--layouts", "all"]
    job = LaunchedJob([sys.executable, "-m", "tools.conformance", *words], tmp_path)
    with running(job):
        wait_until(lambda: "\n1 of " in job.output(), 50, job)
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does: every process of the job receives it
        assert job.wait(10) == 128 + signal.SIGINT
        wait_until(lambda: not job.left(), 5, job)
        assert "Traceback" not in job.output()
