"""Branch-Train-Merge as users run it, with jobs forked after the slow imports: kills, deletions, sockets, all stages.

What several tests read is made by fixtures, in two halves, so that each is well inside the limit of a test.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from recipes.btm import pool
from recipes.btm.__main__ import main
from recipes.btm.pipeline import last_checkpoint
from recipes.checkpoint.format import Checkpoint
from recipes.data.synthetic import write_dataset
from tests.distributed.btm_jobs import forked_jobs
from tests.distributed.launching import steps_recorded, tiny_overrides, wait_until
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

STEPS = 16  # seed 8, branches to 12, then the mix
BEFORE_MERGE = "btm.stages=[split,seed,branch,train]"
NO_CONTROL = "btm.random_control=false"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("btm_data") / "indexed", 60, 12_000, ("a", "b", "c"))


def settings(data: Path, folder: Path, *more: str) -> list[str]:
    """Two domains, a seed of half the steps, a mix at the end."""
    common = (f"train.steps={STEPS}", "optimizer.lr=1e-2", "optimizer.min_lr=1e-3", "data.domain_weights={a:1,b:1}")
    own = (
        "btm.mix_share=0.25",
        "btm.development_samples=4",
        "btm.workers=2",
        "run.resume=auto",
        "train.eval_samples=4",
    )
    overrides = [text for text in tiny_overrides(data, folder, *common) if not text.startswith("train.eval_samples")]
    return [*overrides, *own, *more]


def train(data: Path, folder: Path, *more: str, fault_of=lambda name: None) -> None:
    with forked_jobs(fault_of):
        assert main(settings(data, folder, BEFORE_MERGE, *more)) == 0


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    """Seed, dense run and branches."""
    folder = tmp_path_factory.mktemp("btm") / "run"
    train(data, folder, NO_CONTROL)
    return folder


def stamps(folder: Path) -> dict[str, tuple[str, int]]:
    """Content digest and time of making of every artefact."""
    found = {}
    for file in folder.rglob("artefact.json"):
        found[str(file.parent.relative_to(folder))] = (json.loads(file.read_text())["content"], file.stat().st_mtime_ns)
    return found


def contents(folder: Path) -> dict[str, str]:
    return {path: content for path, (content, _) in stamps(folder).items()}


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {
        f"{kind}:{name}": checkpoint.read(kind, name)
        for kind in ("model", "optimizer")
        for name in checkpoint.tensors(kind)
    }


def test_every_branch_is_trained_from_the_seed_on_its_own_text(trained):
    names = {"split/domain", "seed", "starts/seed", "dense", "branches/a", "branches/b"}
    assert contents(trained).keys() == names
    assert None not in contents(trained).values() and len(set(contents(trained).values())) == len(contents(trained))
    seed, branch = last_checkpoint(trained / "seed", 8), last_checkpoint(trained / "branches" / "a", 12)
    assert branch.trainer["applied_steps"] == 12 and seed.trainer["applied_steps"] == 8
    assert branch.trainer["config"]["data"]["domain_weights"] == {"a": 1.0}
    assert branch.trainer["config"]["train"]["global_batch_size"] == 4


def test_the_dense_control_is_the_run_without_a_seed(data, trained, tmp_path):
    """Weights, moments, step, data order and schedule of the seed are gone on with bit for bit."""
    words = [word for word in settings(data, tmp_path / "straight") if not word.startswith("btm.")]
    job = pool.Job("straight", pool.command(words, 1), tmp_path / "log")
    with forked_jobs():
        pool.run_jobs([job], 1, 0, done=lambda job: None, say=print)
    straight = tensors(last_checkpoint(tmp_path / "straight", STEPS))
    dense = tensors(last_checkpoint(trained / "dense", STEPS))
    assert straight.keys() == dense.keys()
    assert [name for name in dense if not torch.equal(dense[name], straight[name])] == []


def test_a_branch_that_is_killed_is_trained_again_alone_to_the_same_bits(data, trained, tmp_path, capfd):
    folder, mark = tmp_path / "run", tmp_path / "killed"
    train(
        data, folder, "checkpoint.save_interval=2", NO_CONTROL, fault_of=lambda name: str(mark) if name == "b" else None
    )
    assert mark.exists() and "b ended with code -9; attempt 2 of 3" in capfd.readouterr().out
    assert contents(folder) == contents(trained)


def test_what_is_deleted_is_made_again_and_nothing_else(data, trained):
    before = stamps(trained)
    shutil.rmtree(trained / "branches" / "a")
    train(data, trained, NO_CONTROL)
    after = stamps(trained)
    assert {path for path in before if after[path] != before[path]} == {"branches/a"}
    assert after["branches/a"][0] == before["branches/a"][0]


def test_an_input_that_changes_changes_what_depends_on_it(data, trained, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    before = stamps(folder)
    train(data, folder, NO_CONTROL, "telemetry.log_interval=7")
    assert stamps(folder) == before
    shutil.rmtree(folder / "seed" / "checkpoints")
    (folder / "seed" / "artefact.json").write_text('{"inputs": {"settings": "others"}, "content": "?"}')
    train(data, folder, NO_CONTROL)
    assert contents(folder) == {path: content for path, (content, _) in before.items()}
    assert {path for path, stamp in stamps(folder).items() if stamp != before[path]} == {"seed"}


def test_branches_share_no_socket_and_no_pipe(data, trained, tmp_path):
    jobs = []
    for name in ("a", "b"):
        words = settings(data, tmp_path / name, "train.steps=100000", f"data.domain_weights={{{name}:1}}")
        words = [word for word in words if not word.startswith("btm.")]
        jobs.append(pool.Job(name, pool.command(words, 1), tmp_path / f"{name}.log"))
    with forked_jobs():
        for job in jobs:
            job.start()
        processes = [psutil.Process(job.process.pid) for job in jobs]  # type: ignore[union-attr]
        watched = [SimpleNamespace(output=job.log.read_text) for job in jobs]
        try:
            wait_until(lambda: all(steps_recorded(tmp_path / job.name) > 2 for job in jobs), 50, *watched)
            held = [_ends(process) for process in processes]
            ports = [{c.laddr.port for c in process.net_connections("inet")} for process in processes]
            reached = [{c.raddr.port for c in process.net_connections("inet") if c.raddr} for process in processes]
        finally:
            for process in processes:
                process.kill()
    ours = _ends(psutil.Process())
    assert all(held) and not (held[0] & held[1]) - ours - _of_server()
    assert not reached[0] & ports[1] and not reached[1] & ports[0]


def _ends(process: psutil.Process) -> set[str]:
    """Sockets and pipes that a process has open, by inode."""
    folder, found = Path(f"/proc/{process.pid}/fd"), set()
    for entry in os.listdir(folder):
        try:
            target = os.readlink(folder / entry)
        except OSError:
            continue
        if target.startswith(("socket:", "pipe:")):
            found.add(target)
    return found


def _of_server() -> set[str]:
    """What forked processes inherit from the server that they are forked from, which real ones have not."""
    found: set[str] = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if any(word in " ".join(child.cmdline()) for word in ("forkserver", "tracker")):
                found |= _ends(child)
    return found


@pytest.fixture(scope="module")
def mixed(data, trained, tmp_path_factory) -> Path:
    """And control, merge and mix: models are opened in a forked process, training is started from this one."""
    folder = tmp_path_factory.mktemp("btm_all") / "run"
    shutil.copytree(trained, folder)
    train(data, folder)
    _models(data, folder, "merge")
    with forked_jobs():
        assert main(settings(data, folder, "btm.stages=[mix]")) == 0
    return folder


def _models(data: Path, folder: Path, stage: str, *more: str) -> str:
    words = settings(data, folder, f"btm.stages=[{stage}]", *more)
    ((code, out, err),) = run_ranks("call_tool", 1, "recipes.btm.__main__", words)
    assert code == 0, err
    return out


def test_the_control_has_branches_of_its_own_and_the_mix_is_trained(trained, mixed):
    made = contents(mixed)
    assert {path: made[path] for path in contents(trained)} == contents(trained)
    assert {"split/random", "control/random0", "control/random1", "merge", "mix/start", "mix/trained"} <= made.keys()
    control = last_checkpoint(mixed / "control" / "random1", 12).trainer["config"]["data"]
    assert control["domain_weights"] == {"random1-a": 1.0, "random1-b": 1.0}


@pytest.fixture(scope="module")
def finished(data, mixed) -> Path:
    _models(data, mixed, "evaluate")
    return mixed


def test_all_stages_end_in_one_summary(finished):
    summary = json.loads((finished / "summary.json").read_text())
    names = (
        "dense",
        "seed",
        "ensemble_domain",
        "ensemble_random",
        "average_uniform",
        "average_posterior",
        "mix",
        "mix_ridge",
    )
    for name in names:
        assert 1 < summary[f"ppl_{name}"] < 60
        assert summary[f"ppl_{name}_by_domain"].keys() == {"a", "b"}
    assert summary["flops_btm"] == pytest.approx(summary["flops_dense"] * 12 / 16)
    assert summary["flops_btx"] <= summary["flops_dense"]
    pictures = {"matrix.png", "posterior.png", "experts.png"}
    assert pictures | {"results.json"} <= {path.name for path in (finished / "evaluate").iterdir()}
    use = json.loads((finished / "evaluate" / "results.json").read_text())["mixes"]["mix"]["experts"]
    assert use["names"] == ["a", "b"] and use["shares"].keys() == {"a", "b"} and 0 <= use["specificity_bits"] <= 1


def test_the_ensemble_is_evaluated_like_any_checkpoint(data, finished, tmp_path):
    words = [
        str(finished / "merge" / "ensemble"),
        "--data",
        str(data),
        "--samples",
        "4",
        "--json",
        str(tmp_path / "a.json"),
    ]
    ((code, _, err),) = run_ranks("call_tool", 1, "tools.evaluate", words)
    assert code == 0, err
    found = {row["domain"]: row["perplexity"] for row in json.loads((tmp_path / "a.json").read_text())["rows"]}
    results = json.loads((finished / "evaluate" / "results.json").read_text())
    singles = [results["models"][name]["by_domain"] for name in ("a", "b")]
    for domain in ("a", "b"):
        each = [single[domain] for single in singles]
        assert min(each) * 0.98 < found[domain] < max(each)


def test_a_domain_is_added_and_another_removed_without_touching_the_other_branches(data, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = stamps(folder)
    added = ("btm.add_domains=[c]", "data.domain_weights={a:1,b:1,c:1}", "btm.mix_share=0.25")
    _models(data, folder, "branch", *added)
    with forked_jobs():
        assert main(settings(data, folder, "btm.stages=[train]", *added)) == 0
    branch, first = (last_checkpoint(folder / path, step) for path, step in (("branches/c", 12), ("starts/c", 8)))
    assert branch.trainer["config"]["data"]["domain_weights"] == {"c": 1.0}
    weights = first.read("model", "layers.0.attention.q.weight")
    members = [
        last_checkpoint(folder / "branches" / name, 12).read("model", "layers.0.attention.q.weight") for name in "ab"
    ]
    low, high = torch.minimum(*members), torch.maximum(*members)
    assert torch.maximum(low - weights, weights - high).max() < 1e-6 and not torch.equal(*members)
    _models(data, folder, "merge", *added)
    names = json.loads((folder / "merge" / "ensemble" / "ensemble.json").read_text())["branches"]
    assert list(names) == ["a", "b", "c"]
    _models(data, folder, "merge", *added, "btm.remove_domains=[a]")
    names = json.loads((folder / "merge" / "ensemble" / "ensemble.json").read_text())["branches"]
    assert list(names) == ["b", "c"]
    runs = [path for path in before if not path.startswith(("scores", "merge", "mix", "evaluate"))]
    assert {path: before[path] for path in runs} == {path: stamps(folder)[path] for path in runs}


TOPICS = ("the cat and the dog chase a mouse in the house", "a proof of the lemma over a field of sums is given")


def write_topics(folder: Path) -> Path:
    """One indexed domain of documents of two topics by turns, in words."""
    from tools.index import main as index
    from tools.tokenizer import train as train_tokenizer

    (folder / "corpus").mkdir()
    generator = random.Random(1)
    texts = (" ".join(generator.choices(TOPICS[number % 2].split(), k=60)) for number in range(160))
    lines = (json.dumps({"text": text}) for text in texts)
    (folder / "corpus" / "text.jsonl").write_text("\n".join(lines))
    train_tokenizer([folder / "corpus"], 320, folder / "our.model", max_bytes=10**6, seed=1)
    inputs = ["--input", str(folder / "corpus"), "--tokenizer", str(folder / "our.model"), "--split", "6,3,1"]
    assert index([*inputs, "--out", str(folder / "data")]) == 0
    return folder / "data"


def test_clusters_of_text_without_labels_from_end_to_end(tmp_path):
    """Each branch learns one of the topics, which no label tells apart, and the text routes to the branch that knows it."""
    data, folder = write_topics(tmp_path), tmp_path / "run"
    words = tiny_overrides(data, folder, "btm=cluster", "btm.num_branches=2", "btm.cluster_route_every=4")
    words += ["train.steps=16", "train.eval_samples=8", "btm.development_samples=4", "run.resume=auto"]
    words = [word for word in words if word not in ("train.eval_samples=0", "experiment=debug")]
    words = ["experiment=debug", "optimizer.lr=1e-2", *words]
    with forked_jobs():
        assert main([*words, BEFORE_MERGE]) == 0
    parts = json.loads((folder / "split" / "cluster" / "split.json").read_text())
    assert parts["distinct"] and parts["mean_divergence_bits"] > 0.3 and len(parts["parts"]) == 2
    ((code, _, err),) = run_ranks("call_tool", 1, "recipes.btm.__main__", [*words, "btm.stages=[merge,evaluate]"])
    assert code == 0, err
    results = json.loads((folder / "evaluate" / "results.json").read_text())
    routed, branches = results["ensemble"]["cluster"]["ppl"], [results["models"][f"cluster{k}"]["ppl"] for k in (0, 1)]
    assert routed < min(branches)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ppl_ensemble_cluster"] == routed and summary["ppl_ensemble_random"] is None
