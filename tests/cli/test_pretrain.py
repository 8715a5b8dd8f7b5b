"""The command line: help, plan, and one message with exit code 2 for each mistake."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import pretrain
from tests.cli.fake_data import write_dataset

SCRIPT = str(Path(pretrain.__file__))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A launch directory with a small data set, and none of a launcher's variables."""
    for name in os.environ:
        if name.startswith("SLURM_") or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "data" / "laptop")


# Override or flags -> what the message must name: key and value, the legal range, a way out.
MISTAKES = {
    "unknown key": (["train.stepz=3"], ["train.stepz", "did you mean train.steps?", "micro_batch_size"]),
    "unknown key with +": (["+model.typo=1"], ["model.typo", "unknown key", "hidden_size"]),
    "unknown key with ++": (["++model.hiden_size=1"], ["model.hiden_size", "did you mean model.hidden_size"]),
    "right key, wrong group": (["train.hidden_size=3"], ["train.hidden_size", "did you mean model.hidden_size?"]),
    "unknown group": (["modle.hidden_size=3"], ["modle", "did you mean model", "experiment"]),
    "unknown option": (["optimizer=adam"], ["optimizer=adam", "adamw, sgd"]),
    "unknown experiment": (["experiment=nix"], ["experiment=nix", "dense"]),
    "no option": (["experiment=null"], ["experiment=null", "dense"]),
    "text for an integer": (["model.hidden_size=wide"], ["model.hidden_size=wide", "an integer", "=128"]),
    "fraction for an integer": (["train.steps=1e3"], ["train.steps=1e3", "an integer", "optimizer steps", "=1000"]),
    "null where there is none": (["train.steps=null"], ["train.steps=null", "an integer"]),
    "not of the list": (["model.activation=relu"], ["model.activation=relu", "swiglu, gelu"]),
    "wrong item": (["telemetry.profile_steps=[1,b]"], ["telemetry.profile_steps[1]=b", "an integer"]),
    "wrong weight": (["data.domain_weights={en:x}"], ["data.domain_weights.en", "a number"]),
    "group as value": (["run=1"], ["run=1", "group", "run.name=pretrain"]),
    "no assignment": (["nokey"], ["'nokey'", "key=value"]),
    "open bracket": (["data.domain_weights={a"], ["data.domain_weights={a", "quotes"]),
    "sweep": (["train.steps=1,2"], ["train.steps=1,2", "an integer"]),
    "needless +": (["+train.steps=1"], ["+train.steps=1", "train.steps=1"]),
    "deletion": (["~model.hidden_size"], ["model.hidden_size", "deletion"]),
    "unknown interpolation": (["run.name=${model.no}"], ["run.name=${model.no}", "'model.no' not found"]),
    "hydra's own": (["hydra.run.dir=x"], ["hydra.run.dir=x", "run.dir"]),
    "unknown flag": (["--foo"], ["--foo", "--dry-run"]),
    "value missing": (["--json"], ["--json", "value"]),
    "out of range": (["train.steps=0"], ["train.steps=0", "at least 1", "optimizer steps"]),
    "indivisible batch": (["train.global_batch_size=12"], ["train.global_batch_size=12", "= 8", "8 or 16"]),
    "indivisible heads": (["model.num_attention_heads=3"], ["model.hidden_size=128", "126 or 129", "kv_channels"]),
    "missing data": (["data.path=nowhere"], ["data.path=nowhere", "tools.index"]),
    "no data": (["data.path=null"], ["data.path=null", "model.vocab_size=null"]),
    "other vocabulary": (["model.vocab_size=500"], ["model.vocab_size=500", "4096", "null"]),
    "unknown domain": (["data.domain_weights={fr:1}"], ["data.domain_weights.fr", "en, ja"]),
    "too few samples": (["data.wrap=false"], ["data.wrap=false", "16000", "1171", "data.wrap=true"]),
    "run folder exists": (["run.dir=data"], ["run.dir=data", "exists", "run.resume=auto"]),
    "run folder is a file": (["run.dir=data/laptop/dataset.json"], ["dataset.json", "is a file"]),
    "run folder cannot be made": (["run.dir=/proc/nowhere/run"], ["run.dir=/proc/nowhere/run", "write"]),
    "unknown option of experts": (["moe=swich"], ["moe=swich", "dense", "switch"]),
    "right key of experts, wrong group": (["model.moe_router_topk=2"], ["did you mean moe.moe_router_topk?"]),
    "experts of a dense model": (["moe.moe_router_topk=2"], ["moe.moe_router_topk=2", "dense model", "moe=switch"]),
    "more expert parallelism than ranks": (
        ["experiment=switch_8e", "parallel.expert_model_parallel_size=2"],
        ["expert_model_parallel_size=2", "data-parallel size 1", "parallel.data_parallel_size=2"],
    ),
    "ranks that do not fit": (
        ["parallel.tensor_model_parallel_size=3"],
        ["tensor_model_parallel_size=3", "model.num_attention_heads=4", "use 1, or"],
    ),
    "sequence parallelism alone": (
        ["parallel.sequence_parallel=true"],
        ["sequence_parallel=true", "tensor_model_parallel_size=1"],
    ),
    "experts over too many ranks": (
        ["experiment=switch_8e", "parallel=tensor_parallel", "parallel.expert_model_parallel_size=4"],
        ["size=4 x expert_tensor_parallel_size=2 = 8 must divide 2 ranks (data-parallel 1 x tensor-parallel 2)"],
    ),
    "more stages than layers": (
        ["parallel.pipeline_model_parallel_size=8"],
        ["pipeline_model_parallel_size=8", "model.num_layers=4", "use one of 1, 2, 4, or more layers"],
    ),
    "gradients divided over a pipeline": (
        ["parallel.pipeline_model_parallel_size=2", "zero=stage2"],
        ["zero.stage=2 with parallel.pipeline_model_parallel_size=2", "use zero.stage=1"],
    ),
    "DeepSpeed's own tensor parallelism": (
        ["deepspeed.extra={tensor_parallel:{autotp_size:2}}"],
        ["deepspeed.extra.tensor_parallel.autotp_size", "parallel.tensor_model_parallel_size"],
    ),
    "owned key": (["deepspeed.extra={zero_optimization:{stage:2}}"], ["zero_optimization.stage", "zero.stage"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_and_exit_code_2(name, capsys):
    words, expected = MISTAKES[name]
    assert pretrain.main([*words, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "Traceback" not in err
    assert err.count("\n") == 1, "one message, one line"
    assert [part for part in expected if part not in err] == [], err


def test_all_cross_field_problems_are_reported_together(capsys):
    words = ["train.global_batch_size=12", "zero.stage=0", "zero.overlap_comm=true", "data.path=nowhere"]
    assert pretrain.main([*words, "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert "3 problems" in err and all(key in err for key in ("global_batch_size=12", "overlap_comm", "nowhere"))


def test_only_rank_0_prints(monkeypatch, capsys):
    monkeypatch.setattr("recipes.process._PEER_DELAY", 0)
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for rank in "01":
        for name, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        assert pretrain.main(["train.stepz=1"]) == 2
        assert capsys.readouterr().err.startswith("error: train.stepz") == (rank == "0")
        assert pretrain.main(["--dry-run"]) == 0
        assert ("parameters" in capsys.readouterr().out) == (rank == "0")


@pytest.mark.parametrize(
    "extra",
    [
        ["--local_rank=1"],
        ["--local_rank", "1"],
        ["--local-rank=1"],
        ["--deepspeed"],
        ["--deepspeed", "ds.json"],
        ["--deepspeed_config", "ds.json"],
        ["--deepspeed_config=ds.json", "--deepspeed"],
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_launcher_flags_change_nothing(extra, position, tmp_path):
    words = ["train.steps=2", "model.num_layers=1"]
    plans = []
    for given in (words, [*words[:position], *extra, *words[position:]]):
        assert pretrain.main([*given, "--dry-run", "--json", "plan.json"]) == 0
        plans.append(json.loads(Path("plan.json").read_text()))
    assert plans[0] == plans[1] and plans[0]["total_tokens"] == 2 * 16 * 128


def test_a_local_rank_that_contradicts_the_environment_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert pretrain.main(["--local_rank=1", "--dry-run"]) == 2
    assert "--local_rank=1 but LOCAL_RANK=0" in capsys.readouterr().err


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert pretrain.main(["experiment=dense", "--dry-run"]) == 0
    out = capsys.readouterr().out
    expected = [
        "parameters",
        "active parameters",
        "FLOPs per token",
        "weight bytes",
        "gradient bytes",
        "optimizer bytes",
    ]
    assert [part for part in expected if part not in out] == []
    assert sorted(tmp_path.rglob("*")) == before


def test_dry_run_of_experts_shows_how_they_are_shared_out(capsys):
    words = ["experiment=switch_8e", "parallel.expert_model_parallel_size=2", "parallel.data_parallel_size=2"]
    assert pretrain.main([*words, "--dry-run", "--json", "plan.json"]) == 0
    out, sizes = " ".join(capsys.readouterr().out.split()), json.loads(Path("plan.json").read_text())
    assert "8 x 2 layers, top-1, width 384" in out and "EP 2: 4 of the 8" in out
    assert (sizes["num_moe_layers"], sizes["expert_model_parallel_size"], sizes["expert_data_parallel_size"]) == (
        2,
        2,
        1,
    )
    assert sizes["total_params"] > 2 * sizes["active_params"]


def test_dry_run_of_a_pyramid_shows_the_experts_of_each_layer(capsys):
    words = ["experiment=pr_moe_4e_8e", "parallel.expert_model_parallel_size=2", "parallel.data_parallel_size=2"]
    assert pretrain.main([*words, "--dry-run", "--json", "plan.json"]) == 0
    out, sizes = " ".join(capsys.readouterr().out.replace("│", " ").split()), json.loads(Path("plan.json").read_text())
    assert "4 x 1 layer + 8 x 1 layer, top-1, width 192" in out
    assert "EP 2: 2 of the 4, 4 of the 8 experts of a layer on each rank" in out
    assert sizes["num_moe_experts_per_layer"] == [4, 8]
    assert sizes["total_params"] - sizes["active_params"] == (3 + 7) * 3 * 128 * 192


def test_one_process_plans_for_all_ranks_that_the_description_asks_for(capsys):
    words = [
        "experiment=switch_8e",
        "parallel=tensor_parallel",
        "parallel.data_parallel_size=4",
        "train.micro_batch_size=4",
    ]
    assert pretrain.main([*words, "parallel.expert_model_parallel_size=4", "--dry-run", "--json", "plan.json"]) == 0
    out, sizes = " ".join(capsys.readouterr().out.replace("│", " ").split()), json.loads(Path("plan.json").read_text())
    assert "8 = data-parallel 4 x tensor-parallel 2 (sequence parallel)" in out and "nodes" not in out
    assert "8 ranks = expert-data-parallel 1 x EP 4 x ETP 2" in out
    assert (sizes["world_size"], sizes["data_parallel_size"], sizes["expert_data_parallel_size"]) == (8, 4, 1)


def test_dry_run_of_a_pipeline_shows_stages_bubble_and_activations(capsys):
    words = ["parallel=pipeline_parallel", "parallel.tensor_model_parallel_size=2", "parallel.data_parallel_size=2"]
    words += ["train.micro_batch_size=2", "model.recompute_granularity=full"]
    assert pretrain.main([*words, "--dry-run", "--json", "plan.json"]) == 0
    out, sizes = " ".join(capsys.readouterr().out.replace("│", " ").split()), json.loads(Path("plan.json").read_text())
    assert (sizes["world_size"], sizes["pipeline_model_parallel_size"], sizes["bubble_share"]) == (8, 2, 0.2)
    assert "8 = data-parallel 2 x tensor-parallel 2 x 2 pipeline stages" in out and "2, layers 0-1 | 2-3" in out
    assert f"{sizes['activation_bytes_per_rank']:,}" in out and "20.0% of a step" in out
    assert [stage["micro_batches"] for stage in sizes["stages"]] == [2, 1]
    kept = sizes["activation_bytes_per_rank"]
    assert pretrain.main([*words[:-1], "--dry-run", "--json", "plan.json"]) == 0
    assert json.loads(Path("plan.json").read_text())["activation_bytes_per_rank"] > 2 * kept
    assert pretrain.main(["parallel=tensor_parallel", "--dry-run", "--json", "plan.json"]) == 0
    assert json.loads(Path("plan.json").read_text())["world_size"] == 2


def test_ranks_on_several_nodes_see_which_groups_cross_them(monkeypatch, capsys):
    world = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**world, "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    words = ["experiment=switch_8e", "parallel=tensor_parallel", "parallel.expert_model_parallel_size=2"]
    assert pretrain.main([*words, "train.micro_batch_size=4", "--dry-run", "--json", "plan.json"]) == 0
    assert "2 x 2 ranks; groups that cross nodes: data, expert" in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )
    assert json.loads(Path("plan.json").read_text())["nodes"]["crossed_by"] == ["data", "expert"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [(["--help"], 0, "usage:"), (["train.stepz=3"], 2, "error: train.stepz"), (["--dry-run"], 0, "plan of")],
)
def test_answers_take_less_than_two_seconds(words, code, text):
    """CPU time of the child, so that a busy machine does not matter; a heavy import alone takes longer."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=50, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, text in done.stdout + done.stderr) == (code, True), done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


def test_no_heavy_import_before_the_checks():
    heavy = "'torch', 'deepspeed', 'megatron', 'transformers', 'wandb'"
    code = "import sys; from recipes.pretrain import main; main(sys.argv[1:]); "
    code += f"print([name for name in ({heavy}) if name in sys.modules])"
    command = [sys.executable, "-c", code, "experiment=dense", "--dry-run"]
    environ = os.environ | {"PYTHONPATH": str(Path(SCRIPT).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=50, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_script_folder_is_not_importable():
    """Run as a file, the modules beside the entry must not become top-level names."""
    code = f"import runpy, sys; sys.path.insert(0, {str(Path(SCRIPT).parent)!r}); sys.argv[1:] = ['--help']\n"
    code += f"try: runpy.run_path({SCRIPT!r}, run_name='__main__')\nexcept SystemExit: pass\nimport validation"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert "No module named 'validation'" in done.stderr
