"""Seeds, forks and recomputation draw from the CPU generator as they would from the device's."""

import logging
from unittest import mock

PATCH = "megatron_core.rng_tracker"


def reproduce() -> None:
    """Check the tracker's promises on the masks that dropout draws."""
    import torch
    from megatron.core import tensor_parallel

    from tests.patches.megatron_core.one_rank import start_group

    start_group()
    ones = torch.ones(64)
    drop = torch.nn.functional.dropout

    def forked() -> torch.Tensor:
        logger = logging.getLogger("megatron.core.tensor_parallel.random")
        quiet = mock.patch.object(logger, "warning", side_effect=AssertionError("a fork warns"))
        with quiet, tensor_parallel.get_cuda_rng_tracker().fork():
            return drop(ones)

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    region, default, region_again = forked(), drop(ones), forked()
    assert not torch.equal(region, region_again), "a region repeats its mask"

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    assert torch.equal(drop(ones), default), "a fork or the seed moved the default state"
    assert torch.equal(forked(), region), "the seed does not set the region's state"
    saved = {name: state.clone() for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()}
    assert torch.equal(forked(), region_again), "the default state moved the region's"
    tensor_parallel.get_cuda_rng_tracker().set_states(saved)
    assert torch.equal(forked(), region_again), "a restored state draws another mask"

    weight = ones.clone().requires_grad_()
    output = tensor_parallel.checkpoint(lambda x: forked() * drop(x), False, weight)
    next_default = drop(ones)
    output.sum().backward()
    assert torch.equal(weight.grad, output.detach()), "recomputation draws other masks"

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    _ = drop(ones), drop(ones)
    assert torch.equal(drop(ones), next_default), "recomputation moved the default state"


def test_fails_only_without_the_patch(outcomes) -> None:
    unpatched, patched, undone = outcomes
    assert "CUDA" in unpatched or "NVIDIA driver" in unpatched
    assert patched is None
    assert undone == unpatched
