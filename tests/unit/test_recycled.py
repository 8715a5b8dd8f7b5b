"""Recycled memory: used again when nobody holds it, never while somebody does."""

from __future__ import annotations

import pytest
import torch

from recipes.recycled import Recycler, recycler
from tests.unit.moe.test_experts import grouped

SIZE = 1 << 20  # fp32: 4 MB


@pytest.fixture
def made() -> Recycler:
    return Recycler()


def holders(tensor: torch.Tensor) -> dict[str, object]:
    """Ways to keep the memory of a tensor in use."""

    class Saved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, kept):
            ctx.save_for_backward(kept)
            return x.clone()

    return {
        "itself": tensor,
        "detached": tensor.detach(),
        "a row": tensor[3],
        "a view": tensor.view(-1)[5:6],
        "numpy": tensor.numpy(),
        "saved for backward": Saved.apply(torch.ones(1, requires_grad=True), tensor.detach()),
    }


@pytest.mark.parametrize("kind", list(holders(torch.zeros(8, 8))))
def test_memory_in_use_is_left_alone(made, kind):
    like = torch.zeros(1)
    first = made.empty((512, SIZE // 512), like).fill_(1.0)
    address = first.data_ptr()
    holder = holders(first)[kind]
    del first
    other = made.empty((SIZE,), like).fill_(2.0)
    assert other.data_ptr() != address
    del other, holder
    again = made.empty((256, SIZE // 256), like)
    assert again.shape == (256, SIZE // 256) and again.data_ptr() == address


def test_memory_serves_another_shape_and_type_of_about_its_size(made):
    first = made.empty((SIZE,), torch.zeros(1))
    address = first.data_ptr()
    del first
    for dtype, size in ((torch.float64, SIZE // 2), (torch.float32, 2 * SIZE // 3 + 1), (torch.bfloat16, 2 * SIZE)):
        other = made.empty((size, 1), torch.zeros(1, dtype=dtype))
        assert other.dtype == dtype and other.shape == (size, 1) and other.data_ptr() == address
        del other
    assert made.empty_like(torch.zeros(2, SIZE // 2)).data_ptr() == address


@pytest.mark.parametrize("size", [2 * SIZE, 2 * SIZE // 3 - 1])
def test_what_does_not_fit_is_given_back(made, size):
    made.empty((SIZE,), torch.zeros(1))
    made.empty((size,), torch.zeros(1))
    assert [size <= len(memory) / 4 <= 1.125 * size for memory, _ in made._kept.values()] == [True]


def test_small_tensors_are_ordinary(made):
    made.empty((100,), torch.zeros(1))
    assert not made._kept


def test_no_more_is_kept_than_was_in_use(made):
    for step in range(20):
        together = [made.empty((SIZE + 1000 * (step % 7 + extra),), torch.zeros(1)) for extra in range(3)]
        assert len({tensor.data_ptr() for tensor in together}) == 3
        del together
    assert len(made._kept) == 3 and sum(len(memory) for memory, _ in made._kept.values()) < 1.2 * 3 * 4 * SIZE


def test_a_step_that_repeats_itself_takes_no_new_memory(made, monkeypatch):
    """Small tensors early in a step must not cost the large ones that it needs late, nor these the small ones."""
    like = torch.zeros(1)

    def step() -> None:
        forward = [made.empty((SIZE // 4,), like) for _ in range(4)]
        del forward[1:]
        backward = [made.empty((8 * SIZE,), like) for _ in range(2)]
        del forward, backward

    for _ in range(3):
        step()
    fresh: list[tuple] = []
    monkeypatch.setattr(
        torch, "empty", lambda *args, plain=torch.empty, **kwargs: (fresh.append(args), plain(*args, **kwargs))[1]
    )
    step()
    assert not fresh


def test_gradients_of_experts_that_are_still_held_stay_as_they_are():
    """Two backward passes through one layer, and through two layers of the same shape."""
    torch.manual_seed(0)
    shapes = ((2, 512, 512), (2, 512, 512))  # 2 MB each
    layers = [[torch.randn(shape, requires_grad=True) for shape in shapes] for _ in range(2)]
    x = torch.randn(4, 512)

    def grads(layer, sizes):
        return torch.autograd.grad(grouped(x, *layer, sizes, False).sum(), layer)

    held = [grads(layer, [1, 3]) for layer in layers]
    copies = [[grad.clone() for grad in pair] for pair in held]
    later = [grads(layer, [4, 0]) for layer in layers]
    for pair, copied in zip(held, copies, strict=True):
        assert all(torch.equal(grad, copy) for grad, copy in zip(pair, copied, strict=True))
    assert not later[0][0][1].any() and not torch.equal(held[0][0], later[0][0])


def test_a_second_backward_pass_adds_to_the_gradient_of_the_first():
    w1, w2 = (torch.nn.Parameter(torch.randn(2, 512, 512)) for _ in range(2))
    x = torch.randn(4, 512)
    grouped(x, w1, w2, [1, 3], False).sum().backward()
    once = w1.grad.clone()
    memory = w1.grad.data_ptr()
    grouped(x, w1, w2, [1, 3], False).sum().backward()
    torch.testing.assert_close(w1.grad, 2 * once)
    w1.grad = w2.grad = None
    grouped(x, w1, w2, [1, 3], False).sum().backward()
    torch.testing.assert_close(w1.grad, once)
    kept = [tensor.data_ptr() for tensor, _ in recycler._kept.values()]
    assert memory in kept and w1.grad.data_ptr() in kept  # the gradient itself, not a copy of it
