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
