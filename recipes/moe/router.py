"""Routing as pure functions. T tokens, E experts, K experts per token. Everything is fp32, whatever the model's type.

logits_TE -> scores_TE -> choice_TE (biases added) -> top_k: ids_TK -> gates_TK -> capacity: which choices are kept
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from recipes.config import MoeConfig, ScoreFunction, SecondExpert
from recipes.recycled import recycler


@dataclass(frozen=True)
class Routing:
    """Where tokens go.

    `ids_TK`: experts, the best first; `gates_TK`: weights of their outputs; `made_TK`: which of these places are choices (None:
    all); `keep_TK`: which choices no full expert turned away (None: all). `probs_TE` are scores divided by their sum.
    """

    logits_TE: torch.Tensor
    probs_TE: torch.Tensor
    ids_TK: torch.Tensor
    gates_TK: torch.Tensor
    made_TK: torch.Tensor | None = None
    keep_TK: torch.Tensor | None = None

    @property
    def counts_E(self) -> torch.Tensor:
        """Choices of each expert, kept or not: int64 [E]. (On CUDA torch.bincount would wait for the device.)"""
        made_TK = torch.ones_like(self.ids_TK) if self.made_TK is None else self.made_TK.long()
        return self._sum_by_expert(made_TK)

    @property
    def gates_E(self) -> torch.Tensor:
        """The sum over the choices of each expert of their gates, without gradient: float64 [E]."""
        gates_TK = self.gates_TK.detach().double()
        return self._sum_by_expert(gates_TK if self.made_TK is None else gates_TK * self.made_TK)

    def _sum_by_expert(self, values_TK: torch.Tensor) -> torch.Tensor:
        sums_E = values_TK.new_zeros(self.probs_TE.shape[1])
        return sums_E.scatter_add_(0, self.ids_TK.reshape(-1), values_TK.reshape(-1))

    def only(self, real_T: torch.Tensor | None) -> Routing:
        """Without the choices of tokens that are no data."""
        if real_T is None:
            return self
        real_TK = real_T[:, None].expand(self.ids_TK.shape)
        return replace(self, made_TK=real_TK if self.made_TK is None else self.made_TK & real_TK)

    @property
    def used_TK(self) -> torch.Tensor | None:
        """The places that are choices and kept; None: all."""
        if self.made_TK is None or self.keep_TK is None:
            return self.made_TK if self.keep_TK is None else self.keep_TK
        return self.made_TK & self.keep_TK

    @property
    def dropped(self) -> torch.Tensor | int:
        """Choices that full experts turned away."""
        if self.keep_TK is None:
            return 0
        turned_away_TK = ~self.keep_TK if self.made_TK is None else self.made_TK & ~self.keep_TK
        return turned_away_TK.sum()

    @property
    def chosen_TE(self) -> torch.Tensor:
        """Whether a token chose an expert: bool [T, E]."""
        made_TK = torch.ones_like(self.ids_TK) if self.made_TK is None else self.made_TK.long()
        return torch.zeros_like(self.probs_TE, dtype=torch.int64).scatter_add_(1, self.ids_TK, made_TK) > 0


def router_logits(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
    """Logits: fp32 [T, E]. Both factors are cast up first: bf16 products would tie and flip choices."""
    return _Logits.apply(x_TH.float(), weight_EH.float())[0]


def logits_and_tokens(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the tokens for the experts, who alone may use them: their gradient becomes that of both, in place."""
    if x_TH.dtype is torch.float32:
        return _Logits.apply(x_TH, weight_EH.float())
    return router_logits(x_TH, weight_EH), x_TH


class _Logits(torch.autograd.Function):
    """x [..., H] and weight [E, H] -> x weight^T, and x again."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight_EH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, weight_EH)
        ctx.set_materialize_grads(False)
        return F.linear(x, weight_EH), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor | None, grad_x: torch.Tensor | None):
        if grad is None:
            return grad_x, None
        x, weight_EH = ctx.saved_tensors
        rows_TE, x_TH = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        needs_x, needs_weight = ctx.needs_input_grad
        if grad_x is not None:
            grad_x = grad_x.addmm_(rows_TE, weight_EH)
        elif needs_x:
            grad_x = torch.mm(rows_TE, weight_EH, out=recycler.empty_like(x_TH)).view_as(x)
        return grad_x, rows_TE.t().mm(x_TH) if needs_weight else None


def scores(logits_TE: torch.Tensor, function: ScoreFunction) -> torch.Tensor:
    """How much each token asks for each expert: the softmax over the experts, or sigmoids (DeepSeek-V3, arXiv 2412.19437,
    eq. 15)."""
    return torch.sigmoid(logits_TE) if function is ScoreFunction.sigmoid else _softmax(logits_TE)


def probabilities(logits_TE: torch.Tensor, function: ScoreFunction) -> torch.Tensor:
    """Scores divided by their sum over the experts, what balance losses are made of (DeepSeek-V3, eq. 19)."""
    return _softmax(_logarithms(logits_TE, function))


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    """Over columns. On CPU torch takes four times as long for 8 that lie side by side as for 16."""
    if logits.shape[1] < 16 and logits.device.type == "cpu":
        return torch.softmax(logits.t().contiguous(), dim=0).t().contiguous()
    return torch.softmax(logits, dim=1)


def top_k(
    choice_TE: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
) -> torch.Tensor:
    """The K experts of each token with the largest values, the best first: int64 [T, K].

    With groups only experts of the token's `group_topk` best of `num_groups` equal groups can be chosen. A group is worth the
    sum of its K / group_topk best experts (DeepSeek-V3, arXiv 2412.19437, sec. 2.1.2), at least one.
    """
    if num_groups is not None:
        assert group_topk is not None
        choice_TE = choice_TE.masked_fill(~_in_best_groups(choice_TE, topk, num_groups, group_topk), -math.inf)
    return torch.topk(choice_TE, topk, dim=-1).indices


def _in_best_groups(choice_TE: torch.Tensor, topk: int, num_groups: int, group_topk: int) -> torch.Tensor:
    choice_TGM = choice_TE.unflatten(1, (num_groups, -1))
    worth_TG = choice_TGM.topk(max(1, topk // group_topk), dim=-1).values.sum(-1)
    best_TG = torch.zeros_like(worth_TG, dtype=torch.bool).scatter_(1, worth_TG.topk(group_topk, dim=-1).indices, True)
    return best_TG[..., None].expand_as(choice_TGM).flatten(1)


def gates(
    logits_TE: torch.Tensor,
    scores_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    function: ScoreFunction,
    renormalise: bool,
    factor: float = 1.0,
) -> torch.Tensor:
    """Weights of the chosen experts' outputs: their scores, divided by the sum of these if `renormalise`, x `factor`.

    A softmax divided by the sum of the chosen is the softmax over the chosen, as in Mixtral; otherwise the gates are those of
    Switch (Fedus et al. 2021, arXiv 2101.03961, eq. 2) and OLMoE. Renormalised gates have no denominator that could vanish.
    """
    chosen_TK = probabilities(logits_TE.gather(1, ids_TK), function) if renormalise else scores_TE.gather(1, ids_TK)
    return chosen_TK if factor == 1.0 else chosen_TK * factor


def _logarithms(logits: torch.Tensor, function: ScoreFunction) -> torch.Tensor:
    """Logarithms of scores, but for a constant per token: their softmax is the scores divided by their sum."""
    return F.logsigmoid(logits) if function is ScoreFunction.sigmoid else logits


def renormalises(moe: MoeConfig) -> bool:
    """Whether the gates of a token add up to 1 (times the scaling factor)."""
    if moe.moe_router_norm_topk_prob is not None:
        return moe.moe_router_norm_topk_prob
    if moe.moe_router_score_function is ScoreFunction.sigmoid:
        return moe.moe_router_topk > 1
    return not moe.moe_router_pre_softmax


def choice(
    logits_TE: torch.Tensor, scores_TE: torch.Tensor, moe: MoeConfig, bias_E: torch.Tensor | None = None
) -> torch.Tensor:
    """What experts are chosen by: fp32 [T, E] without gradient.

    Logits are in the order of scores and do not tie where scores round to 0 or 1. Only where scores are added up, to biases
    or within a group, their values matter; a softmax behind the choice leaves groups to be compared by logits, as in
    megatron-core.
    """
    if bias_E is not None:
        return scores_TE.detach() + bias_E
    behind = moe.moe_router_score_function is ScoreFunction.softmax and not moe.moe_router_pre_softmax
    return (logits_TE if moe.moe_router_num_groups is None or behind else scores_TE).detach()


def route(
    logits_TE: torch.Tensor,
    moe: MoeConfig,
    bias_E: torch.Tensor | None = None,
    noise_TE: torch.Tensor | None = None,
    uniform_T: torch.Tensor | None = None,
) -> Routing:
    """Choose K experts per token as described. Biases and noise enter the choice only.

    Standard Gumbel noise makes a choice one in proportion to probability (Kool et al. 2019, arXiv 1903.06059, sec. 2.3); a
    second expert that is sampled has it alone. With `uniform_T` in [0, 1) the second expert is used when twice its part of both
    gates exceeds it (GShard, Lepikhin et al. 2020, arXiv 2006.16668, alg. 1).
    """
    function, factor = moe.moe_router_score_function, moe.moe_router_topk_scaling_factor or 1.0
    probs_TE = probabilities(logits_TE, function)
    scores_TE = probs_TE if function is ScoreFunction.softmax else scores(logits_TE, function)
    chosen_by_TE = choice(logits_TE, scores_TE, moe, bias_E)
    if noise_TE is not None:
        best_T1 = chosen_by_TE.argmax(1, keepdim=True)
        chosen_by_TE = chosen_by_TE + noise_TE
        if moe.moe_second_expert is SecondExpert.sampled:
            chosen_by_TE = chosen_by_TE.scatter(1, best_T1, math.inf)
    ids_TK = top_k(chosen_by_TE, moe.moe_router_topk, moe.moe_router_num_groups, moe.moe_router_group_topk)
    gates_TK = gates(logits_TE, scores_TE, ids_TK, function, renormalises(moe), factor)
    made_TK = None
    if uniform_T is not None:
        second_T = 2 * gates_TK[:, 1].detach() > uniform_T * gates_TK.detach().sum(1)
        made_TK = torch.stack((torch.ones_like(second_T), second_T), dim=1)
    return Routing(logits_TE, probs_TE, ids_TK, gates_TK, made_TK)


def sinkhorn_prices(logits_TE: torch.Tensor, iterations: int = 20) -> torch.Tensor:
    """What to add to logits so that tokens choose evenly: fp32 [E], without gradient.

    Scaling exp(logits) to rows of equal sum and columns of equal sum, in turn, as S-BASE does (Clark et al. 2022, arXiv
    2202.01169), in logarithms. Factors of rows change no token's choice; those of columns are the prices.
    """
    logits_TE = logits_TE.detach()
    prices_E = torch.zeros_like(logits_TE[0])
    for _ in range(iterations):
        rows_T1 = torch.logsumexp(logits_TE + prices_E, dim=1, keepdim=True)
        prices_E = math.log(len(logits_TE) / len(prices_E)) - torch.logsumexp(logits_TE - rows_T1, dim=0)
    return prices_E


def capacity(tokens: int, topk: int, num_experts: int, factor: float, minimum: int = 0) -> int:
    """Most tokens that one expert takes of this rank's `tokens`: ceil(T K factor / E), at least `minimum`, at most T."""
    even_share = Fraction(str(factor)) * tokens * topk / num_experts  # exact: in floats ceil(100 x 1.1 / 10) is 12
    return min(tokens, max(minimum, math.ceil(even_share)))


def kept(routing: Routing, limit: int, by_probability: bool) -> torch.Tensor:
    """Which choices fit when each expert takes at most `limit`: bool [T, K].

    First come first served in token order (first choices before second ones), or the largest gates first.
    """
    ids_TK, num_experts = routing.ids_TK, routing.probs_TE.shape[1]
    if routing.made_TK is not None:  # no choice: to a queue of its own
        ids_TK = ids_TK.masked_fill(~routing.made_TK, num_experts)
    ids_KT, gates_KT = ids_TK.t().reshape(-1), routing.gates_TK.detach().t().reshape(-1)
    if by_probability:
        by_gate = torch.argsort(gates_KT, descending=True, stable=True)
        order = by_gate[torch.argsort(ids_KT[by_gate], stable=True)]
    else:
        order = torch.argsort(ids_KT, stable=True)
    counts = torch.bincount(ids_KT, minlength=num_experts + 1)
    starts = torch.cumsum(counts, 0) - counts
    place = torch.arange(len(order), device=order.device) - starts[ids_KT[order]]
    fits = torch.empty_like(order, dtype=torch.bool)
    fits[order] = place < limit
    return fits.view(ids_TK.shape[1], -1).t()
