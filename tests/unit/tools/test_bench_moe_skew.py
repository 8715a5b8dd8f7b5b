"""A router that prefers some experts as in Zipf's law, experts on two ranks: nothing is lost, and every value is the oracle's."""

from __future__ import annotations

import os

import torch

from tests.ranks import run_ranks
from tests.unit.moe import oracle
from tools.bench import moe_skew
from tools.bench.moe_peers import Shape

SHAPE = Shape(experts=8, tokens=64, hidden=16, ffn=12)


def on_ranks(rank: int, world_size: int) -> dict:
    """Outputs and gradients of this rank, and what it would report."""
    from recipes.launcher import rank_environment
    from recipes.train.job import start_process

    config = moe_skew.layer_config(SHAPE)
    start_process(config, rank_environment(os.environ))
    x = moe_skew.routed_inputs(SHAPE, "zipf", rank).requires_grad_()
    layer = moe_skew.build_layer(config, SHAPE)
    out = layer(x[:, None])[0][:, 0]
    out.backward(torch.ones_like(out))
    routed = layer.routed
    grads = {"x": x.grad, "w1": routed.w1_LGH.grad, "w2": routed.w2_LHF.grad, "router": routed.router.grad}
    counts = layer.context.finish_step()["moe/tokens_per_expert"][0]
    return {"x": x.detach(), "out": out.detach(), "counts": counts, "grads": grads} | {
        "report": moe_skew.on_rank(config, SHAPE, rank, rounds=1, repeats=1)
    }


def test_zipf_over_experts_of_two_ranks():
    ranks = run_ranks("tests.unit.tools.test_bench_moe_skew:on_ranks", 2)
    x = torch.cat([rank["x"] for rank in ranks]).double().requires_grad_()
    _, w1_EFH, w2_EHF = SHAPE.weights()
    weights = {"router": torch.eye(8, 16, dtype=torch.float64)}
    weights |= {f"experts.{e}.up": w1_FH.double() for e, w1_FH in enumerate(w1_EFH)}
    weights |= {f"experts.{e}.down": w2_HF.double() for e, w2_HF in enumerate(w2_EHF)}
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    routed = oracle.moe_layer(x[:, None], weights, 1, pre_softmax=True)
    routed.out_SBH.sum().backward()

    assert ranks[0]["counts"] == ranks[1]["counts"] == routed.counts_E and sum(routed.counts_E) == 128
    assert routed.counts_E[0] > 3 * routed.counts_E[7] > 0  # skewed indeed
    rows = [rank["report"]["zipf"]["rows"] for rank in ranks]
    assert rows == [sum(routed.counts_E[:4]), sum(routed.counts_E[4:])] and rows[0] > 2 * rows[1]
    assert [rank["report"]["even"]["rows"] for rank in ranks] == [64, 64]
    saved = [rank["report"]["zipf"]["saved_bytes"] for rank in ranks]
    assert saved[0] > ranks[0]["report"]["even"]["saved_bytes"] > saved[1]

    found = {"out": torch.cat([rank["out"] for rank in ranks]), "x": torch.cat([r["grads"]["x"] for r in ranks])}
    found |= {"router": ranks[0]["grads"]["router"] + ranks[1]["grads"]["router"]}
    found |= {name: torch.cat([rank["grads"][name] for rank in ranks]) for name in ("w1", "w2")}
    wanted = {"out": routed.out_SBH[:, 0], "x": x.grad, "router": weights["router"].grad}
    wanted |= {"w1": torch.stack([weights[f"experts.{e}.up"].grad for e in range(8)])}
    wanted |= {"w2": torch.stack([weights[f"experts.{e}.down"].grad for e in range(8)])}
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name
        assert (1.001 * found[name] - value).norm() > 1e-5 * value.norm()  # the comparison can fail


def test_rows():
    ranks = [
        {"even": {"seconds": [1.0, 2.0], "rows": 64, "saved_bytes": 10}, "zipf": {"seconds": [3.0, 4.0]} | busy}
        for busy in ({"rows": 100, "saved_bytes": 16}, {"rows": 28, "saved_bytes": 4})
    ]
    even, zipf = moe_skew.rows_of(SHAPE, ranks)
    assert (even["impl"], even["time_over_even"], even["iqr"], even["rows"]) == ("even", 1.0, 0.0, [64, 64])
    assert (zipf["impl"], zipf["time_over_even"], zipf["iqr"]) == ("zipf", 2.5, 0.5)
    assert zipf["tokens_per_second"] == 2 * 64 / 3.5
    assert (zipf["rows"], zipf["saved_bytes"], zipf["experts"]) == ([100, 28], [16, 4], 8)
