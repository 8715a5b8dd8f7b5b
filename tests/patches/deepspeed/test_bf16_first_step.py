"""bf16 under ZeRO-0 starts from the given weights and takes AdamW's first step as the first."""

PATCH = "deepspeed.bf16_first_step"


def reproduce() -> None:
    """Compare construction and one step with torch's AdamW on fp32 copies of the same weights."""
    import torch

    from tests.patches.deepspeed.engines import engine

    model = torch.nn.Linear(4, 4, bias=False).bfloat16()
    reference = torch.nn.Parameter(model.weight.detach().float())
    options = {"lr": 0.1, "weight_decay": 0.5}
    zero = engine(model, torch.optim.AdamW(model.parameters(), **options), bf16={"enabled": True})
    (master,) = zero.optimizer.fp32_groups[0]
    torch.testing.assert_close(master, reference, msg=lambda text: f"at construction: {text}")

    zero.backward(zero(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    zero.step()
    reference.grad = torch.ones_like(reference)
    torch.optim.AdamW([reference], **options).step()
    torch.testing.assert_close(master, reference, msg=lambda text: f"after one step: {text}")


def test_fails_only_without_the_patch(outcomes) -> None:
    unpatched, patched, undone = outcomes
    assert "at construction" in unpatched
    assert patched is None
    assert "at construction" in undone
