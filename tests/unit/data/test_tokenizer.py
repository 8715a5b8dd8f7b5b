import hashlib
import json
import shutil

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from recipes.data.tokenizer import load_tokenizer
from tools.tokenizer import export_hf


def byte_level(path, special=(), added=(), config=None):
    """A byte-level BPE tokenizer.json without merges, like GPT-2's in kind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.add_tokens(list(added))
    tokenizer.enable_truncation(4)
    tokenizer.save(str(path))
    if config is not None:
        path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_sentencepiece_ids_and_fingerprint(tokenizer_file):
    tokenizer = load_tokenizer(tokenizer_file)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.eod) == (400, 1, 2, 3, 2)
    assert tokenizer.fingerprint == hashlib.sha256(tokenizer_file.read_bytes()).hexdigest()
    assert load_tokenizer(tokenizer_file.parent).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_control_tokens_spelled_out_in_text_are_text(kind, tokenizer_file, tmp_path):
    if kind == "huggingface":
        export_hf(tokenizer_file, tmp_path)
    tokenizer = load_tokenizer(tokenizer_file if kind == "sentencepiece" else tmp_path)
    for text in ("</s>", "<s>a</s>", "a<pad>", "</s></s>", "<unk>", "<0x41>"):
        ids = tokenizer.encode(text)
        assert not {tokenizer.bos, tokenizer.eos, tokenizer.pad} & set(ids), text
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([tokenizer.bos, *ids, tokenizer.eos]) == text


def test_batches_equal_single_texts_for_any_number_of_threads(tokenizer_file, tmp_path):
    export_hf(tokenizer_file, tmp_path)
    texts = ["猫である", "", "the age\n\n", " of 1859"] * 5
    expected = [load_tokenizer(tokenizer_file).encode(text) for text in texts]
    for path in (tokenizer_file, tmp_path):
        for threads in (1, 3):
            assert [ids.tolist() for ids in load_tokenizer(path).encode_batch(texts, threads)] == expected


def test_huggingface_added_tokens_count_and_stored_truncation_is_ignored(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json", special=["<|endoftext|>"], added=["<tool>"])
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == 258 and tokenizer.eod == tokenizer.eos == 256
    assert tokenizer.bos is None and tokenizer.pad is None
    text = "longer than the stored truncation 日本"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<tool>") == [257]


def test_huggingface_roles_come_from_the_configuration(tmp_path):
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    config = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}
    tokenizer = load_tokenizer(byte_level(tmp_path / "tokenizer.json", special, config=config))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (None, 258, 256)
    assert tokenizer.eod == 256  # the end of a turn is not the end of a document


def test_a_tokenizer_without_end_of_document_says_so_when_asked(tmp_path):
    tokenizer = load_tokenizer(byte_level(tmp_path / "tokenizer.json", special=["<mask>"]))
    assert tokenizer.eod is None
    with pytest.raises(ValueError, match=r"tokenizer\.json: this tokenizer has no end-of-document token"):
        tokenizer.require_eod()


ROLE_FILES = {
    "tokenizer_config.json": {"eos_token": "</s>"},
    "tokenizer_config.json as an object": {"eos_token": {"content": "</s>", "special": False}},
    "tokenizer_config.json as a list": {"eos_token": None, "additional_special_tokens": ["</s>", {"content": "<pad>"}]},
    "tokenizer_config.json by decoder": {"added_tokens_decoder": {"256": {"content": "</s>", "special": True}}},
    "special_tokens_map.json": {"eos_token": {"content": "</s>"}, "pad_token": "<pad>"},
    "generation_config.json": {"eos_token_id": [256, 257], "pad_token_id": -1},
    "config.json": {"eos_token_id": 256, "bos_token_id": None, "model_type": "llama"},
}


@pytest.mark.parametrize("named", ROLE_FILES)
def test_a_token_that_any_file_gives_a_role_is_not_made_by_its_spelling(tmp_path, named):
    path = byte_level(tmp_path / "tokenizer.json", added=["</s>", "<pad>", "<tool>"])
    (tmp_path / named.split()[0]).write_text(json.dumps(ROLE_FILES[named]))
    tokenizer = load_tokenizer(path)
    assert 256 in tokenizer.control and [file.name for file in tokenizer.role_files] == [named.split()[0]]
    if "eos_token" in ROLE_FILES[named] or "eos_token_id" in ROLE_FILES[named]:
        assert tokenizer.eod == tokenizer.eos == (None if ROLE_FILES[named].get("eos_token", 0) is None else 256)
    for text in ("</s>", "see </s> here", "</s></s>", "a</s>b\n</s>", "日本</s>"):
        for ids in (tokenizer.encode(text), tokenizer.encode_batch([text, text])[1].tolist()):
            assert not set(ids) & set(tokenizer.control) and tokenizer.decode([*ids, 256]) == text
    assert tokenizer.encode("<tool>") == [258]  # no file gives it a role


@pytest.mark.parametrize("role", ["bos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token"])
def test_every_role_is_kept_from_text(tmp_path, role):
    path = byte_level(tmp_path / "tokenizer.json", added=["<role>"], special=["</s>"], config={role: "<role>"})
    tokenizer = load_tokenizer(path)
    i = tokenizer.tokenizer.token_to_id("<role>")
    assert (
        i not in tokenizer.encode("a <role> b<role>")
        and tokenizer.decode(tokenizer.encode("a <role> b")) == "a <role> b"
    )


@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json"])
def test_a_role_of_a_piece_that_text_makes_is_refused(tmp_path, file):
    path = byte_level(tmp_path / "tokenizer.json", special=["</s>"])
    value = {"eos_token": "a"} if file == "tokenizer_config.json" else {"eos_token_id": [0]}
    (tmp_path / file).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=rf"tokenizer\.json: the text .* control id .* forge it.*{file}"):
        load_tokenizer(path)


def test_a_user_defined_piece_with_a_role_is_refused(tmp_path):
    import sentencepiece

    (tmp_path / "text.txt").write_text("the end of a turn and some words more\n" * 30)
    options = {"input": str(tmp_path / "text.txt"), "model_prefix": str(tmp_path / "m"), "vocab_size": 300}
    sentencepiece.SentencePieceTrainer.train(
        **options,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=["<end>"],
        control_symbols=["<stop>"],
        minloglevel=3,
    )
    tokenizer = load_tokenizer(tmp_path / "m.model")
    assert tokenizer.eod == 2 and tokenizer.decode(tokenizer.encode("a <stop> b</s>")) == "a <stop> b</s>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    assert load_tokenizer(tmp_path / "m.model").eod == tokenizer.processor.piece_to_id("<stop>")
    for file, value in (("tokenizer_config.json", {"eos_token": "<end>"}), ("config.json", {"eos_token_id": [2, 4]})):
        (tmp_path / "tokenizer_config.json").write_text("{}")
        (tmp_path / file).write_text(json.dumps(value))
        with pytest.raises(ValueError, match=r"m\.model: the text '<end>' encodes to the control id 4"):
            load_tokenizer(tmp_path / "m.model")


def test_unknown_text_that_becomes_the_end_of_a_document_is_refused(tmp_path):
    """Not by its spelling, but by what its vocabulary lacks."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "<|endoftext|>": 1}, [], unk_token="<|endoftext|>"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"control id 1"):
        load_tokenizer(tmp_path).encode("a日本")


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        ("tokenizer_config.json", {"eos_token": 1.5}, "eos_token is 1.5; write a token"),
        ("tokenizer_config.json", {"eos_token": {"content": [1]}}, "eos_token is .*; write a token"),
        (
            "tokenizer_config.json",
            {"eos_token": "<absent>"},
            "eos_token='<absent>' is not in the tokenizer's vocabulary",
        ),
        ("generation_config.json", {"eos_token_id": 10**12}, "eos_token_id=1000000000000 is not in the tokenizer's"),
        ("config.json", [1], "expected a JSON object"),
    ],
)
def test_roles_that_cannot_be_are_refused_by_file(tmp_path, file, value, message):
    path = byte_level(tmp_path / "tokenizer.json", special=["</s>"])
    (tmp_path / file).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=rf"{file}: {message}"):
        load_tokenizer(path)


def test_a_tokenizer_whose_control_token_can_be_forged_is_refused(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="control id 1, so a document could forge it"):
        load_tokenizer(tmp_path)


def test_bad_paths_are_named(tokenizer_file, tmp_path):
    with pytest.raises(ValueError, match="no such tokenizer file"):
        load_tokenizer(tmp_path / "absent.model")
    with pytest.raises(ValueError, match="found none"):
        load_tokenizer(tmp_path)
    for name, message in (("x.model", "not a sentencepiece model"), ("x.json", "not a Hugging Face tokenizer")):
        (tmp_path / name).write_bytes(b"not a tokenizer")
        with pytest.raises(ValueError, match=message):
            load_tokenizer(tmp_path / name)
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ValueError, match="unknown tokenizer kind"):
        load_tokenizer(tmp_path / "x.txt")
    shutil.copy(tokenizer_file, tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"found x\.model, tokenizer\.json"):
        load_tokenizer(tmp_path)
