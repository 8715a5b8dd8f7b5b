"""Arguments, ranks and the end of a process, without torch and without a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from recipes.launcher import Arguments, Ranks, expand_hosts, launch_note, rank_environment, split_arguments
from recipes.process import is_lost_contact

ROOT = Path(__file__).resolve().parents[2]
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[03-05,7]",
}


def test_overrides_stay_as_they_are_and_in_order():
    words = [
        "a.b=c=d",
        "x=[1,2]",
        "y={a:1}",
        "--local_rank=0",
        "z='two words'",
        "~k",
        "名前=日本語",
        "--dry-run",
        "q=-1",
    ]
    kept = tuple(word for word in words if not word.startswith("--"))
    assert split_arguments(words, {}) == Arguments(overrides=kept, dry_run=True)


def test_deepspeed_flags_are_dropped_but_not_forgotten():
    words = ["--deepspeed_config", "ds.json", "a=1", "--deepspeed", "b=2", "--deepspeed=x.json"]
    arguments = split_arguments(words, {})
    assert arguments.overrides == ("a=1", "b=2")
    assert arguments.ignored == ("--deepspeed_config ds.json", "--deepspeed", "--deepspeed=x.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--local_rank"], "--local_rank: a value must follow"),
        (["--local_rank=one"], "--local_rank=one: must be an integer"),
        (["--local_rank=2"], "--local_rank=2 but LOCAL_RANK=1"),
        (["--json", "f"], "--json f: .* --dry-run"),
        (["-x=1"], "-x=1: unknown flag; there are --help"),
        (["--multirun"], "--multirun: unknown flag"),
    ],
)
def test_wrong_arguments(words, message):
    with pytest.raises(ValueError, match=message):
        split_arguments(words, {"LOCAL_RANK": "1"})


def test_matching_or_unset_local_ranks_pass():
    for words in (["--local_rank=1"], ["--local-rank", "1"], ["--local_rank", "-1"]):
        assert split_arguments(words, {"LOCAL_RANK": "1"}) == Arguments(overrides=())


BY_HAND = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29501",
}


def test_torchrun_comes_before_slurm_and_mpi():
    """Either may start it once per node."""
    torchrun = BY_HAND | {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    others = STEP | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert rank_environment(torchrun | others) == Ranks(3, 1, 4, 2, "n0", 29501, shared_store=True)
    named = rank_environment(torchrun | {"TORCHELASTIC_RUN_ID": "a7"})
    assert named.job == "torchrun a7"


def test_jobs_of_deepspeed_on_one_node_are_told_apart_by_their_launcher():
    environ = BY_HAND | {"CROSS_SIZE": "1"}
    environ["LOCAL_SIZE"] = environ.pop("LOCAL_WORLD_SIZE")  # deepspeed's name for it
    first, second = (rank_environment(environ, launcher) for launcher in ("70:1", "71:1"))
    assert (first.rank, first.local_rank, first.world_size, first.local_world_size) == (3, 1, 4, 2)
    assert first.job != second.job and not set(first.ports()) & set(second.ports())
    assert rank_environment(environ | {"CROSS_SIZE": "2"}, "70:1").ports() == [29501]  # nobody knows both launchers


def test_srun_task():
    ranks = rank_environment(STEP)
    assert (ranks.rank, ranks.local_rank, ranks.world_size, ranks.local_world_size) == (5, 1, 7, 2)
    assert ranks.master_addr == "gpu03" and all(20000 <= port < 30000 for port in ranks.ports())
    last = rank_environment(STEP | {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"})
    assert last.local_world_size == 1
    assert (last.master_addr, last.job, last.ports()) == (ranks.master_addr, ranks.job, ranks.ports())
    steps = [rank_environment(STEP | {"SLURM_STEP_ID": str(step)}) for step in range(20)]
    assert len({step.job for step in steps}) == 20  # steps of one job that run at once do not meet
    assert rank_environment(STEP | {"SLURM_RESTART_COUNT": "1"}).job != ranks.job


def test_a_batch_script_without_srun_is_one_process():
    environ = {key: value for key, value in STEP.items() if key != "SLURM_STEP_ID"}
    ranks = rank_environment(environ)
    assert (ranks.rank, ranks.world_size, ranks.local_world_size) == (0, 1, 1) and ranks.master_port > 0
    note = launch_note(environ, ranks)
    assert note is not None and note.startswith("SLURM_NTASKS=7, but this is one process")
    assert launch_note(STEP, rank_environment(STEP)) is None


OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MVAPICH = {key.replace("OMPI", "MV2"): value for key, value in OMPI.items()}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
WHERE = {"MASTER_ADDR": "n0", "MASTER_PORT": "29501"}


@pytest.mark.parametrize("environ", [OMPI | {"PMIX_RANK": "3"}, MVAPICH, HYDRA])
def test_ranks_of_mpi_launchers_join(environ):
    assert rank_environment(environ | WHERE) == Ranks(3, 1, 4, 2, "n0", 29501)
    with pytest.raises(ValueError, match=r"rank 3 of 4, which do not know where to meet; pass MASTER_ADDR"):
        rank_environment(environ, "70:1")  # two nodes, and two launchers
    with pytest.raises(ValueError, match="do not know where to meet"):
        rank_environment(one_node(environ))
    here = rank_environment(one_node(environ), "70:1")
    assert (here.rank, here.world_size, here.master_addr, here.job) == (3, 4, "127.0.0.1", "mpirun 70:1")
    alone = {key: "1" if "SIZE" in key or "NRANKS" in key else "0" for key in environ}
    assert rank_environment(alone).world_size == 1


def one_node(environ: dict[str, str]) -> dict[str, str]:
    return environ | {key: "4" for key in environ if "LOCAL_SIZE" in key or "NRANKS" in key}


def test_srun_serves_mpi_programs_but_daemons_of_mpirun_are_no_ranks():
    same = {"PMI_RANK": STEP["SLURM_PROCID"], "PMI_SIZE": STEP["SLURM_NTASKS"], "PMIX_RANK": STEP["SLURM_PROCID"]}
    assert rank_environment(STEP | same) == rank_environment(STEP)
    assert rank_environment(STEP | OMPI | WHERE).world_size == 4


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 but RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "RANK=x .* must be an integer"),
        (
            {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "rank 2 of 2, .*below its count",
        ),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1: a launcher started this"),
        ({"MPI_LOCALRANKID": "0"}, "MPI_LOCALRANKID=0: a launcher started this"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, "FLUX_TASK_RANK=0: a launcher started this"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK is not set"),
        (
            BY_HAND | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} | OMPI,
            "RANK=0 and WORLD_SIZE=1, but Open MPI started this as rank 3 of 4",
        ),
        (BY_HAND | STEP, "RANK=3 and WORLD_SIZE=4, but srun started this as rank 5 of 7"),
        (STEP | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 must lie in 1 .. 65535"),
        (STEP | {"SLURM_STEP_NODELIST": "n[a-b]"}, r"node list range \[a-b\]"),
    ],
)
def test_broken_environments_are_refused(environ, message):
    with pytest.raises(ValueError, match=message):
        rank_environment(environ)


def test_ranks_name_torch_variables():
    assert Ranks(1, 1, 2, 2, "a", 3).environment() == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "3",
    }


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("node7", ["node7"]),
        ("a,b", ["a", "b"]),
        ("node[03-05,7],login", ["node03", "node04", "node05", "node7", "login"]),
        ("r[1-2]n[08-09]-ib", ["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"]),
    ],
)
def test_node_lists(nodelist, hosts):
    assert expand_hosts(nodelist) == hosts


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:29"), True),
        (ConnectionResetError("[Errno 104] Connection reset by peer"), True),
        (RuntimeError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("NCCL error: invalid usage"), False),
    ],
)
def test_lost_contact(error, lost):
    assert is_lost_contact(error) is lost


def _guarded(body: str, rank: int = 0) -> subprocess.Popen[str]:
    script = "from recipes.process import run_guarded\nimport atexit, sys, time\n"
    script += "atexit.register(time.sleep, 60)\n"  # stands for threads that never end
    script += f"def job():\n{textwrap.indent(textwrap.dedent(body), '    ')}\nsys.exit(run_guarded(job, {rank}))"
    script = (
        f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{script}"  # jobs of `&` ignore it
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=20)
    return process.returncode, err


def test_a_crash_shows_its_traceback_and_waits_for_nobody():
    code, err = _end(_guarded("1 / 0", rank=3))
    assert code == 1 and err.startswith("rank 3 failed:\nTraceback") and "ZeroDivisionError" in err


def test_a_rank_that_lost_contact_speaks_second_and_in_one_line():
    started = time.monotonic()
    code, err = _end(_guarded("raise RuntimeError('Connection closed by peer')", rank=1))
    assert code == 1 and err.startswith("rank 1: lost contact with the other ranks") and err.count("\n") == 1
    assert time.monotonic() - started > 1.5


def test_a_mistake_of_the_user_is_one_message():
    code, err = _end(_guarded("from recipes.launcher import expand_hosts\nexpand_hosts('')"))
    assert code == 2 and err.startswith("error: node list ''") and err.count("\n") == 1


def test_a_value_error_of_another_library_is_a_crash():
    code, err = _end(_guarded("int('x')"))
    assert code == 1 and "Traceback" in err and "invalid literal" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_the_process_with_one_line(number, code):
    process = _guarded(
        "try:\n    print('ready', flush=True)\n    time.sleep(30)\nfinally:\n    print('closed', file=sys.stderr)"
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    returned, err = _end(process)
    assert returned == code and err.startswith("closed\nrank 0: ") and err.count("\n") == 2


def test_success_returns_normally():
    process = _guarded("atexit.unregister(time.sleep)")
    assert _end(process) == (0, "")
