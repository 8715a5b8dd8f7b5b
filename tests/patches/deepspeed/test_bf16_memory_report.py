"""Building an engine for bf16 and ZeRO-1 says nothing about memory."""

PATCH = "deepspeed.bf16_memory_report"


def reproduce() -> None:
    """Build the engine and look at what it prints."""
    import contextlib
    import io

    import torch
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    from tests.patches.deepspeed.engines import engine

    model = torch.nn.Linear(4, 4, bias=False).bfloat16()
    sections = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        zero = engine(model, torch.optim.AdamW(model.parameters(), lr=0.1), **sections)
    assert isinstance(zero.optimizer, BF16_Optimizer)
    assert "Virtual Memory" not in printed.getvalue(), f"printed {printed.getvalue()}"


def test_fails_only_without_the_patch(outcomes) -> None:
    unpatched, patched, undone = outcomes
    assert "begin bf16_optimizer" in unpatched
    assert patched is None
    assert "begin bf16_optimizer" in undone
