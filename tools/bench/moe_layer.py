"""One layer with experts, forward and backward: ours and the peers' over the dense network of equal FLOPs.

Every implementation gets the same tokens on the same device in interleaved rounds; a call ends with the gradients dropped, as a
step of training does. `floor` is what no layer of this kind can do without: the six matrix products of every expert, each into
memory that is there already, and the activation; no router, no tokens moved, no autograd; `floor_torch`: the same with torch's
products in place of ours. (On a CPU: a GPU would wait for the launch of each.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from recipes.config import Config
from recipes.launcher import Ranks
from recipes.moe.products import Product, by_torch, product_for
from tools.bench.moe_peers import IMPLEMENTATIONS, Peer, Shape, build
from tools.bench.rounds import interleave, median_and_iqr, ratio

# (experts, tokens, experts per token): those of the targets, 128 tokens per expert with 8 and 64, and top-2.
STANDARD = [(8, 2048, 1), (64, 2048, 1), (8, 1024, 1), (64, 8192, 1), (8, 2048, 2)]
# Products without sparsity in bf16, in FLOPs per second, from NVIDIA's data sheets.
_PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


def parse(overrides: Sequence[str], device: str) -> list[Shape]:
    """Shapes from `experts=64 tokens=8192 topk=2 hidden=256 ffn=1024`; without any, the standard ones.

    Raises ValueError for other keys, for numbers below 1, and for a device that is not there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu")
    place: dict[str, Any] = {"device": torch.device(device)}
    place["dtype"] = torch.bfloat16 if device == "cuda" else torch.float32
    if not overrides:
        return [Shape(experts, tokens, topk, **place) for experts, tokens, topk in STANDARD]
    legal = [field.name for field in fields(Shape) if field.name not in place]
    sizes: dict[str, Any] = {"experts": 8, "tokens": 2048}
    for override in overrides:
        key, _, value = override.partition("=")
        if key not in legal or not value.isdigit() or int(value) < 1:
            raise ValueError(f"{override}: give numbers of at least 1 for {', '.join(legal)}, such as experts=64")
        sizes[key] = int(value)
    shape = Shape(**sizes, **place)
    if shape.topk > shape.experts:
        raise ValueError(f"topk={shape.topk}: must be at most experts={shape.experts}")
    return [shape]


def chosen(names: str | None) -> list[str]:
    """The implementations of these names, by comma, and always the dense network; None: all. Raises ValueError for others."""
    asked = list(IMPLEMENTATIONS) if names is None else names.split(",")
    if unknown := [name for name in asked if name not in IMPLEMENTATIONS]:
        raise ValueError(f"--only {names}: unknown {unknown[0]!r}; use some of {','.join(IMPLEMENTATIONS)}")
    return [name for name in IMPLEMENTATIONS if name == "dense" or name in asked]


def measure(shapes: list[Shape], rounds: int, repeats: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """A row per shape and implementation: time over that of the dense network (median and interquartile range of the rounds),
    tokens per second, bytes that the forward pass leaves for the backward pass; on CUDA model FLOPs utilisation."""
    from recipes.train.job import start_process

    start_process(Config(), Ranks())
    return [row for shape in shapes for row in _rows(shape, rounds, repeats, names)]


def _rows(shape: Shape, rounds: int, repeats: int, names: Sequence[str]) -> list[dict[str, Any]]:
    peers = {name: build(name, shape) for name in names}
    x_TH, grad_TH = shape.inputs()
    x_TH.requires_grad_()
    work = {name: _step(peer, x_TH, grad_TH) for name, peer in peers.items()}
    floors = {"floor": product_for(x_TH), "floor_torch": by_torch} if shape.device.type == "cpu" else {}
    work |= {name: floor(shape, multiply) for name, multiply in floors.items()}
    saved = {name: saved_bytes(peer, x_TH) for name, peer in peers.items()} | dict.fromkeys(floors, 0)
    seconds = interleave(work, rounds, repeats)
    rows = []
    for name, times in seconds.items():
        over_dense, spread = ratio(times, seconds["dense"])
        row = {field.name: getattr(shape, field.name) for field in fields(Shape)}
        row |= {"impl": name, "device": shape.device.type, "dtype": str(shape.dtype).removeprefix("torch.")}
        row |= {"ffn": peers[name].ffn if name in peers else shape.ffn}
        row |= {
            "time_over_dense": over_dense,
            "iqr": spread,
            "tokens_per_second": shape.tokens / median_and_iqr(times)[0],
        }
        row |= {"saved_bytes": saved[name], "mfu": _utilisation(shape, median_and_iqr(times)[0])}
        rows.append(row)
    return rows


def _step(peer: Peer, x_TH: torch.Tensor, grad_TH: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        peer.call(x_TH).backward(grad_TH)
        x_TH.grad = None
        peer.module.zero_grad(set_to_none=True)
        _wait(x_TH.device)

    return step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def saved_bytes(peer: Peer, x_TH: torch.Tensor) -> int:
    """Bytes of the distinct storages, parameters apart, that a forward pass keeps for the backward pass; its input is one."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in peer.module.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out_TH = peer.call(x_TH)  # alive while it is counted, so that no address is given out twice
    total = sum(storages.values())
    del out_TH
    return total


def floor(shape: Shape, multiply: Product) -> Callable[[], None]:
    """The products and activations of experts that get equally many tokens, or one more."""
    rows, hidden, ffn = shape.tokens * shape.topk, shape.hidden, shape.ffn
    sizes = [len(part) for part in torch.arange(rows).tensor_split(shape.experts)]
    _, w1_EFH, w2_EHF = shape.weights()
    grad_w1_EFH, grad_w2_EHF = torch.zeros_like(w1_EFH), torch.zeros_like(w2_EHF)
    x_RH, y_RH, grad_x_RH = (shape.place(torch.randn(rows, hidden)) for _ in range(3))
    h_RF, a_RF, grad_RF = (shape.place(torch.randn(rows, ffn)) for _ in range(3))
    by_rows = [tensor.split(sizes) for tensor in (x_RH, y_RH, grad_x_RH, h_RF, a_RF, grad_RF)]
    by_expert = [stack.unbind() for stack in (w1_EFH, w2_EHF, grad_w1_EFH, grad_w2_EHF)]

    @torch.no_grad()
    def step() -> None:
        for x, y, _, h, a, _, w1, w2, _, _ in zip(*by_rows, *by_expert, strict=True):
            multiply(x, w1.t(), h, gelu=a)
            multiply(a, w2.t(), y)
        for x, y, grad_x, h, a, grad, w1, w2, grad_w1, grad_w2 in zip(*by_rows, *by_expert, strict=True):
            multiply(y, w2, grad, slope_at=h)
            multiply(y.t(), a, grad_w2, streams=True)
            multiply(grad, w1, grad_x)
            multiply(grad.t(), x, grad_w1, streams=True)

    return step


def _utilisation(shape: Shape, seconds: float) -> float | None:
    """Model FLOPs of forward and backward over what the device could do; None where that is not known."""
    if shape.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(shape.device)
    peak = next((peak for key, peak in _PEAK.items() if key in name), None)
    flops = 3 * 2 * shape.tokens * shape.hidden * (shape.experts + 2 * shape.topk * shape.ffn)
    return None if peak is None else flops / seconds / peak
