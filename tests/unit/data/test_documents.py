import gzip
import json
import resource
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from recipes.data.documents import find_domains, read_documents


def test_all_formats_give_the_same_documents(tmp_path):
    texts = ["one\nline two", "日本\u3000語", "three"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines + "\n", encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": [1, 2, 3]}), tmp_path / "d.parquet")
    (tmp_path / "manifest.json").write_text("{}")
    domains = find_domains([tmp_path])
    assert list(domains) == ["a", "b", "c", "d"]
    for path in domains.values():
        positions = []
        assert list(read_documents(path, report=positions.append)) == texts
        assert positions == sorted(positions) and positions[-1] == path.stat().st_size


def test_empty_documents_are_passed_on(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": [None, "x"]}), tmp_path / "b.parquet")
    for path in tmp_path.iterdir():
        assert list(read_documents(path)) == ["", "x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json", "not a JSON object"),
        (b"[1]", 'a string under "text"'),
        (b'{"body": "x"}', "--text-key"),
        (b'{"text": 5}', 'a string under "text"'),
        (b'{"text": "\\ud800"}', "lone surrogate at character 0"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not a JSON object"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: ") as caught:
        list(read_documents(path))
    assert message in str(caught.value)


def test_damaged_containers_are_named(tmp_path):
    packed = gzip.compress(b'{"text": "x"}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: damaged gzip"):
        list(read_documents(tmp_path / "a.jsonl.gz"))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(ValueError, match=r"b\.parquet: damaged Parquet"):
        list(read_documents(tmp_path / "b.parquet"))
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "text": [3]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match='no column "content", it has body, text'):
        list(read_documents(tmp_path / "c.parquet", "content"))
    with pytest.raises(ValueError, match='row 1 of column "text" is int'):
        list(read_documents(tmp_path / "c.parquet"))


def test_domain_names(tmp_path):
    for name in ("a b.txt", "..c.txt", "日本.txt"):
        (tmp_path / name).write_text("x")
    assert list(find_domains([tmp_path])) == ["__", "a_b", "c"]
    (tmp_path / "a_b.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"domain 'a_b' comes from both .*a b\.txt and .*a_b\.jsonl"):
        find_domains([tmp_path])


def test_missing_inputs_are_named(tmp_path):
    with pytest.raises(ValueError, match="absent: no such file or folder"):
        find_domains([tmp_path / "absent"])
    with pytest.raises(ValueError, match="no text found"):
        find_domains([tmp_path])
    (tmp_path / "x.csv").write_text("")
    with pytest.raises(ValueError, match=r"x\.csv: unknown format"):
        find_domains([tmp_path / "x.csv"])


def long_documents(folder):
    """The same text of 3 MB in every format, small when packed."""
    text = "x" * 3_000_000
    line = json.dumps({"text": text}).encode()
    (folder / "a.jsonl").write_bytes(b'{"text": "short"}\n' + line)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "short"}\n' + line))
    (folder / "c.txt").write_text("short\n\n" + "x\n" * 1_500_000)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["short"] * 10 + [text]}), folder / "d.parquet")
    return find_domains([folder])


@pytest.mark.parametrize("name", "abcd")
def test_a_document_beyond_the_limit_is_refused_by_place(tmp_path, name):
    path = long_documents(tmp_path)[name]
    place = {"a": r"a\.jsonl:2: this line", "b": r"b\.jsonl\.gz:2: this line", "c": r"c\.txt:3: the document from here"}
    match = place.get(name, r"d\.parquet: row 11")
    with pytest.raises(ValueError, match=rf"{match} .*has more than 1,000,000 bytes; .*--max-document-bytes"):
        list(read_documents(path, max_bytes=1_000_000))
    assert len(list(read_documents(path, max_bytes=3_100_000))[-1]) >= 2_999_999


def test_what_a_small_file_unpacks_to_is_not_held(tmp_path):
    """200 MB in one line, or in one value, from a few hundred kB."""
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as stream:
        stream.write(b'{"text": "')
        for _ in range(200):
            stream.write(b"x" * 1_000_000)
        stream.write(b'"}\n')
    text = pyarrow.array(["x" * 200_000_000])
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "b.parquet", compression="gzip")
    code = """
import resource, sys
from pathlib import Path
from recipes.data.documents import read_documents
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import pyarrow.parquet
before = used()
try:
    list(read_documents(Path(sys.argv[1])))
except ValueError as error:
    print(error)
print((used() - before) // 1000)
"""
    for path in find_domains([tmp_path]).values():
        done = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=50, check=True
        )
        message, megabytes = done.stdout.splitlines()
        assert "has more than 4,194,304 bytes" in message and int(megabytes) < 100


def test_equal_values_of_a_column_are_not_held_together(tmp_path):
    """2 GB of text that is stored once."""
    column = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 2000, pyarrow.int32()), pyarrow.array(["x" * 10**6])
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": column.cast(pyarrow.large_string())}), tmp_path / "a.parquet")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    documents = read_documents(tmp_path / "a.parquet")
    assert sum(len(document) for document in documents) == 2 * 10**9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("line", [b'{"text": "x", "n": ' + b"9" * 5000 + b"}", b'{"text": ' * 5000, b"[" * 10**6])
def test_json_that_cannot_be_read_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(line)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: not a JSON object"):
        list(read_documents(tmp_path / "a.jsonl"))
