import gzip
import json

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
