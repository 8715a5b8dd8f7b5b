"""Rotary embeddings, linear layers and embeddings work without CUDA, and torch itself still says that there is none."""

import pytest

PATCH = "megatron_core.current_device"


def reproduce() -> None:
    """Build and run what allocates on the current device, with one rank."""
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding

    from tests.patches.megatron_core.one_rank import config, start_group

    start_group()
    angles_S11D = RotaryEmbedding(8, rotary_percent=1.0, use_cpu_initialization=True)(16)
    assert angles_S11D.device.type == "cpu"

    options = {"config": config(), "init_method": torch.nn.init.zeros_}
    hidden_BSH = VocabParallelEmbedding(10, 4, **options)(torch.ones(2, 3, dtype=torch.long))
    logits_BSV, _ = ColumnParallelLinear(4, 10, bias=False, **options)(hidden_BSH)
    assert logits_BSV.shape == (2, 3, 10)

    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.current_device()


def test_fails_only_without_the_patch(outcomes) -> None:
    unpatched, patched, undone = outcomes
    assert "CUDA" in unpatched or "NVIDIA driver" in unpatched
    assert patched is None
    assert undone == unpatched
