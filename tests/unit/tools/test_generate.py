from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recipes.config import DataConfig
from recipes.data.tokenizer import load_tokenizer
from tests.ranks import run_ranks
from tools.generate import Sampling, for_terminal, generate, next_token_probabilities, stream_text

GENERATE = "tools.generate"
LOGITS = torch.tensor([0.5, 0.1, 0.3, 0.1]).log()


def probabilities(logits, **settings):
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return next_token_probabilities(torch.as_tensor(logits), Sampling(**(plain | settings))).numpy()


def test_the_plain_distribution_is_the_softmax_whatever_the_order_of_ids():
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 5
    np.testing.assert_allclose(probabilities(logits), logits.double().softmax(0), rtol=1e-12)
    np.testing.assert_allclose(probabilities(logits, temperature=0.5), (2 * logits.double()).softmax(0), rtol=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-12])
def test_no_temperature_is_the_most_likely_token(temperature):
    assert probabilities(LOGITS, temperature=temperature).tolist() == [1, 0, 0, 0]
    assert probabilities([3e38, -3e38, 1.0], temperature=temperature).tolist() == [1, 0, 0]


def test_greedy_takes_the_lower_of_equal_ids_and_ignores_the_other_settings():
    assert probabilities([1.0, 2.0, 2.0], temperature=0.0, top_k=3, top_p=0.9).tolist() == [0, 1, 0]


def test_high_temperature_is_uniform():
    np.testing.assert_allclose(probabilities(LOGITS, temperature=1e300), 0.25)


def test_top_k_keeps_exactly_k():
    np.testing.assert_allclose(probabilities(LOGITS, top_k=2), [0.625, 0, 0.375, 0], rtol=1e-6)
    np.testing.assert_allclose(probabilities(LOGITS, top_k=3), [5 / 9, 1 / 9, 3 / 9, 0], rtol=1e-6)
    assert probabilities(LOGITS, top_k=1).tolist() == [1, 0, 0, 0]
    for everything in (0, 4, 99):
        np.testing.assert_allclose(probabilities(LOGITS, top_k=everything), [0.5, 0.1, 0.3, 0.1], rtol=1e-6)


def test_top_p_keeps_the_fewest_that_reach_it():
    kept = {p: np.count_nonzero(probabilities(LOGITS, top_p=p)) for p in (1e-9, 0.49, 0.51, 0.79, 0.81, 0.95, 1.0)}
    assert kept == {1e-9: 1, 0.49: 1, 0.51: 2, 0.79: 2, 0.81: 3, 0.95: 4, 1.0: 4}
    np.testing.assert_allclose(probabilities(LOGITS, top_p=0.7), [0.625, 0, 0.375, 0], rtol=1e-6)


def test_top_p_counts_what_temperature_and_top_k_left():
    assert np.count_nonzero(probabilities(LOGITS, top_k=2, top_p=0.6)) == 1  # 0.5 of 0.8 is 0.625
    assert np.count_nonzero(probabilities(LOGITS, temperature=0.25, top_p=0.8)) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_output_of_a_diverged_model_is_refused(value):
    with pytest.raises(ValueError, match="not finite"):
        probabilities([0.0, value])


class FixedModel(torch.nn.Module):
    """After id i the most likely id is `following[i]`; records what it is shown."""

    def __init__(self, following, seq_length, data=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(model=SimpleNamespace(seq_length=seq_length), data=data or DataConfig())
        self.following, self.shown, self.inputs = torch.tensor(following), [], None

    def logits(self, tokens_BS, positions_BS=None, documents=None):
        self.shown.append(tokens_BS[0].tolist())
        self.inputs = positions_BS, documents
        return torch.nn.functional.one_hot(self.following[tokens_BS], len(self.following)).float().transpose(0, 1)


def greedy(model, prompt, limit=10, vocab_size=5):
    tokenizer = SimpleNamespace(require_eod=lambda: 0, vocab_size=vocab_size)
    return list(generate(model, prompt, tokenizer, Sampling(temperature=0), limit, seed=1))


def test_ends_with_the_end_of_document_or_at_the_limit():
    model = FixedModel([1, 2, 3, 0, 4], seq_length=8)
    assert greedy(model, [2]) == [3, 0]
    assert greedy(model, [4]) == [4] * 10
    assert greedy(model, [1], limit=1) == [2]


def test_an_empty_prompt_starts_a_document_and_the_window_slides():
    model = FixedModel([1, 2, 3, 0, 4], seq_length=3)
    assert greedy(model, []) == [1, 2, 3, 0]
    assert model.shown == [[0], [0, 1], [0, 1, 2], [1, 2, 3]]
    greedy(model, [4, 4, 4, 4, 1], limit=1)
    assert model.shown[-1] == [4, 4, 1]


def test_documents_are_told_apart_as_in_training():
    data = DataConfig(reset_position_ids=True, reset_attention_mask=True)
    model = FixedModel([1, 2, 3, 0, 4], seq_length=8, data=data)
    greedy(model, [4, 0, 4], limit=1)
    positions_BS, documents = model.inputs
    assert positions_BS.tolist() == [[0, 1, 0]] and documents == [[2, 1]]
    plain = FixedModel([1, 2, 3, 0, 4], seq_length=8)
    greedy(plain, [4, 0, 4], limit=1)
    assert plain.inputs == (None, None)


def test_ids_that_the_tokenizer_lacks_are_never_drawn():
    assert greedy(FixedModel([4, 4, 4, 4, 4], seq_length=8), [1], limit=3, vocab_size=4) == [0]


@pytest.fixture(scope="module")
def tokenizer(trained):
    return load_tokenizer(trained.tokenizer)


@pytest.mark.parametrize("text", ["吾輩は髙﨑😀です。", "👩\u200d👩\u200d👧 family", "plain  words\n\tand more"])
def test_streamed_text_is_exact_and_never_broken(tokenizer, text):
    prompt, ids = tokenizer.encode("名前は"), tokenizer.encode(text)
    pieces = list(stream_text(tokenizer, prompt, ids))
    assert "".join(pieces) == text and len(pieces) > 3
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_that_never_completes_is_left_out(tokenizer):
    ids = tokenizer.encode("a😀")
    assert len(ids) > 3  # the emoji is spelled in bytes
    assert "".join(stream_text(tokenizer, [], ids[:-1])) == "a"
    assert "".join(stream_text(tokenizer, [], [*ids[:-1], *tokenizer.encode("b")])).endswith("b")
    assert list(stream_text(tokenizer, [], [tokenizer.eod])) == []


def test_terminals_get_no_control_characters():
    assert for_terminal("日本　語\n\tx") == "日本　語\n\tx"
    assert for_terminal("\x1b]0;owned\x07\x9b2J\r") == "�]0;owned��2J�"


def continuation_is_greedy(rank, world_size, folder, prompt, new_ids):
    """One pass over the whole text predicts each new id; beyond the window, a pass over the last ids does."""
    from recipes.checkpoint.model import open_model
    from recipes.train.batch import model_inputs

    model, config, _ = open_model(Path(folder))
    tokenizer = load_tokenizer(folder)
    ids, length = tokenizer.encode(prompt) + new_ids, config.model.seq_length
    first = len(ids) - len(new_ids)
    assert len(ids) > length + 4 and first < length
    for begin in range(len(ids) - length):
        window = np.array([ids[begin : begin + length + 1]])
        inputs = model_inputs(window, tokenizer.eod, config.data, torch.device("cpu"))
        inputs.pop("labels_BS"), inputs.pop("loss_mask_BS")
        predicted = model.logits(**inputs)[:, 0].argmax(-1).tolist()
        skip = first - 1 if begin == 0 else length - 1
        assert predicted[skip:] == window[0, skip + 1 :].tolist()


def test_greedy_text_is_what_the_model_predicts(call, trained, tmp_path):
    arguments = (trained.folder, "--prompt", "It was", "--greedy", "--max-new-tokens", 30)
    code, out, err = call(GENERATE, *arguments, "--json", tmp_path / "new" / "result.json")
    result = json.loads((tmp_path / "new" / "result.json").read_text())
    assert code == 0 and result["step"] == 20 and result["temperature"] == 0
    assert out == f"It was{result['text']}\n" and result["text"]
    assert "step_00000020" in err and len(result["ids"]) == 30 and not result["ended"]
    run_ranks(f"{__name__}:continuation_is_greedy", 1, str(trained.folder), "It was", result["ids"])


def test_a_seed_gives_the_same_text_and_another_one_another(call, trained, tmp_path):
    def text(seed):
        settings = ("--temperature", 2, "--top-p", 0.99, "--top-k", 0, "--seed", seed)
        code, out, _ = call(GENERATE, trained.folder / "checkpoints", "--prompt", "名前は", *settings)
        assert code == 0 and out.startswith("名前は")
        return out

    assert text(1) == text(1) != text(2)


def test_one_step_and_weights_alone_are_enough(call, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained.folder, run)
    for file in run.glob("checkpoints/*/optimizer-*"):
        file.unlink()
    for path in (run, run / "checkpoints" / "step_00000010"):
        code, _, err = call(GENERATE, path, "--greedy", "--max-new-tokens", 2)
        assert code == 0, err
    assert "step_00000010" in err
    (run / "tokenizer.model").unlink()
    code, _, err = call(GENERATE, run)
    assert code == 2 and err.count("\n") == 1 and "--tokenizer PATH" in err
    code, out, _ = call(GENERATE, run, "--tokenizer", trained.tokenizer, "--greedy", "--max-new-tokens", 2)
    assert code == 0 and out.strip()


def test_another_tokenizer_is_refused(call, trained, tmp_path):
    from tools.tokenizer import train

    (tmp_path / "a.txt").write_text("some other words to learn from, of the same language\n" * 20)
    train([tmp_path / "a.txt"], 290, tmp_path / "other.model", max_bytes=10**5, seed=1)
    code, out, err = call(GENERATE, trained.folder, "--tokenizer", tmp_path / "other.model")
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert "other.model: has fingerprint" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "--temperature -1: must be a finite number, at least 0"),
        (["--temperature", "nan"], "--temperature nan: must be a finite"),
        (["--temperature", "inf"], "--temperature inf: must be a finite"),
        (["--top-k", "-1"], "--top-k -1: must be at least 0"),
        (["--top-p", "0"], "--top-p 0: must be a finite number, above 0 and at most 1"),
        (["--top-p", "1.1"], "--top-p 1.1"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1"),
        ([], "no checkpoint here"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(call, tmp_path, arguments, message):
    code, out, err = call(GENERATE, tmp_path, *arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("module", ["tools.generate", "tools.evaluate"])
def test_help_has_examples_and_imports_nothing_heavy(module):
    script = f"""if True:
        import sys, contextlib, {module} as tool
        with contextlib.suppress(SystemExit): tool.main(["--help"])
        sys.exit(", ".join({{"torch", "megatron", "deepspeed", "transformers"}} & set(sys.modules)) or 0)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"examples:\n  python -m {module} " in done.stdout
