"""What a legal description does that its keys do not show: one line each, printed before anything is started."""

from __future__ import annotations

from recipes.config import Config, RouterType
from recipes.schema import show


def notes(config: Config) -> list[str]:
    """Routing that depends on other documents and sequences, whatever is masked; documents told apart in one way only."""
    return [*_routing(config), *_documents(config)]


def _routing(config: Config) -> list[str]:
    moe = config.moe
    if not moe.has_experts:
        return []
    kind, found = f"moe.moe_router_type={moe.moe_router_type.name}", []
    others = "other documents and sequences of the micro-batch"
    if moe.moe_router_type is RouterType.expert_choice:
        found.append(f"{kind}: which experts take a token depends on {others}, and on later tokens of its own")
    if moe.moe_router_type is RouterType.sinkhorn:
        found.append(f"{kind}: in training the prices of experts, and so a token's choice, depend on {others}")
    factors = {name: getattr(moe, f"moe_{name}_capacity_factor") for name in ("expert", "eval")}
    if moe.moe_router_type is not RouterType.expert_choice and any(factors.values()):
        shown = ", ".join(f"moe.moe_{name}_capacity_factor={value}" for name, value in factors.items() if value)
        found.append(f"{shown}: whether a full expert turns a token away depends on {others}")
    return found


def _documents(config: Config) -> list[str]:
    data = config.data
    if data.reset_position_ids == data.reset_attention_mask:
        return []
    set_, unset = ("position_ids", "attention_mask")[:: 1 if data.reset_position_ids else -1]
    means = {
        "position_ids": "tokens attend to earlier documents, at distances that are wrong",
        "attention_mask": "positions go on from document to document",
    }[set_]
    return [
        f"data.reset_{set_}={show(True)} with data.reset_{unset}={show(False)}: {means}; most runs set both or none"
    ]
