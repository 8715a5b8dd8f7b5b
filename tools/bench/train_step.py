"""One training step: our loop and engine, the same blocks bare, and Hugging Face's Llama or Mixtral of the same shape.

All three do forward, backward and a fused AdamW update in fp32 on the same ids, in one process. Ours also fetches the batch,
computes and clips the norm, applies the schedule and writes the metrics. With experts, both of ours also compute the losses that
balance them; Hugging Face's Mixtral does without, which is its default in training, and has its experts in grouped products.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes import schema
from recipes.config import Activation, Config, ModelConfig, Normalization, Precision, WandbMode
from recipes.logical import expert_width, ffn_width, moe_layers, num_kv_heads
from recipes.model.gpt import GPT
from tools.bench.rounds import interleave, ratio

# What is measured when nothing else is asked for; the last is Mixtral at the size of a laptop.
STANDARD = {
    "dense": ["experiment=dense"],
    "switch_8e": ["experiment=switch_8e"],
    "mixtral_8e": [
        "experiment=top2_8e",
        "moe.moe_layer_freq=1",
        "moe.moe_layer_offset=0",
        "moe.moe_ffn_hidden_size=null",
    ],
}


def measure(configs: Mapping[str, Config], rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Rows `ours`, `bare_mcore`, and `hf_llama` or `hf_mixtral` of each model: tokens per second (median), ratio to Hugging
    Face, overhead over bare blocks."""
    return [{"model": name} | row for name, config in configs.items() for row in _rows(config, rounds, repeats)]


def _rows(config: Config, rounds: int, repeats: int) -> list[dict[str, Any]]:
    peer = "hf_mixtral" if config.moe.has_experts else "hf_llama"
    with tempfile.TemporaryDirectory() as folder:
        step, job = real_step(config, Path(folder))
        vocab = job.config.model.vocab_size
        ids = np.random.default_rng(0).integers(0, vocab, (config.train.global_batch_size, config.model.seq_length + 1))
        tokens_BS1 = torch.from_numpy(ids)
        work = {
            "ours": step,
            "bare_mcore": _bare(job.config, tokens_BS1),
            peer: _hugging_face(job.config, tokens_BS1),
        }
        seconds = interleave(work, rounds, repeats)
        job.close(failed=False)
    tokens = config.train.global_batch_size * config.model.seq_length
    rows = []
    for name, times in seconds.items():
        to_hf, hf_spread = ratio(seconds[peer], times)
        overhead, overhead_spread = ratio(times, seconds["bare_mcore"])
        rows.append(
            {
                "impl": name,
                "tokens_per_second": tokens / sorted(times)[len(times) // 2],
                "ratio_to_hf": to_hf,
                "ratio_to_hf_iqr": hf_spread,
                "overhead": overhead - 1,
                "overhead_iqr": overhead_spread,
            }
        )
    return rows


def check(config: Config) -> None:
    """Raise ValueError unless Hugging Face's Llama or Mixtral can have the same shape."""
    model, moe = config.model, config.moe
    if model.activation is not Activation.swiglu or model.normalization is not Normalization.RMSNorm:
        raise ValueError("the peers are Llama and Mixtral: use model.activation=swiglu and model.normalization=RMSNorm")
    if model.qk_layernorm or model.add_bias_linear or model.add_qkv_bias or model.rotary_percent != 1.0:
        raise ValueError(
            "the peers are Llama and Mixtral: leave qk_layernorm, biases and rotary_percent at their defaults"
        )
    if config.train.precision is not Precision.fp32:
        raise ValueError("train.precision: the comparison is made in fp32")
    if moe.num_moe_experts_per_layer is not None:
        raise ValueError(
            f"moe.num_moe_experts_per_layer={schema.show(moe.num_moe_experts_per_layer)}: the peer is Mixtral, which has the same "
            "number of experts in all layers; use moe.num_moe_experts, and null here"
        )
    if moe.has_experts and moe.moe_shared_expert_intermediate_size is not None:
        raise ValueError(
            "the peer is Mixtral, which has no shared expert: leave moe.moe_shared_expert_intermediate_size null"
        )


def real_step(config: Config, folder: Path) -> tuple[Callable[[], object], Any]:
    """The real loop on a synthetic data set in a temporary run folder."""
    from recipes.data.synthetic import write_dataset
    from recipes.launcher import Ranks
    from recipes.train.job import Job, start_process
    from recipes.train.loop import train_one

    vocab = config.model.vocab_size or 4096
    config.model.vocab_size = vocab
    config.data.path = str(write_dataset(folder / "data", vocab, tokens=200_000))
    config.run.dir = str(folder / "run")
    config.telemetry.wandb_mode = WandbMode.disabled
    config.train.steps, config.telemetry.log_interval = 10**9, 10**9
    if not torch.distributed.is_initialized():
        start_process(config, Ranks())
    job = Job(config, Ranks())
    job.stop.close()
    steps = iter(range(1, config.train.steps))
    return lambda: train_one(job, next(steps)), job


def _bare(config: Config, tokens_BS1: torch.Tensor) -> Callable[[], None]:
    """Forward, backward, AdamW on the same blocks."""
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=True)
    inputs, labels = tokens_BS1[:, :-1].contiguous(), tokens_BS1[:, 1:].contiguous()

    def step() -> None:
        (model(inputs, labels).sum() / labels.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _hugging_face(config: Config, tokens_BS1: torch.Tensor) -> Callable[[], None]:
    peer = _mixtral(config) if config.moe.has_experts else _llama(config)
    optimizer = torch.optim.AdamW(peer.parameters(), lr=config.optimizer.lr, fused=True)
    inputs = tokens_BS1[:, :-1].contiguous()  # it shifts the labels itself

    def step() -> None:
        peer(input_ids=inputs, labels=inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _common(model: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size or 0,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": num_kv_heads(model),
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.layernorm_epsilon,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "attn_implementation": "sdpa",
    }


def _llama(config: Config) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(intermediate_size=ffn_width(config.model), **_common(config.model)))


def _mixtral(config: Config) -> Any:
    """Blocks that have no experts with us have Llama's feed-forward part, which Mixtral itself cannot mix in."""
    from transformers import LlamaConfig, MixtralConfig, MixtralForCausalLM
    from transformers.models.llama.modeling_llama import LlamaMLP

    common = _common(config.model)
    mixtral = MixtralForCausalLM(
        MixtralConfig(
            intermediate_size=expert_width(config),
            num_local_experts=config.moe.num_moe_experts or 0,
            num_experts_per_tok=config.moe.moe_router_topk,
            **common,
        )
    )
    assert mixtral.config._experts_implementation == "grouped_mm"
    for number in set(range(config.model.num_layers)) - set(moe_layers(config)):
        mlp = LlamaMLP(LlamaConfig(intermediate_size=ffn_width(config.model), **common))
        mixtral.model.layers[number].mlp = mlp
    return mixtral
