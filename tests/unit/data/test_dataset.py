import json
import shutil

import pytest

from recipes.data.blend import open_blend, require_samples
from recipes.data.dataset import load_dataset, write_manifest
from recipes.data.tokenizer import load_tokenizer
from tools.index import Options, index
from tools.tokenizer import train


@pytest.fixture(scope="module")
def indexed(corpus, tokenizer_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("indexed") / "set"
    index([corpus], load_tokenizer(tokenizer_file), out, Options((0.8, 0.1, 0.1), 1, "text"))
    return out


@pytest.fixture
def folder(indexed, tmp_path):
    """A copy to damage."""
    return shutil.copytree(indexed, tmp_path / "set")


def edit(folder, change):
    path = folder / "dataset.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_sizes_agree_with_the_files(indexed):
    info = load_dataset(indexed)
    assert list(info.domains) == ["en", "ja"] and info.vocab_size == 400 and info.eod == 2
    for domain, splits in info.domains.items():
        for split, size in splits.items():
            source = info.open(domain, split)
            assert (len(source), len(source.offsets) - 1) == (size.tokens, size.documents) and size.documents > 0
            assert info.num_samples(domain, split, 16) == (size.tokens - 1) // 16


def test_the_blend_reads_the_tokens_of_its_domains(indexed, tokenizer_file):
    blend = open_blend(load_dataset(indexed), {"ja": 0.5, "en": 0.5}, seq_length=32, seed=1)
    tokenizer = load_tokenizer(tokenizer_file)
    assert [source.name for source in blend.sources] == ["en", "ja"]
    for k in range(20):
        assert ("猫" in tokenizer.decode(blend.sample(k)) or "生" in tokenizer.decode(blend.sample(k))) == (
            blend.source_of(k) == 1
        )


def test_another_tokenizer_is_refused_with_both_named(indexed, tokenizer_file, tmp_path):
    info = load_dataset(indexed)
    tokenizer = load_tokenizer(tokenizer_file)
    info.check_tokenizer(tokenizer)
    tokenizer.fingerprint = "f" * 64
    with pytest.raises(ValueError, match=rf"tokenizer {info.tokenizer_fingerprint[:12]} .* is ffffffffffff "):
        info.check_tokenizer(tokenizer)


def test_a_dtype_too_small_for_the_vocabulary_is_refused(folder):
    edit(folder, lambda manifest: manifest["tokenizer"].update(vocab_size=151_936))
    with pytest.raises(ValueError, match=r"en_train\.idx: dtype uint16 holds ids up to 65535, .* has 151936"):
        load_dataset(folder)


def test_a_dtype_code_other_than_recorded_is_refused(folder):
    idx = folder / "ja_valid.idx"
    idx.write_bytes(idx.read_bytes()[:17] + b"\x03" + idx.read_bytes()[18:])
    with pytest.raises(ValueError, match=r"ja_valid\.idx: dtype int16, dataset\.json says uint16"):
        load_dataset(folder)


def test_missing_and_cut_files_are_named(folder):
    data = folder / "en_test.bin"
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"en_test\.bin: .* tokens, dataset\.json says"):
        load_dataset(folder)
    data.unlink()
    with pytest.raises(ValueError, match=r"en_test\.bin: no such file"):
        load_dataset(folder)
    (folder / "dataset.json").unlink()
    with pytest.raises(ValueError, match=r"dataset\.json: no such file"):
        load_dataset(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(domains={"../evil": m["domains"]["en"]}), "domain name '../evil'"),
        (lambda m: m.update(domains={".": m["domains"]["en"]}), "domain name '.'"),
        (lambda m: m.pop("dtype"), "damaged"),
        (lambda m: m.update(dtype="nonsense"), "damaged"),
        (lambda m: m.update(domains=[1]), "damaged"),
        (lambda m: m["domains"]["en"]["splits"].pop("valid"), "damaged"),
        (lambda m: m["domains"]["en"]["splits"]["train"].update(tokens="many"), "damaged"),
        (lambda m: m["domains"]["en"]["splits"]["train"]["content"].update(bin="none"), "damaged"),
        (lambda m: m["domains"]["en"]["splits"]["train"].update(content=7), "damaged"),
        (lambda m: m.update(format_version=99), "format version 99"),
    ],
)
def test_a_damaged_manifest_is_named(folder, change, message):
    edit(folder, change)
    with pytest.raises(ValueError, match=r"dataset\.json: ") as caught:
        load_dataset(folder)
    assert message in str(caught.value)


def test_without_wrapping_too_few_samples_are_refused_with_both_numbers(indexed):
    info = load_dataset(indexed)
    have = {name: info.num_samples(name, "train", 16) for name in info.domains}
    require_samples(info, {"ja": 1.0}, 16, have["ja"])
    with pytest.raises(ValueError, match=rf"ja has {have['ja']} of the {have['ja'] + 1} needed") as caught:
        require_samples(info, {"ja": 1.0}, 16, have["ja"] + 1)
    assert "data.wrap=false" in str(caught.value) and "train.steps" in str(caught.value)


def sign(folder):
    """Write the digest that fits, as whoever means to deceive would."""
    values = json.loads((folder / "dataset.json").read_text())
    values.pop("digest")
    write_manifest(folder, values.pop("tokenizer"), values.pop("dtype"), values.pop("domains"), **values)


def test_what_was_changed_after_writing_is_refused(folder):
    edit(folder, lambda manifest: manifest["options"].update(seed=5))
    with pytest.raises(ValueError, match=r"dataset\.json: was changed after it was written"):
        load_dataset(folder)


def test_an_end_of_document_that_the_tokenizer_does_not_have_is_refused(folder):
    edit(folder, lambda manifest: manifest["tokenizer"].update(eod=5))
    for signed in (False, True):
        if signed:
            sign(folder)
        with pytest.raises(
            ValueError, match=r"dataset\.json was written with .*EOD 5\) but .*tokenizer\.model is .*EOD 2\)"
        ):
            load_dataset(folder)


def test_other_ids_and_another_tokenizer_are_refused(folder):
    valid = folder / "en_valid.bin"
    data = bytearray(valid.read_bytes())
    data[0], data[2] = data[2], data[0]  # as legal as before, and not what was written
    valid.write_bytes(data)
    with pytest.raises(ValueError, match=r"en_valid\.bin: not the file that was written with dataset\.json"):
        load_dataset(folder)
    (folder.parent / "text.txt").write_text("other words\n" * 99)
    train([folder.parent / "text.txt"], 275, folder / "tokenizer.model", max_bytes=10**5, seed=1)
    with pytest.raises(ValueError, match=r"tokenizer\.model: not the file that was written"):
        load_dataset(folder)


def test_links_and_pipes_are_no_data(folder):
    for path in (folder / "en_test.bin", folder / "tokenizer.model", folder / "dataset.json"):
        kept = folder.parent / path.name
        path.rename(kept)
        path.symlink_to(kept)
        with pytest.raises(ValueError, match=rf"{path.name}: not a regular file"):
            load_dataset(folder)
        path.unlink()
        kept.rename(path)
    load_dataset(folder)
