from __future__ import annotations

import json
import math
import shutil

import pytest

from recipes.config import DataConfig, from_plain, to_plain
from recipes.data.dataset import load_dataset
from recipes.data.loader import EvalSet
from recipes.data.tokenizer import load_tokenizer
from recipes.telemetry.jsonl import read_metrics
from tools.evaluate import Score, size
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
def test_tokens_and_bytes_are_those_of_the_labels(trained, masked):
    dataset, tokenizer = load_dataset(trained.data), load_tokenizer(trained.data)
    source = dataset.open("ja", "valid")
    everything = EvalSet(source, 1, 10**9, 1)  # windows of one label: all ids but the first
    tokens, num_bytes = size(everything, dataset.eod, DataConfig(eod_mask_loss=masked), tokenizer)
    texts = [
        tokenizer.decode(source.ids[a:b].tolist()) for a, b in zip(source.offsets, source.offsets[1:], strict=False)
    ]
    first_ids = [int(source.ids[a]) for a in source.offsets[:-1]]
    unseen = first_ids if masked else first_ids[:1]
    assert len(texts) > 5 and tokens == len(source.ids) - len(unseen)
    assert num_bytes == sum(len(t.encode()) for t in texts) - sum(len(tokenizer.decode([i]).encode()) for i in unseen)
    assert size(everything, dataset.eod, DataConfig(eod_mask_loss=masked), None) == (tokens, None)


def test_data_without_its_tokenizer_or_at_another_place(call, evaluated, trained, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(trained.data, moved)
    (moved / "tokenizer.model").unlink()
    result = evaluated(trained.folder, "--data", moved)
    assert result["data"] == str(moved) and result["all"]["bits_per_byte"] is None
    _, _, err = call(EVALUATE, trained.folder, "--data", moved)
    assert "no bits per byte: " in err


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
        ("model", "num_layers", "2", "model.num_layers='2': must be int"),
        ("model", "num_layers", True, "model.num_layers=True: must be int"),
        (
            "model",
            "num_layers",
            10**9,
            "num_layers=1000000000, up to 0 experts cannot be those of a model of 20 tensors",
        ),
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
        ("model", "activation", "eval", "model.activation='eval': must be one of swiglu, gelu"),
        ("model", "typo", 1, "model.typo: unknown key"),
        ("data", "domain_weights", {"a": "1"}, "data.domain_weights.a='1': must be float"),
        ("telemetry", "profile_steps", [1, None], "telemetry.profile_steps[1]=None: must be int"),
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
    assert from_plain(type(trained.config), plain) == trained.config
    plain["telemetry"]["profile_steps"], plain["data"]["domain_weights"] = [1, 2], {"en": 1}
    again = from_plain(type(trained.config), plain)
    assert to_plain(again) == plain and type(again.data.domain_weights["en"]) is float
    del plain["model"]["rotary_base"]
    assert from_plain(type(trained.config), plain).model.rotary_base == 10000.0
    with pytest.raises(ValueError, match=r"^model='x': must be a mapping"):
        from_plain(type(trained.config), plain | {"model": "x"})
    with pytest.raises(ValueError, match=r"^value=None: must be a mapping"):
        from_plain(type(trained.config), None)
