"""Branch-Train-Merge: its settings by themselves and against the batch, the steps and the model.

What the data says (domains, parts, held-out text) is checked by `recipes.btm.arms` when such a run starts.
"""

from __future__ import annotations

from recipes.config import BtmConfig, Config, SplitBy
from recipes.validation.limits import Problems


def check_btm(config: Config, world_size: int) -> Problems:
    """Every problem of the group `btm`. A run that leaves it at its defaults has none."""
    btm = config.btm
    left = 1 - btm.seed_share
    if left <= 0:
        yield f"btm.seed_share={btm.seed_share} must be above 0 and below 1, a share of the compute; try 0.5"
    elif btm.mix_share >= left:
        yield f"btm.mix_share={btm.mix_share} must be below 1 - btm.seed_share = {left:g}; try {left / 2:g}"
    yield from _names(btm)
    yield from _mix(config)


def _names(btm: BtmConfig) -> Problems:
    if both := sorted(set(btm.add_domains) & set(btm.remove_domains)):
        yield f"btm.add_domains and btm.remove_domains both name {', '.join(both)}; leave it out of one"
    if btm.split_by is not SplitBy.domain and btm.add_domains:
        yield f"btm.add_domains={btm.add_domains} needs btm.split_by=domain: other parts are made from all text at once"
    if any(weight < 0 for weight in btm.average_weights.values()) or (
        btm.average_weights and sum(btm.average_weights.values()) <= 0
    ):
        yield f"btm.average_weights={btm.average_weights}: weights are at least 0, and one of them above 0"
    if not btm.stages:
        yield "btm.stages=[] runs nothing; name some, or leave it out for all of them"


def _mix(config: Config) -> Problems:
    btm = config.btm
    if not btm.mix_share:
        return
    if config.moe.has_experts:
        yield f"btm.mix_share={btm.mix_share}: the branches must be dense to become experts; use moe=dense"
    if config.model.add_bias_linear:
        yield f"btm.mix_share={btm.mix_share}: experts have no biases; use model.add_bias_linear=false, or mix_share=0"
    if btm.mix_layer_freq > config.model.num_layers:
        layers = f"model.num_layers={config.model.num_layers}"
        yield f"btm.mix_layer_freq={btm.mix_layer_freq} leaves no layer of {layers} for experts; try 1 or 2"
