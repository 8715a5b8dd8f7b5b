"""Megatron-core in a process group of one rank, for reproducers."""

import functools
import tempfile


@functools.cache
def start_group() -> None:
    """Start gloo and megatron-core's groups, all of size one."""
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def config():
    """A config whose parameters are allocated on the current device and not initialised."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
