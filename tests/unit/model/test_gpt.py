"""The model against Hugging Face's Llama, Qwen and StableLM, its masks, its vocabulary, its initial weights."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from recipes.config import Activation, Config, Normalization
from recipes.logical import logical_tensors
from tests.ranks import forked
from tests.tiny import tiny_config

HF_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """Our logical name -> Hugging Face's."""
    outside = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
    if not name.startswith("layers."):
        module, kind = name.split(".")
        return f"{outside[module]}.{kind}"
    _, layer, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"model.layers.{layer}.{HF_NAMES[module]}.{kind}"


def build(config: Config):
    from recipes.model.gpt import GPT, registry

    model = GPT(config)
    return model, registry(model, config)


def logical_weights(entries) -> dict[str, torch.Tensor]:
    return {piece.name: piece.read(entry.parameter.detach()) for entry in entries for piece in entry.pieces}


def tokens(config: Config, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, config.model.vocab_size, (batch, config.model.seq_length + 1), generator=generator)


FAMILIES = [*itertools.product(("llama", "llama tied", "qwen3"), (4, 2, 1)), ("qwen2", 2), ("stablelm", 2)]


def config_of(family: str, kv_heads: int) -> Config:
    """A tiny model of a family: Qwen2 has biases of q, k and v, StableLM also LayerNorm and turns half of each head."""
    config = tiny_config(model__num_query_groups=kv_heads, model__rotary_base=5000.0)
    model = config.model
    model.share_embeddings_and_output_weights = family == "llama tied"
    model.qk_layernorm, model.kv_channels = family == "qwen3", 12 if family == "qwen3" else None
    model.add_qkv_bias = family in ("qwen2", "stablelm")
    if family == "stablelm":
        model.normalization, model.rotary_percent = Normalization.LayerNorm, 0.5
    return config


def peer_of(family: str, config: Config):
    """Hugging Face's model of the same description."""
    import transformers

    model = config.model
    rope = {"rope_type": "default", "rope_theta": model.rotary_base, "partial_rotary_factor": model.rotary_percent}
    shape = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": model.num_query_groups,
        "max_position_embeddings": 16,
        "layer_norm_eps" if family == "stablelm" else "rms_norm_eps": model.layernorm_epsilon,
        "rope_parameters": rope,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "attn_implementation": "sdpa",
    }
    if family == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, head_dim=12))
    if family == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
    if family == "stablelm":
        return transformers.StableLmForCausalLM(transformers.StableLmConfig(**shape, use_qkv_bias=True))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, head_dim=8))


@pytest.mark.parametrize(("family", "kv_heads"), FAMILIES)
@forked
def test_logits_and_gradients_are_those_of_hugging_face(family, kv_heads):
    config = config_of(family, kv_heads)
    model, entries = build(config)
    draw = torch.Generator().manual_seed(1)
    for entry in entries:
        for piece in entry.pieces:
            if piece.name.endswith(".bias"):  # they start as zeros
                piece.write(entry.parameter.data, torch.randn(piece.shape, generator=draw))
    peer = peer_of(family, config)
    weights = {hf_name(name): value.clone() for name, value in logical_weights(entries).items()}
    missing, unexpected = peer.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}

    ids = tokens(config)
    inputs, labels = ids[:, :-1], ids[:, 1:].contiguous()
    logits = peer(input_ids=inputs).logits
    torch.testing.assert_close(model.logits(inputs).transpose(0, 1), logits, rtol=1e-4, atol=1e-5)
    F.cross_entropy(logits.reshape(-1, 60), labels.reshape(-1)).backward()
    (model(inputs, labels).sum() / labels.numel()).backward()
    theirs = dict(peer.named_parameters())
    for entry in entries:
        for piece in entry.pieces:
            ours = piece.read(entry.parameter.grad)
            torch.testing.assert_close(ours, theirs[hf_name(piece.name)].grad, rtol=1e-4, atol=1e-6, msg=piece.name)


@forked
def test_rows_that_pad_the_vocabulary_never_count():
    config = tiny_config()
    model, _ = build(config)
    table = model.embedding.table.weight
    assert table.shape[0] == 64 and config.model.vocab_size == 60
    ids = tokens(config)
    before = model(ids[:, :-1], ids[:, 1:].contiguous())
    with torch.no_grad():
        table[60:] = 1e4
    after = model(ids[:, :-1], ids[:, 1:].contiguous())
    assert torch.equal(before, after)
    assert model.logits(ids[:, :-1]).shape[-1] == 60
    after.sum().backward()
    assert torch.equal(table.grad[60:], torch.zeros(4, 32))


@forked
def test_document_mask_and_position_reset_equal_separate_documents():
    from recipes.config import DataConfig
    from recipes.train.batch import logit_inputs, model_inputs

    config = tiny_config()
    config.data = DataConfig(reset_position_ids=True, reset_attention_mask=True)
    model, _ = build(config)
    ids = tokens(config, batch=1) % 59 + 1
    ids[0, 6] = 0  # the first document is ids 0..6
    together = model.logits(**logit_inputs(model_inputs(ids.numpy(), 0, config.data, torch.device("cpu"))))[:, 0]
    first = model.logits(ids[:, :7])[:, 0]
    second = model.logits(ids[:, 7:16])[:, 0]
    torch.testing.assert_close(together, torch.cat((first, second)), rtol=1e-4, atol=1e-5)
    plain = model_inputs(ids.numpy(), 0, DataConfig(), torch.device("cpu"))
    assert set(plain) == {"tokens_BS", "labels_BS"}
    assert (model.logits(**logit_inputs(plain))[7:, 0] - second).abs().max() > 1e-3  # the mask matters


@forked
def test_positions_without_a_mask_change_the_attention_across_documents():
    """Rotary angles per sample: shifting all positions changes nothing, resetting some does."""
    config = tiny_config()
    model, _ = build(config)
    ids = tokens(config)[:, :-1]
    positions = torch.arange(16).expand(2, -1)
    torch.testing.assert_close(model.logits(ids, positions + 5), model.logits(ids), rtol=1e-3, atol=1e-4)
    reset = torch.cat((torch.arange(8), torch.arange(8))).expand(2, -1)
    assert (model.logits(ids, reset)[8:] - model.logits(ids)[8:]).abs().max() > 1e-3


@pytest.mark.parametrize("piece", [1, 25, 1 << 19])
@forked
def test_loss_is_cross_entropy_in_fp32_with_its_gradient(piece):
    """Row by row, two rows at a time, all at once; also where a plain exponential would overflow or vanish."""
    from recipes.model import loss

    loss._PIECE = piece
    for size in (1.0, 1e3):
        x, weight = (size * torch.randn(5, 3, 4)).requires_grad_(), torch.randn(11, 4, requires_grad=True)
        labels, pull = torch.randint(0, 11, (3, 5)), torch.rand(3, 5)
        found = loss.token_losses(x, weight, labels)
        grads = torch.autograd.grad((found * pull).sum(), (x, weight))
        exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
        logits = exact[0] @ exact[1].t()
        expected = -torch.log_softmax(logits, -1).gather(2, labels.t()[..., None]).squeeze(-1).t()
        wanted = torch.autograd.grad((expected * pull.double()).sum(), exact)
        for ours, theirs in zip((found, *grads), (expected, *wanted), strict=True):
            assert (ours.double() - theirs).norm() <= 2e-6 * theirs.norm()
        torch.testing.assert_close(loss.losses_of_logits(logits, labels), expected.float(), rtol=1e-6, atol=1e-6)
    assert loss.token_losses(*(t.detach().bfloat16() for t in (x, weight)), labels).dtype == torch.float32


@pytest.mark.parametrize("shape", ["swiglu", "gelu"])
@forked
def test_registry_covers_every_weight_once(shape):
    config = tiny_config(model__share_embeddings_and_output_weights=shape == "gelu")
    if shape == "gelu":
        config.model.activation, config.model.normalization = Activation.gelu, Normalization.LayerNorm
        config.model.add_bias_linear = True
    else:
        config.model.add_qkv_bias, config.model.qk_layernorm = True, True
    _, entries = build(config)
    expected = logical_tensors(config)
    found = logical_weights(entries)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    assert all(tuple(found[name].shape) == expected[name].shape for name in expected)
    # Every element of every parameter belongs to exactly one piece, padding rows of the vocabulary to none.
    for entry in entries:
        marks = torch.zeros(entry.parameter.shape)
        for piece in entry.pieces:
            piece.window(marks).add_(1)
        padded = entry.name.startswith(("embedding", "head"))
        assert marks.max() == 1 and (padded or marks.min() == 1), entry.name


@forked
def test_fused_query_key_value_rows_are_grouped():
    """heads 4, groups 2: rows q0 q1 k0 v0 | q2 q3 k1 v1, eight channels each."""
    config = tiny_config()
    _, entries = build(config)
    fused = next(entry for entry in entries if entry.name.endswith("0.inner.self_attention.linear_qkv.weight"))
    tag = torch.zeros(fused.parameter.shape)
    for piece in fused.pieces:
        heads = torch.arange(piece.shape[0]) // 8 + {"q": 0, "k": 10, "v": 20}[piece.name.split(".")[-2]]
        piece.write(tag, heads[:, None].expand(piece.shape).float())
    assert tag[::8, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@forked
def test_initial_weights_depend_on_seed_and_name_only():
    config = tiny_config()
    first, deeper = logical_weights(build(config)[1]), tiny_config(model__num_layers=3)
    more = logical_weights(build(deeper)[1])
    for name in ("embedding.weight", "layers.1.attention.q.weight", "layers.0.ffn.gate.weight"):
        assert torch.equal(first[name], more[name])
    assert not torch.equal(first["layers.0.ffn.gate.weight"], first["layers.1.ffn.gate.weight"])
    config.run.seed += 1
    assert not torch.equal(logical_weights(build(config)[1])["embedding.weight"], first["embedding.weight"])
    std = first["layers.0.ffn.down.weight"].std().item()
    assert std == pytest.approx(0.1 / math.sqrt(2 * 2), rel=0.1)


@forked
def test_a_prefix_does_not_see_the_future():
    config = tiny_config()
    model, _ = build(config)
    ids = tokens(config)[:, :-1]
    changed = ids.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 60
    assert torch.equal(model.logits(ids)[:10], model.logits(changed)[:10])
