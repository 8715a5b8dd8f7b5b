"""Tokens of packed documents -> what the model and the loss take. Semantics as Megatron's `reset_position_ids`,
`reset_attention_mask` and `eod_mask_loss` (megatron.core.datasets.gpt_dataset).

Legend: B samples, S positions, S1 = S + 1 ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Documents = list[list[int]]  # the lengths of those in each sequence, in order


@dataclass(frozen=True)
class Packed:
    """One micro batch; every array is [B, S].

    document_ids_BS counts the documents of a sample from 0; loss_mask_BS is float32, 1 where the label counts.
    """

    input_ids_BS: np.ndarray
    labels_BS: np.ndarray
    position_ids_BS: np.ndarray
    document_ids_BS: np.ndarray
    loss_mask_BS: np.ndarray

    @property
    def document_lengths(self) -> Documents:
        """Tokens of each document of each sample, in order; those of a sample add up to S."""
        return [np.bincount(ids_S).tolist() for ids_S in self.document_ids_BS]


def pack(
    tokens_BS1: np.ndarray,
    eod: int,
    *,
    reset_position_ids: bool = False,
    eod_mask_loss: bool = False,
    pad: int | None = None,
) -> Packed:
    """Splits ids into inputs and next-token labels, and finds the documents in them.

    The EOD id is the last of its document. reset_position_ids: positions count from 0 in each document, else in each
    sample. eod_mask_loss: the prediction made *from* an EOD (the next, unrelated document's first id) does not count;
    EOD as a label always does, as a model must learn to stop. pad: labels with this id do not count.
    """
    if pad is not None and pad == eod:
        raise ValueError(
            f"pad id {pad} is the EOD id, so masking padding would mask the end of documents; pass pad=None"
        )
    input_ids_BS, labels_BS = tokens_BS1[:, :-1], tokens_BS1[:, 1:]
    is_eod_BS = input_ids_BS == eod
    begins_BS = np.zeros_like(is_eod_BS)
    begins_BS[:, 1:] = is_eod_BS[:, :-1]
    positions_BS = np.broadcast_to(np.arange(input_ids_BS.shape[1]), input_ids_BS.shape)
    if reset_position_ids:
        positions_BS = positions_BS - np.maximum.accumulate(np.where(begins_BS, positions_BS, 0), axis=1)
    counts_BS = np.ones(labels_BS.shape, bool)
    if eod_mask_loss:
        counts_BS &= ~is_eod_BS
    if pad is not None:
        counts_BS &= labels_BS != pad
    return Packed(
        input_ids_BS=np.ascontiguousarray(input_ids_BS),
        labels_BS=np.ascontiguousarray(labels_BS),
        position_ids_BS=np.ascontiguousarray(positions_BS),
        document_ids_BS=np.cumsum(begins_BS, axis=1),
        loss_mask_BS=counts_BS.astype(np.float32),
    )
