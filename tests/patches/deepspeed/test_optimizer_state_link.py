"""ZeRO finds the optimizer state of every parameter group after the first step."""

PATCH = "deepspeed.optimizer_state_link"


def reproduce() -> None:
    """One AdamW step under ZeRO-1 and ZeRO-2 with two groups, then read back the first moment of both parameters."""
    import torch
    from deepspeed.utils import safe_get_full_optimizer_state

    from tests.patches.deepspeed.engines import engine

    for stage in (1, 2):
        model = torch.nn.Linear(3, 5)
        groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
        zero = engine(model, torch.optim.AdamW(groups), zero_optimization={"stage": stage})
        for _ in range(2):  # the link of the first step must hold in the second
            zero.backward(zero(torch.ones(1, 3)).sum())
            zero.step()
        moments = [safe_get_full_optimizer_state(parameter, "exp_avg") for parameter in model.parameters()]
        # The gradient is 1 everywhere, so the first moment after two steps is 1 - 0.9^2.
        for moment in moments:
            torch.testing.assert_close(moment, torch.full_like(moment, 0.19))


def test_fails_only_without_the_patch(outcomes) -> None:
    unpatched, patched, undone = outcomes
    assert "exp_avg not found" in unpatched
    assert patched is None
    assert undone == unpatched
