"""Token ids of a micro-batch -> the model's inputs on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from recipes.config import DataConfig
from recipes.data.packing import pack


def model_inputs(
    tokens_BS1: np.ndarray, eod: int, data: DataConfig, device: torch.device, real_B: np.ndarray | None = None
) -> dict[str, Any]:
    """Keyword arguments of `GPT.forward` for ids [B, S + 1]; what the options leave at its default is left out.

    `real_B`: which sequences are data, where the others only fill up the batch; None: all.
    """

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    packed = pack(tokens_BS1, eod, reset_position_ids=data.reset_position_ids, eod_mask_loss=data.eod_mask_loss)
    inputs: dict[str, Any] = {"tokens_BS": tensor(packed.input_ids_BS), "labels_BS": tensor(packed.labels_BS)}
    if data.eod_mask_loss:
        inputs["loss_mask_BS"] = tensor(packed.loss_mask_BS)
    if data.reset_position_ids:
        inputs["positions_BS"] = tensor(packed.position_ids_BS)
    if data.reset_attention_mask:
        inputs["documents"] = packed.document_lengths
    if real_B is not None:
        inputs["real_B"] = tensor(real_B)
    return inputs


def logit_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Of these arguments those of `GPT.logits`."""
    return {name: value for name, value in inputs.items() if name not in ("labels_BS", "loss_mask_BS")}


def valid_tokens(inputs: dict[str, Any]) -> torch.Tensor:
    """Labels that count, per sequence: int64 [B]; none of a sequence that is no data."""
    labels_BS = inputs["labels_BS"]
    if "loss_mask_BS" in inputs:
        counts_B = inputs["loss_mask_BS"].sum(dim=1).long()
    else:
        counts_B = torch.full((labels_BS.shape[0],), labels_BS.shape[1], device=labels_BS.device)
    return counts_B * inputs["real_B"] if "real_B" in inputs else counts_B
