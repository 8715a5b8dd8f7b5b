from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from recipes.config import DataConfig, to_plain
from recipes.data.dataset import load_dataset
from recipes.data.loader import EvalSet
from recipes.description import check_description
from recipes.telemetry.jsonl import read_metrics
from tools.evaluate import Score, score, size
from tools.index import main as index

EVALUATE = "tools.evaluate"


@pytest.fixture
def evaluated(call, tmp_path):
    """Evaluates and returns the JSON."""

    def evaluated(*arguments):
        code, out, err = call(EVALUATE, *arguments, "--json", tmp_path / "result.json")
        assert code == 0, err
        result = json.loads((tmp_path / "result.json").read_text())
        for row in [*result["rows"], result["all"]]:
            assert row["domain"] in out and f"{row['nll']:.4f}" in out
        return result

    return evaluated


def test_the_run_s_own_evaluation_comes_back(evaluated, trained):
    lines = [row for row in read_metrics(trained.folder / "metrics.jsonl") if "eval/lm_loss" in row]
    for batch_size in (4, 3):
        result = evaluated(trained.folder, "--batch-size", batch_size)
        assert result["all"]["nll"] == pytest.approx(lines[-1]["eval/lm_loss"], abs=1e-6)
        assert result["all"]["perplexity"] == pytest.approx(math.exp(result["all"]["nll"]))
        assert [row["domain"] for row in result["rows"]] == ["en", "ja"]
        for row in result["rows"]:
            assert row["nll"] == pytest.approx(lines[-1][f"eval/{row['domain']}/lm_loss"], abs=1e-6)
    assert lines[-1]["eval/lm_loss"] < 5.5  # of log 400 = 5.99 nats: it has learned something


def test_another_step_split_and_number_of_samples_count(evaluated, trained):
    last = evaluated(trained.folder)
    earlier = evaluated(trained.folder / "checkpoints" / "step_00000010")
    assert earlier["step"] == 10 and earlier["all"]["nll"] > last["all"]["nll"] + 0.01
    test = evaluated(trained.folder, "--split", "test", "--samples", 3)
    assert test["all"]["samples"] == 6 and test["all"]["nll"] != pytest.approx(last["all"]["nll"], abs=1e-4)


def test_bits_per_byte(evaluated, trained):
    result = evaluated(trained.folder)
    *rows, total = [*result["rows"], result["all"]]
    for row in (*rows, total):
        assert row["bits_per_byte"] == pytest.approx(row["nll"] * row["tokens"] / math.log(2) / row["num_bytes"])
        assert row["num_bytes"] > row["tokens"] > 0
    assert total["num_bytes"] == sum(row["num_bytes"] for row in rows)
    assert total["nll"] == pytest.approx(sum(r["nll"] * r["tokens"] for r in rows) / total["tokens"])
    assert Score("a", 1, 8, 4, math.log(2)).bits_per_byte == 2


@pytest.mark.parametrize("masked", [False, True])
def test_bytes_are_those_of_the_raw_text_of_the_labels(trained, masked):
    dataset = load_dataset(trained.data)
    source, text_bytes = dataset.open("ja", "valid"), dataset.text_bytes("ja", "valid")
    raw = {
        json.loads(line)["text"]
        for line in (trained.data.parent / "corpus" / "ja.jsonl").read_text(encoding="utf-8").splitlines()
    }
    texts = [
        dataset.tokenizer().decode(source.ids[a:b].tolist())
        for a, b in zip(source.offsets, source.offsets[1:], strict=False)
    ]
    assert len(texts) > 5 and set(texts) <= raw and text_bytes.tolist() == [len(text.encode()) for text in texts]
    everything = EvalSet(source, 1, 10**9, 1)  # windows of one label: all ids but the first
    tokens, num_bytes = size(everything, dataset.eod, DataConfig(eod_mask_loss=masked), text_bytes)
    unseen = len(texts) if masked else 1  # first tokens of documents; the others' bytes are exact
    assert tokens == len(source.ids) - unseen
    lengths = np.diff(source.offsets) - 1
    expected = text_bytes.sum() - (text_bytes / lengths)[:unseen].sum()
    assert num_bytes == pytest.approx(expected, abs=0.5)
    few = EvalSet(source, 5, 1, 1)  # within the first document
    tokens, num_bytes = size(few, dataset.eod, DataConfig(), text_bytes)
    assert lengths[0] > 5 == tokens and num_bytes == round(5 * text_bytes[0] / lengths[0])
    assert size(few, dataset.eod, DataConfig(), None) == (5, None)


def test_a_tokenizer_that_loses_text_does_not_change_the_bytes(tmp_path):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    lossy = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    lossy.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.StripAccents()])
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    lossy.add_special_tokens(["</s>"])
    lossy.save(str(tmp_path / "tokenizer.json"))
    texts = ["ＡＢＣ　日本語   é", "a a unknown words", "①" * 50]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    paths = ["--input", tmp_path / "a.jsonl", "--tokenizer", tmp_path, "--out", tmp_path / "out", "--split", "0,1,0"]
    assert index([str(path) for path in paths]) == 0
    dataset = load_dataset(tmp_path / "out")
    source, text_bytes = dataset.open("a", "valid"), dataset.text_bytes("a", "valid")
    assert text_bytes.tolist() == [len(text.encode()) for text in texts]
    _, num_bytes = size(EvalSet(source, 1, 10**9, 1), dataset.eod, DataConfig(), text_bytes)
    first = text_bytes[0] / (np.diff(source.offsets)[0] - 1)
    assert num_bytes == pytest.approx(text_bytes.sum() - first, abs=0.5)


def test_data_at_another_place_without_its_tokenizer_or_without_sizes_of_text(call, evaluated, trained, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(trained.data, moved)
    assert evaluated(trained.folder, "--data", moved)["data"] == str(moved)
    assert index(["--verify", str(moved)]) == 0
    older = json.loads((moved / "dataset.json").read_text())
    older |= {"format_version": 1}
    del older["digest"], older["tokenizer"]["files"]
    for domain in older["domains"].values():
        for split in domain["splits"].values():
            del split["content"], split["text"]
    (moved / "dataset.json").write_text(json.dumps(older))
    assert evaluated(trained.folder, "--data", moved)["all"]["bits_per_byte"] is None
    _, _, err = call(EVALUATE, trained.folder, "--data", moved)
    assert "no bits per byte of en, ja: " in err and "written by an earlier version" in err
    (moved / "tokenizer.model").unlink()
    code, _, err = call(EVALUATE, trained.folder, "--data", moved)
    assert code == 2 and "tokenizer.model: no such file" in err and err.count("\n") == 1


def test_a_run_whose_data_is_gone_says_so(call, trained, tmp_path):
    run, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_00000020"
    shutil.copytree(trained.folder, run)
    for file in checkpoint.glob("optimizer-*"):
        file.unlink()
    _rewrite_config(checkpoint, lambda config: config["data"].update(path="data/gone"))
    code, _, err = call(EVALUATE, checkpoint)
    assert code == 2 and err.startswith("error: data.path=data/gone of the run: ") and err.count("\n") == 1
    assert "--data FOLDER" in err
    assert call(EVALUATE, checkpoint, "--data", trained.data)[0] == 0


def test_text_in_the_ids_of_another_tokenizer_is_refused(call, trained, tmp_path):
    from tools.tokenizer import train

    (tmp_path / "en.txt").write_text("some other words to learn from, of the same language\n" * 20)
    train([tmp_path / "en.txt"], 290, tmp_path / "other.model", max_bytes=10**5, seed=1)
    arguments = ["--input", tmp_path / "en.txt", "--tokenizer", tmp_path / "other.model", "--out", tmp_path / "data"]
    assert index([str(argument) for argument in arguments]) == 0
    code, _, err = call(EVALUATE, trained.folder, "--data", tmp_path / "data")
    assert code == 2 and "index the text with the model's tokenizer" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "0"], "--samples 0: must be at least 1"),
        (["--batch-size", "-1"], "--batch-size -1: must be at least 1"),
        (["--data", "/nowhere"], "/nowhere/dataset.json: no such file"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(call, trained, arguments, message):
    code, out, err = call(EVALUATE, trained.folder, *arguments)
    assert code == 2 and out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1


def _rewrite_config(checkpoint, change):
    """Change the stored description as its author could: sizes and checksums agree."""
    import hashlib

    trainer, manifest = (json.loads((checkpoint / name).read_text()) for name in ("trainer.json", "manifest.json"))
    change(trainer["config"])
    data = json.dumps(trainer).encode()
    (checkpoint / "trainer.json").write_bytes(data)
    manifest["files"]["trainer.json"] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("group", "key", "value", "message"),
    [
        ("model", "num_layers", "2", "model.num_layers=2: must be an integer"),
        ("model", "num_layers", True, "model.num_layers=true: must be an integer"),
        ("model", "num_layers", 10**9, "model.num_layers=1000000000 must be at least 1 and at most 10000"),
        ("model", "num_layers", 1, "its config says absent"),
        ("model", "ffn_hidden_size", 10**6, "its config says"),
        ("model", "ffn_hidden_size", 10**9, "model.ffn_hidden_size=1000000000 must be at least 1 and at most"),
        (
            "model",
            "make_vocab_size_divisible_by",
            10**6,
            "model.make_vocab_size_divisible_by=1000000 pads the vocabulary",
        ),
        ("optimizer", "adam_beta1", 7, "optimizer.adam_beta1=7"),
        ("train", "global_batch_size", 7, "train.global_batch_size=7 must be divisible"),
        ("model", "activation", "eval", "model.activation=eval: must be one of swiglu, gelu"),
        ("model", "typo", 1, "model.typo: unknown key"),
        ("data", "domain_weights", {"a": "1"}, "data.domain_weights.a=1: must be a number"),
        ("telemetry", "profile_steps", [1, None], "telemetry.profile_steps[1]=null: must be an integer"),
        ("model", "vocab_size", None, "vocab_size=None"),
    ],
)
def test_a_description_that_is_not_the_models_is_refused(call, trained, tmp_path, group, key, value, message):
    checkpoint = tmp_path / "step_00000020"
    shutil.copytree(trained.folder / "checkpoints" / "step_00000020", checkpoint)
    _rewrite_config(checkpoint, lambda config: config[group].update({key: value}))
    code, out, err = call(EVALUATE, checkpoint)
    assert code == 2 and out == "" and err.startswith(f"error: {checkpoint}") and err.count("\n") == 1
    assert message in err


def test_descriptions_come_back_from_plain_values(trained):
    plain = json.loads(json.dumps(to_plain(trained.config)))
    assert check_description(plain) == trained.config
    plain["telemetry"]["profile_steps"], plain["data"]["domain_weights"] = [1, 2], {"en": 1}
    again = check_description(plain)
    assert to_plain(again) == plain and type(again.data.domain_weights["en"]) is float


def test_a_loss_that_is_not_finite_is_an_error(trained, monkeypatch):
    dataset = load_dataset(trained.data)
    sets = {name: EvalSet(dataset.open(name, "valid"), 16, 2, 2) for name in ("en", "ja")}
    for value in (math.nan, math.inf):
        losses = {"en": 5.0, "ja": value, "": value}
        monkeypatch.setattr("recipes.train.evaluate.evaluate", lambda *_, losses=losses: losses)
        with pytest.raises(ValueError, match=f"the loss of ja is {value}: its training has diverged"):
            score(None, sets, dataset.eod, DataConfig(), dict.fromkeys(sets))
