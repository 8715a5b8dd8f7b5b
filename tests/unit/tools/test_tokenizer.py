import json
import re

import pytest
import sentencepiece

from recipes.data.tokenizer import load_tokenizer
from tools.tokenizer import HARD_TEXTS, _balanced_cap, export_hf, main, train

TEXTS = {
    "en": "The quick brown fox jumps over the lazy dog, 1859 times.\n\tif x == 10:\n        return  x\n",
    "ja": "吾輩は猫である。名前はまだ無い。日本語の文章を読み書きする。先頭と末尾。\n",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name, text in TEXTS.items():
        lines = (json.dumps({"text": text * 20 + str(i)}) for i in range(20))
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    assert main(["train", "--input", str(corpus), "--vocab-size", "450", "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    assert main(["export-hf", str(model), "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_come_back(model, text):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = processor.encode(text)
    assert processor.decode(ids) == text and processor.unk_id() not in ids


def test_check_passes_on_ours_and_fails_on_a_tokenizer_with_library_defaults(model, corpus, tmp_path, capsys):
    assert main(["check", str(model), "--json", str(tmp_path / "ours.json")]) == 0
    assert "16 of 16 exact" in capsys.readouterr().out
    default = tmp_path / "default.model"
    with default.open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(list(TEXTS.values()) * 50), model_writer=stream, vocab_size=73, minloglevel=3
        )
    assert main(["check", str(default), "--json", str(tmp_path / "default.json")]) == 1
    reports = (tmp_path / "ours.json", tmp_path / "default.json")
    good = [sum(row["ok"] for row in json.loads(report.read_text())["rows"]) for report in reports]
    assert good[0] == 16 and good[1] < 8


def test_no_lone_space_before_text_newlines_and_digits_are_single_tokens(model):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert processor.encode("日本", out_type=str)[0] != "▁"
    assert processor.encode("a\n\nb", out_type=str) == ["a", "\n", "\n", "b"]
    assert processor.encode("\t\n", out_type=str) == ["\t", "\n"]
    pieces = (processor.id_to_piece(i) for i in range(6 + 256, processor.get_piece_size()))
    assert not [piece for piece in pieces if re.search(r"\d.|.\d", piece)]


def test_training_is_repeatable_and_the_seed_counts(corpus, tmp_path):
    def bytes_of(name, seed):
        train([corpus], 400, tmp_path / name, max_bytes=30_000, seed=seed)
        return (tmp_path / name).read_bytes()

    assert bytes_of("a.model", 1) == bytes_of("b.model", 1) != bytes_of("c.model", 2)


def test_the_sample_is_balanced_over_domains(tmp_path):
    for name, count in (("large", 4000), ("small", 100), ("middle", 1000)):
        text = "\n".join(f"{name} line {i:05d} of text" for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}))
    used = train([tmp_path], 300, tmp_path / "t.model", max_bytes=40_000, seed=1)
    assert used["small"] > 2000 and used["middle"] > 15_000 and 15_000 < used["large"] < 22_000
    assert sum(used.values()) == pytest.approx(40_000, rel=0.1)


def test_balanced_cap():
    assert _balanced_cap({"a": 10, "b": 100, "c": 1000}, 150) == 70
    assert _balanced_cap({"a": 10, "b": 100}, 110) == _balanced_cap({"a": 1}, 5) == float("inf")
    assert _balanced_cap({"a": 10, "b": 100}, 10) == 5


def huggingface_tokenizers(model, exported):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return {
        "auto": AutoTokenizer.from_pretrained(exported),
        "fast": PreTrainedTokenizerFast.from_pretrained(exported),
        "slow": SentencePieceBackend(vocab_file=str(model), **roles),
    }


def test_ids_are_equal_in_sentencepiece_and_huggingface(model, exported):
    ours = load_tokenizer(model)
    for name, theirs in huggingface_tokenizers(model, exported).items():
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (ours.bos, ours.eos, ours.pad), name
        assert len(theirs) == ours.vocab_size, name
        for text in (*HARD_TEXTS, "\n日本", " \n a", "".join(HARD_TEXTS), *TEXTS.values()):
            ids = ours.encode(text)
            assert theirs(text)["input_ids"] == ids, (name, text)
            glued = theirs.encode(f"<s>{text}</s>{text}<pad>", add_special_tokens=False)
            assert glued == [ours.bos, *ids, ours.eos, *ids, ours.pad], (name, text)


def test_the_export_is_found_by_model_type_and_decodes_exactly(exported, tmp_path):
    from transformers import AutoTokenizer

    for file in exported.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in HARD_TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_model_of_another_kind_is_not_exported(tmp_path, exported, capsys):
    path = tmp_path / "unigram.model"
    with path.open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(list(TEXTS.values()) * 50), model_writer=stream, vocab_size=73, minloglevel=3
        )
    with pytest.raises(ValueError, match="can be exported"):
        export_hf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert main(["export-hf", str(exported), "--out", str(tmp_path / "out")]) == 2
    assert "already is a Hugging Face tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--input", "CORPUS", "--out", "OUT/x.model", "--vocab-size", "50000"], "--vocab-size 50000 cannot"),
        (["train", "--input", "CORPUS", "--out", "OUT/x.model", "--vocab-size", "0"], "must be at least 1"),
        (["train", "--input", "CORPUS", "--out", "OUT/x.json"], "ends in .model"),
        (["train", "--input", "OUT/absent", "--out", "OUT/x.model"], "no such file or folder"),
        (["check", "OUT/absent"], "no such tokenizer file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, corpus, tmp_path, capsys):
    try:
        code = main([word.replace("CORPUS", str(corpus)).replace("OUT", str(tmp_path)) for word in arguments])
    except SystemExit as ended:  # argparse
        code = ended.code
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
