"""The benchmark of layers with experts: what it compares is alike, what it counts is right, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.ranks import run_ranks
from tests.tiny import tiny_config
from tests.unit.moe import oracle
from tools.bench import moe_layer
from tools.bench.moe_peers import IMPLEMENTATIONS, Peer, Shape

TINY = {"tokens": 24, "hidden": 8, "ffn": 24}


def start() -> None:
    from recipes.launcher import rank_environment
    from recipes.train.job import start_process

    start_process(tiny_config(), rank_environment(os.environ))


def outputs(rank: int, world_size: int, shape: Shape) -> dict[str, torch.Tensor]:
    """Of all implementations, and the gradients of their inputs."""
    from tools.bench.moe_peers import build

    start()
    found = {}
    for name in IMPLEMENTATIONS:
        x, grad = shape.inputs()
        x.requires_grad_()
        out = build(name, shape).call(x)
        out.backward(grad)
        found[name] = torch.stack((out.detach(), x.grad))
    return found


@pytest.mark.parametrize("topk", [1, 2])
def test_the_layers_with_gelu_experts_compute_the_same(topk):
    shape = Shape(experts=4, topk=topk, **TINY)
    found = run_ranks("tests.unit.tools.test_bench_moe_layer:outputs", 1, shape)[0]
    x_TH, _ = shape.inputs()
    router, w1_EFH, w2_EHF = (tensor.double() for tensor in shape.weights())
    weights = {"router": router}
    weights |= {f"experts.{e}.up": w1_FH for e, w1_FH in enumerate(w1_EFH)}
    weights |= {f"experts.{e}.down": w2_HF for e, w2_HF in enumerate(w2_EHF)}
    expected = oracle.moe_layer(x_TH.double()[:, None], weights, topk, pre_softmax=topk == 1).out_SBH[:, 0]
    scale = expected.abs().max()
    for name in ("ours_grouped", "deepspeed_drop_free", "mcore"):
        assert (found[name][0] - expected).abs().max() < 1e-5 * scale, name
        torch.testing.assert_close(found[name], found["ours_grouped"], rtol=1e-4, atol=1e-4 * scale.item())
    assert (found["deepspeed_cf1"][0] - expected).abs().max() > 1e-2 * scale  # it drops tokens
    assert all(torch.isfinite(value).all() for value in found.values())


def rows_of(rank: int, world_size: int, shapes: list[Shape]) -> list[dict]:
    """Rows of a measurement by a clock on which a call of ours takes 3 s, the dense network 2 s, the floor 1 s, others 5 s."""
    from tools.bench import rounds

    now, step, floor = [0.0], moe_layer._step, moe_layer.floor

    def timed(peer, x_TH, grad_TH):
        kind = type(peer.module).__name__
        inner = step(peer, x_TH, grad_TH)

        def call():
            now[0] += {"MoeLayer": 3.0, "Sequential": 2.0}.get(kind, 5.0)
            inner()
            assert x_TH.grad is None and all(p.grad is None for p in peer.module.parameters())

        return call

    def timed_floor(shape, multiply):
        inner = floor(shape, multiply)

        def call():
            now[0] += 1.0
            inner()

        return call

    rounds.time = SimpleNamespace(perf_counter=lambda: now[0])
    moe_layer._step, moe_layer.floor = timed, timed_floor
    return moe_layer.measure(shapes, 2, 1, list(IMPLEMENTATIONS))


def test_rows():
    shapes = [Shape(experts=4, **TINY), Shape(experts=2, topk=2, **TINY)]
    rows = run_ranks("tests.unit.tools.test_bench_moe_layer:rows_of", 1, shapes)[0]
    assert [row["impl"] for row in rows] == 2 * [*IMPLEMENTATIONS, "floor", "floor_torch"]
    for row, shape in zip(rows, 9 * shapes[:1] + 9 * shapes[1:], strict=True):
        sizes = {key: row[key] for key in ("experts", "topk", "tokens", "hidden")}
        assert sizes == {key: getattr(shape, key) for key in sizes}
        over_dense = {"ours_grouped": 1.5, "dense": 1.0, "floor": 0.5, "floor_torch": 0.5}.get(row["impl"], 2.5)
        assert (row["time_over_dense"], row["iqr"]) == (over_dense, 0.0)
        assert row["ffn"] == {"hf_mixtral": 16, "hf_qwen3_moe": 16, "dense": 24 * shape.topk}.get(row["impl"], 24)
        assert row["mfu"] is None
    ours, dense = (next(row for row in rows if row["impl"] == name) for name in ("ours_grouped", "dense"))
    assert ours["tokens_per_second"] == 8.0
    assert dense["saved_bytes"] == 4 * 24 * (8 + 24 + 24)  # x, h and gelu(h)
    kept = 4 * 24 * (8 + 24 + 24 + 8)  # x, h, gelu(h), outputs
    assert kept <= ours["saved_bytes"] <= 1.3 * kept


def test_a_storage_counts_once_and_parameters_do_not():
    linear = torch.nn.Linear(4, 4, bias=False)
    peer = Peer(linear, lambda x: linear(x) * x.view(-1, 4), 4)
    assert moe_layer.saved_bytes(peer, torch.randn(8, 4, requires_grad=True)) == 4 * (8 * 4 + 8 * 4)  # x, linear(x)


def test_shapes_from_the_command_line():
    standard = moe_layer.parse([], "cpu")
    assert [(s.experts, s.tokens, s.topk) for s in standard] == moe_layer.STANDARD
    (shape,) = moe_layer.parse(["experts=16", "topk=2", "ffn=64"], "cpu")
    assert (shape.experts, shape.tokens, shape.topk, shape.hidden, shape.ffn) == (16, 2048, 2, 256, 64)
    assert shape.gated_ffn == 40 and shape.dtype is torch.float32
    for wrong, message in (
        (["expert=4"], "expert=4: give numbers of at least 1 for experts, tokens, topk, hidden, ffn"),
        (["tokens=0"], "tokens=0: give numbers"),
        (["dtype=1"], "dtype=1: give numbers"),
        (["experts=2", "topk=3"], "topk=3: must be at most experts=2"),
    ):
        with pytest.raises(ValueError, match=message):
            moe_layer.parse(wrong, "cpu")


def test_implementations_from_the_command_line():
    assert moe_layer.chosen(None) == list(IMPLEMENTATIONS)
    assert moe_layer.chosen("mcore,ours_grouped") == ["dense", "ours_grouped", "mcore"]
    with pytest.raises(ValueError, match="--only mcore,tutel: unknown 'tutel'; use some of dense,ours_grouped"):
        moe_layer.chosen("mcore,tutel")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_there():
    with pytest.raises(ValueError, match="--device cuda: torch finds no CUDA device here; use --device cpu"):
        moe_layer.parse([], "cuda")


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda(tmp_path):
    command = [sys.executable, "-m", "tools.bench", "moe_layer", "experts=8", "tokens=2048", "--rounds", "3"]
    done = subprocess.run(
        [*command, "--device", "cuda", "--json", str(tmp_path / "rows.json")],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["impl"] for row in rows] == list(IMPLEMENTATIONS) and "tokens/s" in done.stdout
    assert {(row["device"], row["dtype"]) for row in rows} == {("cuda", "bfloat16")}
    known = any(name in torch.cuda.get_device_name() for name in moe_layer._PEAK)
    assert all(0 < row["mfu"] < 1 if known else row["mfu"] is None for row in rows) and ("MFU" in done.stdout) == known
