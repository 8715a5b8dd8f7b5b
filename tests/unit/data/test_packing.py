import warnings

import numpy as np
import pytest
import torch

from recipes.data.packing import pack

EOD = 2
TOKENS_BS1 = np.array([[5, 6, EOD, 7, EOD, EOD, 8, 9], [EOD, 5, 6, 7, 8, 9, 5, EOD]])


def test_inputs_labels_and_documents():
    packed = pack(TOKENS_BS1, EOD)
    assert np.array_equal(packed.input_ids_BS, TOKENS_BS1[:, :-1])
    assert np.array_equal(packed.labels_BS, TOKENS_BS1[:, 1:])
    assert packed.document_ids_BS.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert packed.document_lengths == [[3, 2, 1, 1], [1, 6]]
    assert packed.position_ids_BS.tolist() == [list(range(7))] * 2
    assert packed.loss_mask_BS.dtype == np.float32 and packed.loss_mask_BS.all()


def test_padding_does_not_count():
    packed = pack(np.array([[5, 6, EOD, 0, 0]]), EOD, pad=0)
    assert packed.loss_mask_BS.tolist() == [[1, 1, 0, 0]]
    with pytest.raises(ValueError, match="pad id 2 is the EOD id"):
        pack(TOKENS_BS1, EOD, pad=EOD)


@pytest.mark.parametrize("seed", range(3))
def test_semantics_are_megatrons(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    tokens_BS1 = np.random.default_rng(seed).integers(0, 6, (4, 33))
    packed = pack(tokens_BS1, EOD, reset_position_ids=True, eod_mask_loss=True)
    for row in range(4):
        expected_mask, expected_loss, expected_positions = _get_ltor_masks_and_position_ids(
            torch.from_numpy(tokens_BS1[row, :-1]),
            EOD,
            reset_position_ids=True,
            reset_attention_mask=True,
            eod_mask_loss=True,
            create_attention_mask=True,
        )
        assert torch.equal(torch.from_numpy(packed.position_ids_BS[row]), expected_positions)
        assert torch.equal(torch.from_numpy(packed.loss_mask_BS[row]), expected_loss)
        blocks = [torch.ones(length, length).tril() for length in packed.document_lengths[row]]
        assert torch.equal(~torch.block_diag(*blocks).bool(), expected_mask[0])
