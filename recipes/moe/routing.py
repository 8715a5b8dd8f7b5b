"""The router of one layer: from the tokens of this rank to where they go, in the way that the description asks for.

tokens (with jitter) -> logits -> who chooses: tokens, experts, or nobody -> capacity -> Routing
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from recipes.config import Config, RouterType, SecondExpert, TokenDropPolicy
from recipes.logical import num_moe_experts
from recipes.moe import controls
from recipes.moe.context import MoeContext
from recipes.moe.expert_choice import by_token, choose_tokens
from recipes.moe.router import (
    Routing,
    capacity,
    gates,
    kept,
    logits_and_tokens,
    probabilities,
    route,
    router_logits,
    scores,
    sinkhorn_prices,
)


class Router:
    """Called with tokens [T, H] in the order of `sequence_shape` (S, B), and with the weights [E, H] unless nothing is learned.

    What is random is drawn from the generators that dropout uses, which a resumed run and recomputation restore.
    """

    def __init__(self, run: Config, context: MoeContext, layer: int):
        self.moe, self.context, self.layer = run.moe, context, layer
        self.num_experts, self.seed = num_moe_experts(run, layer), run.run.seed
        self.fixed = torch.empty(0)
        if self.moe.moe_router_type is RouterType.hash:
            assert run.model.vocab_size is not None
            size = (run.model.vocab_size, self.num_experts, self.moe.moe_router_topk)
            self.fixed = controls.hash_table(*size, self.seed, layer).to(context.report.device)
        if self.moe.moe_router_type is RouterType.random:
            self.fixed = controls.salts(self.num_experts, self.seed, layer).to(context.report.device)

    def __call__(
        self, x_TH: torch.Tensor, weight_EH: torch.Tensor | None, sequence_shape: tuple[int, int], training: bool
    ) -> tuple[Routing, torch.Tensor]:
        """The routing, and the tokens for the experts (see `logits_and_tokens`)."""
        kind = self.moe.moe_router_type
        factor = self.moe.moe_expert_capacity_factor if training else self.moe.moe_eval_capacity_factor
        if kind in (RouterType.hash, RouterType.random):
            routing = self._assign(x_TH)
        else:
            assert weight_EH is not None
            if training and self.moe.moe_input_jitter_eps:
                logits_TE = router_logits(self._jittered(x_TH), weight_EH)
            else:
                logits_TE, x_TH = logits_and_tokens(x_TH, weight_EH)
            if kind is RouterType.expert_choice:
                return self._experts_choose(logits_TE, sequence_shape, 1.0 if factor is None else factor), x_TH
            routing = self._tokens_choose(logits_TE, sequence_shape, training)
        real_T = self.context.real_T
        routing = routing.only(real_T)
        if factor is not None:
            tokens = len(x_TH) if real_T is None else int(real_T.sum())
            limit = capacity(tokens, routing.ids_TK.shape[1], self.num_experts, factor, self.moe.moe_min_capacity)
            by_probability = self.moe.moe_token_drop_policy is TokenDropPolicy.probs
            routing = replace(routing, keep_TK=kept(routing, limit, by_probability))
        return routing, x_TH

    def _drawing(self):
        """Around draws: ranks that route different tokens draw different numbers, those that route the same the same."""
        return get_cuda_rng_tracker().fork() if self.context.tokens_split else contextlib.nullcontext()

    def _jittered(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Tokens times 1 + U(-eps, eps), element by element (Fedus et al. 2021, arXiv 2101.03961, app. C)."""
        eps = self.moe.moe_input_jitter_eps or 0.0
        with self._drawing():
            noise_TH = torch.empty_like(x_TH, dtype=torch.float32).uniform_(1 - eps, 1 + eps)
        return x_TH.float() * noise_TH

    def _tokens_choose(self, logits_TE: torch.Tensor, sequence_shape: tuple[int, int], training: bool) -> Routing:
        moe, noise_TE, uniform_T = self.moe, None, None
        if training and moe.moe_router_type is RouterType.sinkhorn:
            return route(
                logits_TE, moe, noise_TE=sinkhorn_prices(self.context.pool(logits_TE.detach(), sequence_shape))
            )
        sampled = moe.moe_second_expert is SecondExpert.sampled
        if training and (moe.moe_router_gumbel_scale or sampled):
            with self._drawing():
                noise_TE = -torch.empty_like(logits_TE).exponential_().log()
            noise_TE *= 1.0 if sampled else moe.moe_router_gumbel_scale
        if training and moe.moe_second_expert is SecondExpert.threshold:
            with self._drawing():
                uniform_T = torch.rand(len(logits_TE), device=logits_TE.device)
        return route(logits_TE, moe, self.context.bias(self.layer), noise_TE, uniform_T)

    def _experts_choose(self, logits_TE: torch.Tensor, sequence_shape: tuple[int, int], factor: float) -> Routing:
        """Among the tokens of all ranks, in the order of samples, then positions; those that are no data come last of all."""
        moe, function, real_T = self.moe, self.moe.moe_router_score_function, self.context.real_T
        scores_TE = scores(logits_TE, function)
        offered_TE = scores_TE.detach() if real_T is None else scores_TE.detach().where(real_T[:, None], -1.0)
        pool_TE = self.context.pool(offered_TE, sequence_shape)
        tokens = len(pool_TE) if real_T is None else int((pool_TE[:, 0] != -1.0).sum())
        limit = capacity(tokens, moe.moe_router_topk, self.num_experts, factor, moe.moe_min_capacity)
        chosen_TE = self.context.own(choose_tokens(pool_TE, limit), sequence_shape)
        ids_TK, made_TK = by_token(chosen_TE, scores_TE.detach())
        gates_TK = gates(
            logits_TE, scores_TE, ids_TK, function, renormalise=False, factor=moe.moe_router_topk_scaling_factor or 1.0
        )
        return Routing(logits_TE, probabilities(logits_TE, function), ids_TK, gates_TK, made_TK)

    def _assign(self, x_TH: torch.Tensor) -> Routing:
        """Without a learned router: equal gates."""
        keys_T, topk = self.context.keys_T, self.moe.moe_router_topk
        assert keys_T is not None and len(keys_T) == len(x_TH), "the model hands over the token ids of each micro-batch"
        if self.moe.moe_router_type is RouterType.hash:
            ids_TK = self.fixed[keys_T]
        else:
            ids_TK = controls.random_choice(keys_T, self.fixed, topk)
        logits_TE = torch.zeros(len(x_TH), self.num_experts, device=x_TH.device)
        return Routing(logits_TE, torch.softmax(logits_TE, 1), ids_TK, torch.full_like(logits_TE[:, :topk], 1 / topk))
