"""One training step: our loop and engine, the same blocks bare, and Hugging Face's Llama of the same shape.

All three do forward, backward and a fused AdamW update in fp32 on the same ids, in one process. Ours also fetches the batch,
computes and clips the norm, applies the schedule and writes the metrics.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.config import Activation, Config, Normalization, Precision, WandbMode
from recipes.logical import ffn_width, num_kv_heads
from recipes.model.gpt import GPT
from tools.bench.rounds import interleave, ratio


def measure(config: Config, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Rows `ours`, `bare_mcore`, `hf_llama`: tokens per second (median), ratio to Hugging Face, overhead over bare blocks."""
    with tempfile.TemporaryDirectory() as folder:
        step, job = real_step(config, Path(folder))
        vocab = job.config.model.vocab_size
        ids = np.random.default_rng(0).integers(0, vocab, (config.train.global_batch_size, config.model.seq_length + 1))
        tokens_BS1 = torch.from_numpy(ids)
        work = {
            "ours": step,
            "bare_mcore": _bare(job.config, tokens_BS1),
            "hf_llama": _hugging_face(job.config, tokens_BS1),
        }
        seconds = interleave(work, rounds, repeats)
        job.close(failed=False)
    tokens = config.train.global_batch_size * config.model.seq_length
    rows = []
    for name, times in seconds.items():
        to_hf, hf_spread = ratio(seconds["hf_llama"], times)
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
    """Raise ValueError unless Hugging Face's Llama can have the same shape."""
    model = config.model
    if model.activation is not Activation.swiglu or model.normalization is not Normalization.RMSNorm:
        raise ValueError("the peer is Llama: use model.activation=swiglu and model.normalization=RMSNorm")
    if model.qk_layernorm or model.add_bias_linear or model.add_qkv_bias or model.rotary_percent != 1.0:
        raise ValueError("the peer is Llama: leave qk_layernorm, biases and rotary_percent at their defaults")
    if config.train.precision is not Precision.fp32:
        raise ValueError("train.precision: the comparison is made in fp32")


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
    start_process(config, Ranks())
    job = Job(config, Ranks())
    job.stop.restore()
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
    from transformers import LlamaConfig, LlamaForCausalLM

    model = config.model
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab_size or 0,
            hidden_size=model.hidden_size,
            intermediate_size=ffn_width(model),
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=num_kv_heads(model),
            max_position_embeddings=model.seq_length,
            rms_norm_eps=model.layernorm_epsilon,
            tie_word_embeddings=model.share_embeddings_and_output_weights,
            attn_implementation="sdpa",  # type: ignore[call-arg]
        )
    )
    optimizer = torch.optim.AdamW(peer.parameters(), lr=config.optimizer.lr, fused=True)
    inputs = tokens_BS1[:, :-1].contiguous()  # Llama shifts the labels itself

    def step() -> None:
        peer(input_ids=inputs, labels=inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
