"""Bytes that a rank keeps of its forward passes until their backward passes, by arithmetic.

What autograd saves in plain torch on CPU, line by line; kernels that fuse operations (Transformer Engine, RMSNorm on CUDA) keep
less. Tokens are taken as spread evenly over experts; DeepSpeed's own layer pads all of them to the tokens of the busiest, and keeps
so much more. Not counted: gradients, buffers for communication, and what an operation needs only while it runs.

T tokens of a micro-batch, of which a rank has R between the matrices (all, or its share with sequence parallelism); S positions;
H hidden; N query and G key/value heads of D channels, F feed-forward width, V vocabulary: a rank's share of each; E experts, of
which a token chooses K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from recipes.config import Activation, Config, MoeBackend, Normalization, Precision, Recompute
from recipes.logical import (
    expert_counts,
    expert_width,
    ffn_width,
    head_width,
    num_kv_heads,
    padded_vocab_size,
    stage_layers,
)
from recipes.topology import Layout

FP32, INT64, BOOL = 4, 8, 1
# What no selective recomputation lets go; what not even that of the whole block does, as an operation itself holds on to it.
ALWAYS, HELD = "", "held"


@dataclass(frozen=True)
class Activations:
    """Bytes of one rank: `kept` by its `in_flight` micro-batches, and `again`: by what is computed again at a time meanwhile."""

    kept: int
    again: int
    in_flight: int


def stage_activations(config: Config, layout: Layout) -> list[Activations]:
    """What a rank of each pipeline stage keeps at its peak.

    In the schedule 1F1B (Narayanan et al. 2019, arXiv 1806.03377, sec. 3.2) stage s of P has at most P - s micro-batches started
    and not yet finished.
    """
    train, stages = config.train, layout.pipeline_parallel_size
    micro_batch, counts, found = _MicroBatch(config, layout), expert_counts(config), []
    alike = {experts: micro_batch.block(experts) for experts in {*counts.values(), 0}}  # kept, again
    accumulation = max(1, train.global_batch_size // (train.micro_batch_size * layout.data_parallel_size))
    for stage, layers in enumerate(stage_layers(config, stages)):
        blocks = [alike[counts.get(layer, 0)] for layer in layers]
        kept = sum(kept for kept, _ in blocks) + micro_batch.ends(first=stage == 0, last=stage == stages - 1)
        in_flight = min(stages - stage, accumulation)
        if stages > 1 and stage == stages - 1:
            kept += micro_batch.hidden * min(
                2, accumulation - 1
            )  # inputs of finished ones, to which DeepSpeed holds on
        found.append(Activations(in_flight * kept, max(again for _, again in blocks), in_flight))
    return found


class _MicroBatch:
    """One micro-batch on one rank."""

    def __init__(self, config: Config, layout: Layout):
        model, tensor = config.model, layout.tensor_parallel_size
        self.config, self.layout, self.model = config, layout, model
        self.tokens = config.train.micro_batch_size * model.seq_length
        self.rows = self.tokens // tensor if layout.sequence_parallel else self.tokens
        self.item = 2 if config.train.precision is Precision.bf16 else FP32
        self.hidden = self.rows * model.hidden_size * self.item  # R H
        self.rms = model.normalization is Normalization.RMSNorm
        self.norms_copy = self.rms and self.item < FP32  # RMSNorm casts its input to fp32, and keeps that instead
        self.explicit = model.attention_dropout > 0  # attention for which torch has no fused kernel on CPU
        self.full = model.recompute_granularity is Recompute.full
        selective = model.recompute_granularity is Recompute.selective
        self.recomputed = model.recompute_modules if selective else []

    def ends(self, first: bool, last: bool) -> int:
        """What embedding, head and pipeline keep."""
        model, tensor = self.model, self.layout.tensor_parallel_size
        kept = self._angles() * FP32 if self.full else 0  # an input of blocks that are computed again
        mine = BOOL if tensor > 1 else 0  # of a token or label: whether it is in this rank's part of the vocabulary
        if first:
            kept += self.tokens * (INT64 + mine) + self._dropout()  # ids
        else:
            kept += self.hidden  # what DeepSpeed received, of which the first block gets a copy
        if not last:
            return kept + self.hidden  # what DeepSpeed sent
        assert model.vocab_size is not None
        vocab = min(model.vocab_size, padded_vocab_size(model, tensor) // tensor)
        kept += self._norm(self.rows, model.hidden_size)
        kept += self.tokens * model.hidden_size * self.item  # its output, from all positions: the head's input
        # T V exponentials, factors, labels, and which of them are here
        return kept + self.tokens * (vocab * FP32 + FP32 + INT64 + BOOL)

    def block(self, num_experts: int) -> tuple[int, int]:
        """Bytes that a block with so many experts (0: a dense one) keeps, and those that are there meanwhile when the most of it
        at a time is computed again."""
        lines = list(self._lines(num_experts))
        if self.full:
            held = sum(count for module, count in lines if module == HELD)
            kept_input = 0 if self.norms_copy else self.hidden  # which is among the lines
            return self.hidden + held, sum(count for _, count in lines) - kept_input
        kept = sum(count for module, count in lines if module not in self.recomputed)
        again = {module: sum(count for name, count in lines if name == module) for module in self.recomputed}
        if "core_attn" in again and not self.explicit and not self.config.data.reset_attention_mask:
            again["core_attn"] += self._context()  # its output is saved a second time
        for module in ("layernorm", "moe_act"):  # of which one norm or expert at a time goes as soon as it is there
            again.pop(module, 0)
        return kept, max(again.values(), default=0)

    def _lines(self, num_experts: int) -> Iterator[tuple[str, int]]:
        """What a block saves, each with the module that recomputation would have to name for it not to be kept."""
        # Where RMSNorm keeps a copy, its input would be kept in place of its output.
        norm_output = (ALWAYS if self.norms_copy else "layernorm"), self.hidden
        yield ALWAYS, self._norm(self.rows, self.model.hidden_size)
        yield norm_output
        yield from self._attention()
        yield ALWAYS, self._dropout()
        yield ALWAYS, self._norm(self.rows, self.model.hidden_size)
        if num_experts:
            yield from self._moe(num_experts, norm_output)
        else:
            yield norm_output
            yield from (("mlp", count) for count in self._mlp())
        yield ALWAYS, self._dropout()

    def _norm(self, rows: int, width: int, input_is_kept: bool = False) -> int:
        """RMSNorm: the input and the input over its length, in fp32, and 1 / length. LayerNorm: input, mean, 1 / deviation."""
        if self.rms:
            copies = 1 if input_is_kept and not self.norms_copy else 2
            return rows * (copies * width + 1) * FP32
        return rows * ((0 if input_is_kept else width) + 2) * self.item

    def _dropout(self) -> int:
        """The factors of R H."""
        return self.hidden if self.model.hidden_dropout else 0

    def _angles(self) -> int:
        """Numbers of rotation angles; with `data.reset_position_ids` each sequence has its own."""
        sequences = self.config.train.micro_batch_size if self.config.data.reset_position_ids else 1
        return sequences * self.model.seq_length * int(head_width(self.model) * self.model.rotary_percent)

    def _attention(self) -> Iterator[tuple[str, int]]:
        model, tensor, tokens = self.model, self.layout.tensor_parallel_size, self.tokens
        width, heads, kv_heads = head_width(model), model.num_attention_heads // tensor, num_kv_heads(model) // tensor
        yield ALWAYS, 4 * self._angles() * self.item  # cosines and sines for queries and keys
        if model.qk_layernorm:
            yield ALWAYS, self._norm(tokens * heads, width, input_is_kept=heads == kv_heads)
            yield ALWAYS, self._norm(tokens * kv_heads, width, input_is_kept=True)
        if not self.explicit or "core_attn" in self.recomputed:
            yield ALWAYS, tokens * (heads + 2 * kv_heads) * width * self.item  # q, k, v as they leave one matrix, for v
            yield ALWAYS, tokens * (heads + kv_heads) * width * self.item  # q and k, rotated
        if self.explicit:
            yield "core_attn", tokens * heads * 3 * width * FP32  # q, k, v scaled and one for each head
            yield "core_attn", tokens * heads * 3 * model.seq_length * FP32  # softmax, factors of its dropout, product
            # (of documents by themselves the squares of their lengths, which are not known here: this is the most it can be)
        else:
            yield "core_attn", tokens * heads * FP32  # log of the softmax's denominators
            if self.config.data.reset_attention_mask:
                yield "core_attn", self._context()  # what documents put out, before they are joined
        yield ALWAYS, self._context()  # input of the output matrix

    def _context(self) -> int:
        """What attention puts out, T N D."""
        heads = self.model.num_attention_heads // self.layout.tensor_parallel_size
        return self.tokens * heads * head_width(self.model) * self.item

    def _mlp(self) -> Iterator[int]:
        width = ffn_width(self.model) // self.layout.tensor_parallel_size
        # gate and up in one, silu(gate), up + 0, their product; or before and after gelu
        yield self.tokens * width * (5 if self.model.activation is Activation.swiglu else 2) * self.item

    def _moe(self, num_experts: int, norm_output: tuple[str, int]) -> Iterator[tuple[str, int]]:
        config, moe, layout, hidden = self.config, self.config.moe, self.layout, self.model.hidden_size
        gated = self.model.activation is Activation.swiglu
        parts, shared = layout.expert_tensor_parallel_size, moe.moe_shared_expert_intermediate_size
        split = layout.tensor_parallel_size > parts  # a rank routes its share of the tokens, else all of them
        tokens = self.tokens // layout.tensor_parallel_size if split else self.tokens
        choices = tokens * moe.moe_router_topk
        ours, alone = moe.backend is MoeBackend.grouped, layout.expert_parallel_size == 1
        direct = ours and alone and not moe.moe_expert_dropout  # experts take their rows from the input itself
        saves_input, gathered = shared or direct or self.item == FP32, layout.sequence_parallel and not split
        if gathered and saves_input:
            yield "moe", tokens * hidden * self.item  # the input, of all tensor-parallel ranks
        if "moe" in self.recomputed:
            yield norm_output
        elif saves_input and not gathered:
            view = split and not layout.sequence_parallel  # of a share of it, by which recomputation does not know it
            yield ALWAYS if view else norm_output[0], self.hidden
        if self.item < FP32:  # the router works in fp32
            yield "moe", (tokens + num_experts) * hidden * FP32  # its input and its weights
        yield "moe", tokens * (2 * num_experts + 1) * FP32  # logits, probabilities, log of the denominator
        yield "moe", choices * (INT64 + FP32)  # experts chosen, gates
        factor = 1.0 if moe.moe_expert_capacity_factor is None else min(1.0, moe.moe_expert_capacity_factor)
        rows = int(choices * factor)  # that are sent, and that arrive when all experts have equally many
        yield HELD, rows * 2 * INT64  # the tokens of these, and where those of each token are
        if ours:
            yield "moe", rows * FP32  # gates by expert
        if moe.moe_router_topk > 1:
            yield HELD, tokens * INT64  # where those of each token begin
            yield "moe", rows * INT64 if ours else 0  # which of all choices they are
        if not alone:
            yield HELD, rows * 2 * INT64  # where they arrive: their order by expert, and back
        inside = 4 if gated else 2  # gate and up, silu(gate), their product; or before and after gelu
        width = expert_width(config) // parts
        yield "moe", rows * ((0 if direct else hidden) + (inside - 1 if not ours else inside // 2) * width) * self.item
        yield "moe_act" if "moe_act" in self.recomputed else "moe", rows * width * self.item
        yield "moe", rows * hidden * self.item  # their outputs, for the gates
        if shared:
            yield "moe", tokens * shared // parts * inside * self.item
        weighed = (
            2 if moe.moe_use_residual else int(moe.moe_shared_expert_gate)
        )  # outputs multiplied by weights of tokens
        yield "moe", tokens * weighed * (hidden * self.item + FP32)
        if weighed and self.item < FP32:
            yield "moe", tokens * hidden * FP32  # the input in fp32, for these weights
