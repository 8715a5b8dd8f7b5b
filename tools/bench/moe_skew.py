"""Our layer on two ranks that share the experts: tokens spread evenly over them, and as in Zipf's law (expert e gets 1 / (e + 1)).

Nothing is dropped, so the rank with the popular experts has most of the work and keeps most of the activations, and the other
waits for it. A call, forward and backward, ends when both are done.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from recipes.config import Activation, Config
from recipes.launcher import Ranks
from tools.bench.moe_layer import saved_bytes
from tools.bench.moe_peers import Peer, Shape
from tools.bench.rounds import interleave, median_and_iqr, ratio

RANKS = 2
KINDS = ("even", "zipf")


def measure(shape: Shape, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Rows `even` and `zipf`: time over even (median and interquartile range), and of each rank the rows that its experts
    get and the bytes that the forward pass leaves for the backward pass. `tokens` are those of each rank."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        torch.multiprocessing.spawn(_rank, (port, shape, rounds, repeats, folder), nprocs=RANKS)
        return rows_of(shape, [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)])


def rows_of(shape: Shape, ranks: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of what `on_rank` found on each rank; a call takes as long on one rank as on the other."""
    rows = []
    for kind in KINDS:
        over_even, spread = ratio(ranks[0][kind]["seconds"], ranks[0]["even"]["seconds"])
        rows.append(
            {
                "impl": kind,
                "experts": shape.experts,
                "topk": shape.topk,
                "tokens": shape.tokens,
                "hidden": shape.hidden,
                "ffn": shape.ffn,
                "time_over_even": over_even,
                "iqr": spread,
                "tokens_per_second": RANKS * shape.tokens / median_and_iqr(ranks[0][kind]["seconds"])[0],
                "rows": [rank[kind]["rows"] for rank in ranks],
                "saved_bytes": [rank[kind]["saved_bytes"] for rank in ranks],
            }
        )
    return rows


def _rank(rank: int, port: int, shape: Shape, rounds: int, repeats: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    from recipes.train.job import start_process

    config = layer_config(shape)
    start_process(config, Ranks(rank, rank, RANKS, RANKS, "127.0.0.1", port))
    found = on_rank(config, shape, rank, rounds, repeats)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def layer_config(shape: Shape) -> Config:
    """One layer whose experts are shared by two ranks, top-k of the softmax, no balance loss."""
    config = Config()
    config.model.num_layers, config.model.seq_length, config.model.hidden_size = 1, shape.tokens, shape.hidden
    config.model.activation = Activation.gelu
    config.train.global_batch_size, config.train.micro_batch_size = RANKS, 1
    config.moe.num_moe_experts, config.moe.moe_ffn_hidden_size = shape.experts, shape.ffn
    config.moe.moe_router_topk, config.moe.moe_aux_loss_coeff = shape.topk, 0.0
    config.parallel.expert_model_parallel_size = RANKS
    return config


def routed_inputs(shape: Shape, kind: str, rank: int) -> torch.Tensor:
    """Tokens [T, H] that a router of rows `one in dimension e` sends to experts as `kind` says."""
    assert shape.experts <= shape.hidden
    generator = torch.Generator().manual_seed(rank)
    experts_T = torch.arange(shape.tokens) % shape.experts
    if kind == "zipf":
        shares_E = 1 / torch.arange(1.0, shape.experts + 1)
        experts_T = torch.multinomial(shares_E, shape.tokens, replacement=True, generator=generator)
    x_TH = 0.1 * torch.randn(shape.tokens, shape.hidden, generator=generator)
    return x_TH.scatter_add_(1, experts_T[:, None], torch.full((shape.tokens, 1), 2.0))


def build_layer(config: Config, shape: Shape) -> Any:
    """This rank's part of the layer with the weights of `shape`, and a router that reads the expert off the token."""
    from types import SimpleNamespace

    from recipes.groups import enter
    from recipes.moe.context import MoeContext
    from recipes.moe.layer import MoeLayer
    from recipes.topology import Role, layout_of

    context = MoeContext(config, enter(layout_of(config, RANKS)))
    layer = MoeLayer(SimpleNamespace(params_dtype=shape.dtype), config, context, 0)
    _, w1_EFH, w2_EHF = shape.weights()
    local = shape.experts // RANKS
    first = context.groups.index(Role.ep) * local
    own = slice(first, first + local)
    with torch.no_grad():
        layer.routed.router.copy_(torch.eye(shape.experts, shape.hidden))  # type: ignore[union-attr]
        layer.routed.w1_LGH.copy_(w1_EFH[own])  # type: ignore[operator]
        layer.routed.w2_LHF.copy_(w2_EHF[own])  # type: ignore[operator]
    return layer


def on_rank(config: Config, shape: Shape, rank: int, rounds: int, repeats: int) -> dict[str, dict[str, Any]]:
    """What this rank measures of both kinds."""
    from recipes import collectives

    layer = build_layer(config, shape)
    local = shape.experts // RANKS
    peer = Peer(layer, lambda x_TH: layer(x_TH[:, None])[0].squeeze(1), shape.ffn)
    grad_TH = shape.inputs()[1]
    found: dict[str, dict[str, Any]] = {}
    work: dict[str, Callable[[], None]] = {}
    for kind in KINDS:
        x_TH = routed_inputs(shape, kind, rank).requires_grad_()
        saved = saved_bytes(peer, x_TH)
        counts_E = layer.context.finish_step()["moe/tokens_per_expert"][0]  # of all ranks
        found[kind] = {"saved_bytes": saved, "rows": sum(counts_E[rank * local : (rank + 1) * local])}

        def step(x_TH: torch.Tensor = x_TH) -> None:
            peer.call(x_TH).backward(grad_TH)
            x_TH.grad = None
            layer.zero_grad(set_to_none=True)
            collectives.barrier()

        work[kind] = step
    for kind, seconds in interleave(work, rounds, repeats).items():
        found[kind]["seconds"] = seconds
    return found
