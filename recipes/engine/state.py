"""Where a rank keeps the fp32 master and the optimizer moments of each parameter, whatever DeepSpeed wrapped around them.

ZeRO flattens each parameter group and gives every rank one slice of it; without ZeRO a rank has everything. `fragments` hides
the difference: per parameter, the elements of its flattened form that this rank owns, as views into the live state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
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


def prepare_moments(optimizer: torch.optim.Optimizer) -> None:
    """Create AdamW's state ahead of its first step, so that it can be linked, saved and loaded at any time."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for master in group["params"]:
            state = optimizer.state[master]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                state.update({name: torch.zeros_like(master, requires_grad=False) for name in MOMENTS})


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
    group = getattr(parameter, "_dp_group", None)
    if group is None:  # nothing is partitioned
        assert fragment is not None
        return {name: fragment.states[name].view(parameter.shape) for name in names}
    flat = torch.zeros(len(names), parameter.numel(), dtype=torch.float32, device=parameter.device)
    if fragment is not None:
        for row, name in zip(flat, names, strict=True):
            row.narrow(0, fragment.start, fragment.master.numel()).copy_(fragment.states[name])
    collectives.join_fragments(flat, group)
    return {name: row.view(parameter.shape) for name, row in zip(names, flat, strict=True)}
