"""Auxiliary losses: their conventions as numbers, masks, gradients."""

from __future__ import annotations

import pytest
import torch

from recipes.config import MoeConfig, ScoreFunction
from recipes.moe.balance import AddLoss, balance_part, coefficient, moved_biases, sequence_balance_part, z_part
from recipes.moe.router import choice, top_k
from tests.unit.moe import oracle


def shares(ids_TK: torch.Tensor, experts: int, mask_T: torch.Tensor | None = None) -> torch.Tensor:
    counted = ids_TK if mask_T is None else ids_TK[mask_T.bool()]
    return torch.bincount(counted.reshape(-1), minlength=experts) / counted.numel()


@pytest.mark.parametrize("experts", [2, 4, 7])
@pytest.mark.parametrize("topk", [1, 2])
def test_a_uniform_router_gives_exactly_one(experts, topk):
    probs_TE = torch.softmax(torch.zeros(6, experts), 1)
    ids_TK = torch.arange(6)[:, None] % experts if topk == 1 else torch.tensor([[0, 1]]).expand(6, 2)
    assert balance_part(probs_TE, shares(ids_TK, experts), 6).item() == pytest.approx(1.0, abs=1e-6)
    one = sequence_balance_part(probs_TE.view(3, 2, -1), ids_TK.reshape(3, 2, -1), 2)
    assert one.item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("experts", [2, 4, 7])
def test_all_tokens_on_one_expert_give_the_number_of_experts(experts):
    probs_TE = torch.zeros(6, experts)
    probs_TE[:, 1] = 1
    ids_TK = torch.ones(6, 1, dtype=torch.int64)
    assert balance_part(probs_TE, shares(ids_TK, experts), 6).item() == experts
    assert sequence_balance_part(probs_TE.view(2, 3, -1), ids_TK.view(2, 3, 1), 3).item() == experts


def test_z_loss_is_the_mean_square_of_the_logsumexp():
    logits_TE = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    expected = (torch.log(torch.tensor(2.0)) ** 2 + torch.log(torch.e**1 + torch.tensor(torch.e**3)) ** 2) / 2
    assert z_part(logits_TE, 2).item() == pytest.approx(expected.item(), rel=1e-6)


def test_parts_of_ranks_add_up():
    torch.manual_seed(0)
    logits_TE = torch.randn(10, 4)
    ids_TK, probs_TE = top_k(logits_TE, 2), torch.softmax(logits_TE, 1)
    share_E = shares(ids_TK, 4)
    whole = balance_part(probs_TE, share_E, 10)
    parts = [balance_part(part, share_E, 10) for part in probs_TE.split([7, 1, 2])]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(sum(z_part(part, 10) for part in logits_TE.split([7, 1, 2])), z_part(logits_TE, 10))


def padded(scope: str, logits_SBE: torch.Tensor, mask_SB: torch.Tensor | None) -> torch.Tensor:
    """The balance loss of top-2 of a padded batch."""
    sequence, batch, experts = logits_SBE.shape
    probs_TE = torch.softmax(logits_SBE.reshape(-1, experts), 1)
    ids_TK = top_k(probs_TE, 2)
    if scope == "sequence":
        return sequence_balance_part(probs_TE.view(logits_SBE.shape), ids_TK.view(sequence, batch, 2), batch, mask_SB)
    mask_T = None if mask_SB is None else mask_SB.reshape(-1)
    tokens = len(probs_TE) if mask_T is None else mask_T.sum()
    return balance_part(probs_TE, shares(ids_TK, experts, mask_T), tokens, mask_T)


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_padding_does_not_count(scope):
    """Sequences of 5 and 9 tokens padded to 16, top-2 of 4: loss and gradient are those of the 14 tokens."""
    torch.manual_seed(1)
    lengths = (5, 9)
    x_SBH = torch.randn(16, 2, 3)
    mask_SB = (torch.arange(16)[:, None] < torch.tensor(lengths)).float()
    router = torch.randn(4, 3, requires_grad=True)
    loss = padded(scope, x_SBH @ router.t(), mask_SB)
    (grad,) = torch.autograd.grad(loss, router)

    alone = [x_SBH[:length, b] @ router.t() for b, length in enumerate(lengths)]
    if scope == "sequence":
        expected = sum(padded("batch", logits[:, None], None) for logits in alone) / 2
    else:
        expected = padded("batch", torch.cat(alone)[:, None], None)
    (expected_grad,) = torch.autograd.grad(expected, router)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)
    assert (padded(scope, x_SBH @ router.t(), None) - expected).abs() > 1e-3  # padding would matter


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_a_mask_of_ones_is_no_mask_and_a_row_of_padding_is_finite(scope):
    torch.manual_seed(2)
    logits = torch.randn(6, 3, 4, requires_grad=True)
    assert torch.equal(padded(scope, logits, torch.ones(6, 3)), padded(scope, logits, None))
    mask = torch.ones(6, 3)
    mask[:, 1] = 0
    loss = padded(scope, logits, mask)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()
    assert not logits.grad[:, 1].any()
    two = padded(scope, logits[:, ::2], None) * (2 / 3 if scope == "sequence" else 1)
    torch.testing.assert_close(loss, two)


def test_gradients_by_finite_differences():
    torch.manual_seed(3)
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    ids_TK = top_k(logits.detach(), 2)
    share_E = shares(ids_TK, 4).double()

    def losses(logits_TE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        probs_TE = torch.softmax(logits_TE, 1)
        by_sequence = sequence_balance_part(probs_TE.view(3, 2, 4), ids_TK.view(3, 2, 2), 2.0)
        return balance_part(probs_TE, share_E, 6), by_sequence, z_part(logits_TE, 6)

    assert torch.autograd.gradcheck(losses, logits)
    counts = torch.bincount(ids_TK.reshape(-1), minlength=4).tolist()
    torch.testing.assert_close(losses(logits)[0], oracle.balance(torch.softmax(logits, 1), counts))
    torch.testing.assert_close(losses(logits)[2], oracle.z_loss(logits))


def test_the_added_loss_changes_gradients_only():
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    out = AddLoss.apply(3 * x, x.square().sum(), 4.0)
    assert torch.equal(out, 3 * x)
    (0.5 * out.sum()).backward()  # the scale of the main loss does not scale the added one
    torch.testing.assert_close(x.grad, 0.5 * 3 + 4 * 2 * x.detach())


def test_biases_move_towards_the_mean_by_the_rate_and_around_zero():
    """Loads 6 2 0 0 of mean 2; 1 1 2 of mean 4 / 3; all equal; two that floats would call equal."""

    def moved(*counts: int, start: float = 0.0) -> list[float]:
        return moved_biases(torch.full((len(counts),), start, dtype=torch.float64), torch.tensor(counts), 0.25).tolist()

    assert moved(6, 2, 0, 0) == moved(6, 2, 0, 0, start=0.5) == [-0.3125, -0.0625, 0.1875, 0.1875]
    assert moved(1, 1, 2) == pytest.approx([0.5 / 3, 0.5 / 3, -1 / 3])
    assert moved(*[2**40] * 7) == [0.0] * 7
    assert moved(2**40 + 1, 2**40) == [-0.25, 0.25]


def test_biases_of_a_hundred_thousand_steps_choose_as_those_that_drift():
    """One of eight experts has too much in each step, so that seven biases rise; 4 experts of 2 of 4 groups are chosen.

    Scores lie on a grid as fine as the rate, each expert's and each pair's apart from all others, so that no two of what is
    compared are within rounding of each other.
    """
    steps, experts, rate = 100_000, 8, 1e-3
    generator = torch.Generator().manual_seed(1)
    in_turn = torch.rand((steps // experts, experts), generator=generator).argsort(1).reshape(-1)
    in_turn[:300] = 5
    counts_SE = 1 + 8 * torch.nn.functional.one_hot(in_turn, experts)
    oracle_SE = rate * torch.sign(counts_SE.sum(1, keepdim=True) - experts * counts_SE).cumsum(0).double()
    bias_E, found = torch.zeros(experts, dtype=torch.float64), []
    for counts_E in counts_SE:
        bias_E = moved_biases(bias_E, counts_E, rate)
        found.append(bias_E)
    bias_SE = torch.stack(found)
    assert bias_SE.mean(1).abs().max() < 1e-9 and bias_SE.abs().max() < 1 and oracle_SE[-1].mean() == pytest.approx(75)
    scores_SE = rate * torch.randint(0, 800, (steps, experts), generator=generator) + rate / 32 * torch.arange(experts)
    ours_SK = top_k(choice_of(scores_SE, bias_SE), 4, 4, 2).sort(1).values
    assert torch.equal(ours_SK, top_k(scores_SE + oracle_SE, 4, 4, 2).sort(1).values)
    assert not torch.equal(ours_SK, top_k(choice_of(scores_SE, torch.zeros_like(bias_SE)), 4, 4, 2).sort(1).values)


def choice_of(scores_SE: torch.Tensor, bias_SE: torch.Tensor) -> torch.Tensor:
    """As the router adds them: in fp32."""
    moe = MoeConfig(moe_router_score_function=ScoreFunction.sigmoid, moe_router_enable_expert_bias=True)
    return choice(scores_SE.float(), scores_SE.float(), moe, bias_SE.float())


@pytest.mark.parametrize(
    ("step", "expected"), [(1, 0.1), (10, 0.1), (15, 0.075), (20, 0.05), (21, 0.05), (10**6, 0.05)]
)
def test_the_weight_of_a_loss_moves_from_start_to_end(step, expected):
    assert coefficient(0.1, 0.05, [10, 20], step) == pytest.approx(expected)
    assert coefficient(0.1, None, [10, 20], step) == coefficient(0.1, 0.05, None, step) == 0.1


def test_choices_that_are_not_made_do_not_count():
    """Of 2 x 4 positions of 3 sequences, each with up to two choices."""
    torch.manual_seed(4)
    probs_SBE = torch.softmax(torch.randn(8, 3, 4), 2)
    ids_SBK = top_k(probs_SBE.view(24, 4), 2).view(8, 3, 2)
    made_SBK = torch.stack((torch.ones(8, 3, dtype=torch.bool), torch.rand(8, 3) < 0.5), 2)
    found = sequence_balance_part(probs_SBE, ids_SBK, 3, made_SBK=made_SBK)
    expected = 0.0
    for b in range(3):
        counts = torch.bincount(ids_SBK[:, b][made_SBK[:, b]], minlength=4).tolist()
        expected += oracle.balance(probs_SBE[:, b], counts) / 3
    torch.testing.assert_close(found, expected)
    assert abs(found - sequence_balance_part(probs_SBE, ids_SBK, 3)) > 1e-3
