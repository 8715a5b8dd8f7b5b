"""A layer of experts in float64, slowly: loops over tokens, choices and experts, differentiable, one process.

It shares no code with the layers that are compared with it. Weights are a dict of logical names without the prefix of the
layer: router, experts.0.{gate,up,down}, shared.{gate,up,down}, shared_gate, coefficient, coefficient.bias; without `gate` the
activation is GELU.
T tokens in the order of [S, B], E experts, K choices per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

Weights = dict[str, torch.Tensor]


@dataclass
class Options:
    """Choices and gates beyond softmax and top-k. `renormalise` None: unless the softmax comes before the choice."""

    sigmoid: bool = False
    renormalise: bool | None = None
    scaling: float = 1.0
    num_groups: int = 1
    group_topk: int = 1
    bias: list[float] | None = None
    experts_choose: bool = False
    sinkhorn: bool = False  # 20 rounds, over the tokens given
    assigned: list[list[int]] | None = None  # of each token, with equal gates, in place of a router


@dataclass
class Routed:
    """`chosen[t]`: experts of token t, the best first. `kept`: (token, choice) pairs that no full expert turned away.

    `probs_TE`: scores divided by their sum over the experts.
    """

    out_SBH: torch.Tensor
    logits_TE: torch.Tensor
    probs_TE: torch.Tensor
    gates: list[list[torch.Tensor]]
    chosen: list[list[int]]
    kept: set[tuple[int, int]]

    @property
    def counts_E(self) -> list[int]:
        """Choices of each expert, kept or not."""
        flat = [expert for choices in self.chosen for expert in choices]
        return [flat.count(expert) for expert in range(self.probs_TE.shape[1])]


def moe_layer(
    x_SBH: torch.Tensor,
    weights: Weights,
    topk: int,
    pre_softmax: bool,
    factor: float | None = None,
    minimum: int = 0,
    by_probability: bool = True,
    options: Options | None = None,
) -> Routed:
    """Output and routing; `factor` None: nothing is dropped."""
    options = options or Options()
    tokens = list(x_SBH.reshape(-1, x_SBH.shape[-1]))
    experts = len({name.split(".")[1] for name in weights if name.startswith("experts.")})
    all_logits, all_probs, all_scores, chosen, gates = [], [], [], [], []
    for t, x_H in enumerate(tokens):
        logits_E = x_H.new_zeros(experts)
        if options.assigned is None:
            logits_E = torch.stack([(row_H * x_H).sum() for row_H in weights["router"]])
        scores_E, probs_E = scores_of(logits_E, options)
        all_logits.append(logits_E)
        all_probs.append(probs_E)
        all_scores.append(scores_E)
        if options.assigned is not None:
            chosen.append(options.assigned[t])
            gates.append([torch.tensor(1 / topk) for _ in range(topk)])
        elif not options.experts_choose and not options.sinkhorn:
            chosen.append(best_experts(logits_E, scores_E, topk, pre_softmax, options))
            gates.append(gates_of(scores_E, chosen[t], pre_softmax, options))
    if options.sinkhorn:
        for scores_E, plan_E in zip(all_scores, balanced(all_logits, rounds=20), strict=True):
            chosen.append(sorted(range(experts), key=lambda expert, plan_E=plan_E: -plan_E[expert])[:topk])
            gates.append(gates_of(scores_E, chosen[-1], pre_softmax, options))
    limit = len(tokens)
    if options.experts_choose:
        taken = capacity(len(tokens), topk, experts, 1.0 if factor is None else factor, minimum)
        chosen = chosen_by_experts(all_scores, taken, x_SBH.shape[1])
        gates = [[options.scaling * all_scores[t][expert] for expert in best] for t, best in enumerate(chosen)]
    elif factor is not None:
        limit = capacity(len(tokens), topk, experts, factor, minimum)
    kept = fitting(chosen, [[gate.item() for gate in row] for row in gates], experts, limit, by_probability)
    outs = []
    for t, x_H in enumerate(tokens):
        y_H = torch.zeros_like(x_H)
        for k, expert in enumerate(chosen[t]):
            if (t, k) in kept:
                y_H = y_H + gates[t][k] * feed_forward(x_H, weights, f"experts.{expert}")
        outs.append(with_shared(x_H, y_H, weights))
    out_SBH = torch.stack(outs).view(x_SBH.shape)
    return Routed(out_SBH, torch.stack(all_logits), torch.stack(all_probs), gates, chosen, kept)


def with_shared(x_H: torch.Tensor, y_H: torch.Tensor, weights: Weights) -> torch.Tensor:
    """With the expert that every token passes, if there is one, by its gate or mixed by a softmax."""
    if "shared.up" not in weights:
        return y_H
    shared_H = feed_forward(x_H, weights, "shared")
    if "shared_gate" in weights:
        return y_H + shared_H / (1 + torch.exp(-(weights["shared_gate"][0] * x_H).sum()))
    if "coefficient" in weights:
        logits = [
            (row * x_H).sum() + bias
            for row, bias in zip(weights["coefficient"], weights["coefficient.bias"], strict=True)
        ]
        own = 1 / (1 + torch.exp(logits[1] - logits[0]))
        return own * y_H + (1 - own) * shared_H
    return y_H + shared_H


def balanced(logits: list[torch.Tensor], rounds: int) -> list[list[float]]:
    """exp(logits) with rows, then columns, scaled to equal sums, again and again."""
    plan = [[math.exp(logit) for logit in row.tolist()] for row in logits]
    for _ in range(rounds):
        plan = [[value / sum(row) for value in row] for row in plan]
        columns = [sum(column) * len(plan[0]) / len(plan) for column in zip(*plan, strict=True)]
        plan = [[value / column for value, column in zip(row, columns, strict=True)] for row in plan]
    return plan


def chosen_by_experts(scores: list[torch.Tensor], taken: int, batch: int) -> list[list[int]]:
    """The experts that each token is taken by, best first: each expert takes `taken`, of equals those of the first sample."""
    order = sorted(range(len(scores)), key=lambda t: (t % batch, t // batch))
    found: list[list[int]] = [[] for _ in scores]
    for expert in range(len(scores[0])):
        for t in sorted(order, key=lambda t: -scores[t][expert].item())[:taken]:
            found[t].append(expert)
    return [sorted(experts, key=lambda expert: -scores[t][expert].item()) for t, experts in enumerate(found)]


def scores_of(logits_E: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of one token, and the same divided by their sum."""
    scores = [1 / (1 + torch.exp(-logit)) for logit in logits_E]
    if not options.sigmoid:
        exponentials = [torch.exp(logit - logits_E.max().detach()) for logit in logits_E]
        scores = [exponential / sum(exponentials) for exponential in exponentials]
    return torch.stack(scores), torch.stack([score / sum(scores) for score in scores])


def best_experts(
    logits_E: torch.Tensor, scores_E: torch.Tensor, topk: int, pre_softmax: bool, options: Options
) -> list[int]:
    """The chosen ones of one token: by scores plus biases, within its best groups."""
    experts = range(len(logits_E))
    behind = not pre_softmax and not options.sigmoid and options.bias is None
    worth = (logits_E if behind else scores_E).tolist()
    if options.bias is not None:
        worth = [score + bias for score, bias in zip(worth, options.bias, strict=True)]
    size = len(worth) // options.num_groups
    groups = [list(experts[start : start + size]) for start in range(0, len(worth), size)]
    counted = max(1, topk // options.group_topk)
    groups.sort(key=lambda group: -sum(sorted((worth[expert] for expert in group), reverse=True)[:counted]))
    allowed = [expert for group in groups[: options.group_topk] for expert in group]
    return sorted(allowed, key=lambda expert: -worth[expert])[:topk]


def gates_of(scores_E: torch.Tensor, best: list[int], pre_softmax: bool, options: Options) -> list[torch.Tensor]:
    """Weights of the chosen experts."""
    renormalise = options.renormalise
    if renormalise is None:
        renormalise = len(best) > 1 if options.sigmoid else not pre_softmax
    total = sum(scores_E[expert] for expert in best) if renormalise else 1.0
    return [options.scaling * scores_E[expert] / total for expert in best]


def feed_forward(x_H: torch.Tensor, weights: Weights, prefix: str) -> torch.Tensor:
    """SwiGLU with a gate, else GELU by the error function."""
    up_F = weights[f"{prefix}.up"] @ x_H
    if f"{prefix}.gate" in weights:
        gate_F = weights[f"{prefix}.gate"] @ x_H
        hidden_F = gate_F / (1 + torch.exp(-gate_F)) * up_F
    else:
        hidden_F = up_F * 0.5 * (1 + torch.erf(up_F / math.sqrt(2)))
    return weights[f"{prefix}.down"] @ hidden_F


def capacity(tokens: int, topk: int, experts: int, factor: float, minimum: int) -> int:
    """Most tokens of one expert, in exact fractions of the factor as it is written."""
    even_share = Fraction(str(factor)) * tokens * topk / experts
    return min(tokens, max(minimum, math.ceil(even_share)))


def fitting(
    chosen: list[list[int]], gates: list[list[float]], experts: int, limit: int, by_probability: bool
) -> set[tuple[int, int]]:
    """(token, choice) pairs of each expert's queue: all first choices before all second ones, or the largest gates."""
    kept: set[tuple[int, int]] = set()
    for expert in range(experts):
        widest = max(map(len, chosen))
        queue = [(k, t) for k in range(widest) for t, made in enumerate(chosen) if made[k : k + 1] == [expert]]
        if by_probability:
            queue.sort(key=lambda place: -gates[place[1]][place[0]])
        kept |= {(t, k) for k, t in queue[:limit]}
    return kept


def balance(probs_TE: torch.Tensor, counts_E: list[int]) -> torch.Tensor:
    """E sum_e f_e P_e with the shares f of `counts_E`."""
    experts = probs_TE.shape[1]
    total = sum(counts_E)
    return experts * sum(counts_E[e] / total * probs_TE[:, e].mean() for e in range(experts))


def sequence_balance(routed: Routed) -> torch.Tensor:
    """The mean over sequences of `balance` on each."""
    sequence, batch, _ = routed.out_SBH.shape
    losses = []
    for b in range(batch):
        rows = [s * batch + b for s in range(sequence)]
        flat = [expert for t in rows for expert in routed.chosen[t]]
        counts_E = [flat.count(expert) for expert in range(routed.probs_TE.shape[1])]
        losses.append(balance(routed.probs_TE[rows], counts_E))
    return sum(losses) / batch


def z_loss(logits_TE: torch.Tensor) -> torch.Tensor:
    """The mean over tokens of log(sum_e exp(logit_e))^2."""
    return sum(torch.log(torch.exp(row_E).sum()) ** 2 for row_E in logits_TE) / len(logits_TE)
