"""Token ids of a micro-batch -> the model's inputs on the device."""

from __future__ import annotations

import numpy as np
import torch

from recipes.config import DataConfig
from recipes.data.packing import document_mask, pack


def model_inputs(tokens_BS1: np.ndarray, eod: int, data: DataConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """Keyword arguments of `GPT.forward` for ids [B, S + 1]; what the options leave at its default is left out."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    packed = pack(tokens_BS1, eod, reset_position_ids=data.reset_position_ids, eod_mask_loss=data.eod_mask_loss)
    inputs = {"tokens_BS": tensor(packed.input_ids_BS), "labels_BS": tensor(packed.labels_BS)}
    if data.eod_mask_loss:
        inputs["loss_mask_BS"] = tensor(packed.loss_mask_BS)
    if data.reset_position_ids:
        inputs["positions_BS"] = tensor(packed.position_ids_BS)
    if data.reset_attention_mask:
        inputs["attention_mask"] = document_mask(tensor(packed.document_ids_BS))
    return inputs


def valid_tokens(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Labels that count, per sequence: int64 [B]."""
    if "loss_mask_BS" in inputs:
        return inputs["loss_mask_BS"].sum(dim=1).long()
    labels_BS = inputs["labels_BS"]
    return torch.full((labels_BS.shape[0],), labels_BS.shape[1], device=labels_BS.device)
