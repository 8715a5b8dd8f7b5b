import gzip
import hashlib
import json
import random

import numpy as np
import pytest

from recipes.data.dataset import SPLITS, load_dataset
from recipes.data.indexed import IndexedSource
from recipes.data.tokenizer import load_tokenizer
from tools.index import Options, Texts, assign_splits, index, main, parse_split, survey
from tools.tokenizer import train


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.txt").write_text("the end of </s> a 日本 document and some more words\n" * 50, encoding="utf-8")
    train([folder], 300, folder / "tokenizer.model", max_bytes=10**6, seed=1)
    return folder / "tokenizer.model"


@pytest.fixture
def run(tokenizer_file, tmp_path):
    """Indexes texts per domain; returns the exit code."""

    def run(domains, *arguments, out="out"):
        folder = tmp_path / "corpus"
        folder.mkdir(exist_ok=True)
        for name, texts in domains.items():
            lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        paths = ["--input", folder, "--tokenizer", tokenizer_file, "--out", tmp_path / out]
        return main([str(argument) for argument in (*paths, *arguments)])

    return run


def documents(folder, domain, split):
    source = IndexedSource(folder / f"{domain}_{split}", domain)
    return [source.ids[a:b].tolist() for a, b in zip(source.offsets, source.offsets[1:], strict=False)]


def test_each_document_ends_with_one_counted_end_token(run, tokenizer_file, tmp_path):
    texts = ["the end", "text with </s> in it</s>", "日本 words"]
    assert run({"a": texts}, "--split", "1,0,0", "--json", tmp_path / "result.json") == 0
    tokenizer = load_tokenizer(tokenizer_file)
    found = documents(tmp_path / "out", "a", "train")
    assert found == [[*tokenizer.encode(text), tokenizer.eod] for text in texts]
    assert all(ids.count(tokenizer.eod) == 1 for ids in found)
    manifest = json.loads((tmp_path / "result.json").read_text())
    assert manifest == json.loads((tmp_path / "out" / "dataset.json").read_text())
    size = manifest["domains"]["a"]["splits"]["train"]
    assert size["tokens"] == sum(map(len, found)) == (tmp_path / "out" / "a_train.bin").stat().st_size // 2
    assert size["documents"] == 3 and size["bytes"] == 2 * size["tokens"]


def test_empty_documents_and_empty_splits(run, tmp_path):
    assert run({"a": ["the end", "", "words"], "b": [""]}, "--split", "969,30,1") == 0
    manifest = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert manifest["domains"]["a"]["empty_documents"] == manifest["domains"]["b"]["empty_documents"] == 1
    info = load_dataset(tmp_path / "out")
    assert [info.domains["a"][split].documents for split in SPLITS] == [2, 0, 0]
    assert info.open("a", "valid").ids.size == 0 and info.num_samples("b", "train", 8) == 0


def test_the_split_depends_on_neither_order_nor_workers(run, tmp_path):
    texts = [f"document {i} " + "word " * (i % 13) for i in range(300)]
    assert run({"a": texts}, "--workers", "1", "--split", "8,1,1") == 0
    first = {split: documents(tmp_path / "out", "a", split) for split in SPLITS}
    assert run({"a": texts}, "--workers", "3", "--split", "8,1,1", out="threads") == 0
    for split in SPLITS:
        for suffix in ("bin", "idx"):
            name = f"a_{split}.{suffix}"
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "threads" / name).read_bytes()
    shuffled = random.Random(0).sample(texts, len(texts))
    assert run({"a": shuffled}, "--split", "8,1,1", out="shuffled") == 0
    for split in SPLITS:
        assert sorted(first[split]) == sorted(documents(tmp_path / "shuffled", "a", split))
    assert run({"a": texts}, "--split", "8,1,1", "--seed", "5", out="seed") == 0
    assert sorted(first["valid"]) != sorted(documents(tmp_path / "seed", "a", "valid"))


def test_equal_documents_lie_in_one_split_also_across_domains(run, tmp_path):
    texts = [f"document {i} words" for i in range(60)]
    assert run({"a": texts * 3, "b": texts[::-1] + ["only here " * 40] * 5, "c": texts[:30]}, "--split", "6,2,2") == 0
    held = {split: set() for split in SPLITS}
    for domain in "abc":
        for split in SPLITS:
            held[split] |= set(map(tuple, documents(tmp_path / "out", domain, split)))
    assert len(held["train"]) + len(held["valid"]) + len(held["test"]) == 61
    assert not held["train"] & held["valid"] and not held["train"] & held["test"] and not held["valid"] & held["test"]
    assert len(held["valid"]) > 5 and len(held["test"]) > 5


def test_shares_are_met_to_within_a_document():
    sizes = np.random.default_rng(0).lognormal(8, 1.5, 200).astype(np.int64)
    keys = np.random.default_rng(1).integers(0, 2**63, 200).astype(np.uint64)
    splits = assign_splits({"a": Texts(keys, sizes)}, (0.9, 0.05, 0.05))["a"]
    for split, share in enumerate((0.9, 0.05, 0.05)):
        assert abs(sizes[splits == split].sum() - share * sizes.sum()) <= sizes.max()
    single = survey(["one document"], seed=1)
    assert assign_splits({"a": single}, (0.9, 0.05, 0.05))["a"].tolist() == [0]
    assert assign_splits({"a": single}, (0, 1, 0))["a"].tolist() == [1]
    assert assign_splits({"a": survey([], seed=1)}, (1, 1, 1))["a"].tolist() == []


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path):
    from tokenizers import Tokenizer, models

    vocab = {"a": 0, "</s>": 1, "<unk>": 2} | {f"<{i}>": i for i in range(3, 65_600)} | {"z": 65_600}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("az")
    options = Options((1, 0, 0), 1, "text")
    manifest, written = index([tmp_path / "a.txt"], load_tokenizer(tmp_path), tmp_path / "out", options)
    assert written and manifest["dtype"] == "int32" and manifest["tokenizer"]["vocab_size"] == 65_601
    assert documents(tmp_path / "out", "a", "train") == [[0, 65_600, 1]]


def test_the_tokenizer_comes_with_the_data(run, tokenizer_file, tmp_path, capsys):
    (tmp_path / "odd.model").write_bytes(tokenizer_file.read_bytes())
    assert run({"a": ["the end"]}, "--tokenizer", tmp_path / "odd.model") == 0
    info = load_dataset(tmp_path / "out")
    assert info.tokenizer().path == tmp_path / "out" / "tokenizer.model"
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["tokenizer"]["file"] == "tokenizer.model"
    (tmp_path / "out" / "tokenizer.model").unlink()
    with pytest.raises(ValueError, match=r"found none; .*or index the data again"):
        info.tokenizer()
    assert run({"a": ["the end"]}) == 2 and "--overwrite" in capsys.readouterr().err
    assert run({"a": ["the end"]}, "--overwrite") == 0
    train([tmp_path / "corpus"], 270, tmp_path / "out" / "tokenizer.model", max_bytes=10**6, seed=1)
    with pytest.raises(ValueError, match="use the tokenizer of the data"):
        info.tokenizer()


def test_roles_of_a_hugging_face_tokenizer_come_with_the_data(tmp_path):
    from tokenizers import Tokenizer, models

    (tmp_path / "hf").mkdir()
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "stop": 2, "<unk>": 3}, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(["stop"])
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": "stop"}')
    (tmp_path / "a.txt").write_text("ab")
    index([tmp_path / "a.txt"], load_tokenizer(tmp_path / "hf"), tmp_path / "out", Options((1, 0, 0), 1, "text"))
    assert load_dataset(tmp_path / "out").tokenizer().eod == 2


@pytest.mark.parametrize("named", [{"eos_token": "</s>"}, {"eos_token_id": [256, 3]}])
def test_an_end_of_document_that_is_not_flagged_is_not_forged(tmp_path, named):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("</s>", special=False)])
    (tmp_path / "hf").mkdir()
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    file = "tokenizer_config.json" if "eos_token" in named else "generation_config.json"
    (tmp_path / "hf" / file).write_text(json.dumps(named | ({} if "eos_token" in named else {"eos_token_id": 256})))
    texts = ["see </s> here and there", "nothing special in this one", "</s></s></s>", "one more"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    paths = [
        "--input",
        tmp_path / "a.jsonl",
        "--tokenizer",
        tmp_path / "hf",
        "--out",
        tmp_path / "out",
        "--split",
        "1,0,0",
    ]
    assert main([str(path) for path in paths]) == 0
    info = load_dataset(tmp_path / "out")  # with the file that names the role, or the tokenizer would have no EOD
    found = documents(tmp_path / "out", "a", "train")
    assert [ids.count(info.eod) for ids in found] == [1] * 4 and all(ids[-1] == info.eod == 256 for ids in found)
    assert sorted(info.tokenizer().decode(ids) for ids in found) == sorted(texts)


def test_a_data_set_of_an_earlier_format_is_written_again(run, tmp_path, capsys):
    assert run({"a": ["the end", "words"]}) == 0
    path = tmp_path / "out" / "dataset.json"
    written = path.read_bytes()
    values = json.loads(written) | {"format_version": 1}
    del values["digest"], values["tokenizer"]["files"]
    path.write_text(json.dumps(values))
    assert main(["--verify", str(tmp_path / "out")]) == 0 and "by an earlier version" in capsys.readouterr().out
    assert run({"a": ["the end", "words"]}) == 0 and path.read_bytes() == written
    assert main(["--verify", str(tmp_path / "out")]) == 0 and "as it was written" in capsys.readouterr().out


def test_larger_data_is_verified_when_asked_for(run, tmp_path, capsys, monkeypatch):
    assert run({"a": ["the end", "words"]}, "--split", "1,0,0") == 0
    monkeypatch.setattr("recipes.data.dataset.VERIFIED_BYTES", 10)
    assert (
        "only sizes were checked; check all by `python -m tools.index --verify" in load_dataset(tmp_path / "out").note
    )
    data = tmp_path / "out" / "a_train.bin"
    data.write_bytes(data.read_bytes()[2:] + data.read_bytes()[:2])
    load_dataset(tmp_path / "out")
    assert main(["--verify", str(tmp_path / "out")]) == 2
    assert "a_train.bin: not the file that was written" in capsys.readouterr().err


def test_a_damaged_data_set_can_be_overwritten(run, tmp_path, capsys):
    assert run({"a": ["the end"]}) == 0
    (tmp_path / "out" / "dataset.json").write_text("{")
    assert run({"a": ["the end"]}) == 2 and "--overwrite" in capsys.readouterr().err
    assert run({"a": ["the end"]}, "--overwrite") == 0
    load_dataset(tmp_path / "out")


def test_unchanged_output_is_kept_and_other_output_is_refused(run, tmp_path, capsys):
    assert run({"a": ["the end"]}) == 0
    before = (tmp_path / "out" / "a_train.bin").stat().st_mtime_ns
    assert run({"a": ["the end"]}) == 0
    assert "up to date" in capsys.readouterr().out
    assert (tmp_path / "out" / "a_train.bin").stat().st_mtime_ns == before
    assert run({"a": ["the end"]}, "--seed", "9") == 2
    assert run({"a": ["other words"]}) == 2
    assert "pass --overwrite" in capsys.readouterr().err
    (tmp_path / "out" / "a_train.bin").write_bytes(b"")
    assert run({"a": ["the end"]}) == 2
    assert "a_train.bin" in capsys.readouterr().err
    assert run({"a": ["other words"]}, "--overwrite") == 0
    assert len(documents(tmp_path / "out", "a", "train")) == 1
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    assert run({"a": ["the end"]}, "--overwrite") == 2
    assert "thesis.tex" in capsys.readouterr().err and (tmp_path / "out" / "thesis.tex").exists()


def test_a_failure_leaves_nothing_behind(run, tmp_path, capsys):
    assert run({"a": ["the end"]}) == 0
    before = sorted(path.name for path in tmp_path.iterdir())
    bad = tmp_path / "corpus" / "b.jsonl.gz"
    bad.write_bytes(gzip.compress(b'{"text": "x"}\n{"text": \n'))
    assert run({}, out="second") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "b.jsonl.gz:2: not a JSON object" in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_tokenizer_without_end_of_document_is_refused(tmp_path, capsys):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("ab")
    out = tmp_path / "out"
    assert main(["--input", str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path), "--out", str(out)]) == 2
    assert "no end-of-document token" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize("text", ["1,1", "1,-1,1", "0,0,0", "a,b,c", "nan,1,1", "inf,1,1", ""])
def test_illegal_splits_are_named(text):
    with pytest.raises(ValueError, match=r"--split .*: give three numbers"):
        parse_split(text)


def test_dataset_json_holds_the_digest_of_each_file(run, tmp_path):
    assert run({"a": ["the end", "words"], "b": [""]}, "--split", "8,1,1") == 0
    info = load_dataset(tmp_path / "out")
    for domain, splits in info.domains.items():
        for split, size in splits.items():
            files = {suffix: tmp_path / "out" / f"{domain}_{split}.{suffix}" for suffix in ("bin", "idx")}
            assert size.content == {
                suffix: hashlib.sha256(file.read_bytes()).hexdigest() for suffix, file in files.items()
            }
