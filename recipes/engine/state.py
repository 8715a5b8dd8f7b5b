"""Where a rank keeps the fp32 master and the optimizer moments of each parameter, whatever DeepSpeed wrapped around them.

ZeRO-1/2 flatten each parameter group and give every rank one slice of it, ZeRO-3 does so with each parameter, whose weights a
rank then has only while they are used; without ZeRO a rank has everything. `fragments` hides the differences: per parameter, the
elements of its flattened form that this rank owns, as views into the live state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recipes import collectives

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + numel) of a flattened parameter: views of its fp32 master and moments."""

    start: int
    master: torch.Tensor
    moments: dict[str, torch.Tensor]

    @property
    def states(self) -> dict[str, torch.Tensor]:
        """Master and moments by name."""
        return {"master": self.master, **self.moments}


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of a parameter, of which ZeRO-3 may have taken the weights away."""
    return getattr(parameter, "ds_shape", parameter.shape)


def prepare_moments(optimizer: torch.optim.Optimizer, wrapper: Any) -> None:
    """Create AdamW's state ahead of its first step, so that it can be linked, saved and loaded at any time."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    for master in (
        masters or wrapper.fp32_partitioned_groups_flat
    ):  # ZeRO-3 fills the groups one at a time, at each step
        state = optimizer.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state.update({name: torch.zeros_like(master, requires_grad=False) for name in MOMENTS})
    set_applied_steps(
        optimizer, 0
    )  # DeepSpeed may have created it by a step, at the learning rate 0 that we start with


def applied_steps(optimizer: torch.optim.Optimizer) -> int:
    """Updates made so far; smaller than the step when steps were skipped."""
    return int(max((state["step"] for state in optimizer.state.values() if "step" in state), default=0))


def set_applied_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Restore the count that AdamW's bias correction uses."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(steps)


def fragments(optimizer: torch.optim.Optimizer, wrapper: Any, parameter: nn.Parameter) -> Fragment | None:
    """This rank's fragment of `parameter`, or None if ZeRO gave it none. `wrapper` is DeepSpeed's optimizer."""
    if hasattr(parameter, "ds_id"):  # ZeRO-3: a slice of each parameter, the last ones padded
        number, at, numel = wrapper.grad_position[wrapper.get_param_id(parameter)]
        start = dist.get_rank(parameter.ds_process_group) * numel  # type: ignore[attr-defined]
        held = min(numel, full_shape(parameter).numel() - start)
        return _slice(optimizer, wrapper.fp32_partitioned_groups_flat[number], start, at, held) if held > 0 else None
    if hasattr(parameter, "_hp_mapping"):  # ZeRO-1/2 and the bf16 optimizer: a slice of a flat partition
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        flat = optimizer.param_groups[mapping.param_group_index]["params"][0]
        at, numel = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
        return _slice(optimizer, flat, mapping.lp_fragment_address.start, at, numel)
    master = parameter
    if hasattr(wrapper, "fp32_groups"):  # bf16 without ZeRO: one fp32 copy per parameter
        pairs = zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        master = next(m for low, high in pairs for p, m in zip(low, high, strict=True) if p is parameter)
    return _slice(optimizer, master, 0, 0, master.numel())


def _slice(optimizer: torch.optim.Optimizer, master: torch.Tensor, start: int, at: int, numel: int) -> Fragment:
    def view(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().view(-1).narrow(0, at, numel)

    state = optimizer.state.get(master, {})
    return Fragment(start, view(master), {name: view(state[name]) for name in MOMENTS if name in state})


def join(fragment: Fragment | None, parameter: nn.Parameter, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The whole of each named state, shaped like the parameter, on every rank of its partition group (a collective)."""
    group = getattr(parameter, "ds_process_group", None) or getattr(parameter, "_dp_group", None)
    shape = full_shape(parameter)
    if group is None:  # nothing is partitioned
        assert fragment is not None
        return {name: fragment.states[name].view(shape) for name in names}
    flat = torch.zeros(len(names), shape.numel(), dtype=torch.float32, device=collectives.device())
    if fragment is not None:
        for row, name in zip(flat, names, strict=True):
            row.narrow(0, fragment.start, fragment.master.numel()).copy_(fragment.states[name])
    collectives.join_fragments(flat, group)
    return {name: row.view(shape) for name, row in zip(names, flat, strict=True)}
