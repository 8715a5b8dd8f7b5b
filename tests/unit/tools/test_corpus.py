"""The corpus tool on tiny archives made here: no network, no package client but a stand-in on PATH."""

import hashlib
import io
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
import tarfile
import unicodedata
import zipfile
import zlib
from pathlib import Path

import pytest

from tools.corpus import build_corpus, load_table
from tools.corpus.__main__ import main
from tools.corpus.archives import read_members
from tools.corpus.clean import Document, clean_documents, clean_text, take_bytes
from tools.corpus.fetch import UnavailableError, fetch
from tools.corpus.readers import READERS, html_pages, metamath, ontology, r_novels, source_code, string_constant
from tools.corpus.table import FALLBACK_DIR, TABLE_PATH, Domain, Package, Part

CODE = {f"pkg/m{i}.py": f"def function_{i}(argument):\n    return argument + {i}\n".encode() for i in range(5)}


def make_wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def make_tar(members: dict[str, bytes], link: str | None = None, mode: str = "w:xz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        if link is not None:
            info = tarfile.TarInfo("./usr/link.html")
            info.type, info.linkname = tarfile.SYMTYPE, link
            archive.addfile(info)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def make_deb(path: Path, members: dict[str, bytes], link: str | None = None) -> Path:
    blob = b"!<arch>\n"
    for name, content in (
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", b"odd"),
        ("data.tar.xz", make_tar(members, link)),
    ):
        blob += f"{name:<16}{'0':<12}{'0':<6}{'0':<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        blob += b"\n" * (len(content) % 2)
    path.write_bytes(blob)
    return path


def package_of(path: Path, client: str = "pip") -> Package:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Package("pkg", client, "MIT", "Somebody", version="1.0", file=path.name, sha256=sha256)


@pytest.fixture
def code_domain(tmp_path: Path) -> Domain:
    """A domain whose wheel lies in ``tmp_path / "cache"``, without fallback."""
    (tmp_path / "cache").mkdir()
    wheel = make_wheel(tmp_path / "cache" / "pkg-1.0-py3-none-any.whl", CODE)
    return Domain("code", "some code", "code", (Part(package_of(wheel), "source_code", r"\.py$"),))


def build(tmp_path: Path, domain: Domain, **options) -> tuple[dict, bool]:
    """Build offline into ``tmp_path / "out"``; return the record and whether the file was written anew."""
    done = []
    options = {"cache": tmp_path / "cache", "offline": True, **options}
    build_corpus(tmp_path / "out", [domain], on_done=lambda *result: done.append(result), **options)
    [(_, record, built)] = done
    return record, built


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_wheel_becomes_documents_with_source_and_record(tmp_path, code_domain):
    record, built = build(tmp_path, code_domain)
    rows = read_jsonl(tmp_path / "out/code.jsonl")
    assert built
    assert [row["text"] for row in rows] == [content.decode().strip("\n") for content in CODE.values()]
    assert rows[3]["source"] == "pkg==1.0:pkg/m3.py"
    assert record["documents"] == 5 and record["bytes"] == sum(len(row["text"]) for row in rows)
    assert record["licence"] == "MIT" and record["inputs"][0]["sha256"] == code_domain.parts[0].package.sha256
    assert record["fallback"] is False
    assert json.loads((tmp_path / "out/corpus.json").read_text())["domains"] == {"code": record}


@pytest.mark.parametrize("name", ["../../evil.py", "/evil.py", "..\\evil.py", "C:/evil.py"])
def test_member_outside_the_archive_is_an_error(tmp_path, name):
    wheel = make_wheel(tmp_path / "a.whl", {name: b"x = 1\n"})
    deb = make_deb(tmp_path / "a.deb", {name: b"x = 1\n"})
    before = sorted(tmp_path.parent.rglob("*"))
    for path in (wheel, deb):
        with pytest.raises(ValueError, match="leaves the archive"):
            list(read_members(path))
    assert sorted(tmp_path.parent.rglob("*")) == before


def test_deb_is_read_and_its_links_are_not_followed(tmp_path):
    (tmp_path / "secret.html").write_text("<p>secret</p>")
    deb = make_deb(
        tmp_path / "a.deb", {"./usr/b.html": b"<p>b</p>", "./usr/a.txt": b"-"}, link=f"{tmp_path}/secret.html"
    )
    assert list(read_members(deb, r"\.html$")) == [("usr/b.html", b"<p>b</p>")]


def test_npm_tarball_is_read(tmp_path):
    (tmp_path / "a.tgz").write_bytes(make_tar({"package/a.json": b"{}"}, mode="w:gz"))
    assert list(read_members(tmp_path / "a.tgz")) == [("package/a.json", b"{}")]


@pytest.mark.parametrize("name", ["a.whl", "a.deb", "a.tgz"])
def test_damaged_archive_names_the_file_and_a_way_out(tmp_path, name):
    (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(ValueError, match=rf"{re.escape(name)}: .*delete it and run again"):
        list(read_members(tmp_path / name))


def test_oversized_member_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.corpus.archives.MAX_MEMBER_BYTES", 10)
    wheel = make_wheel(tmp_path / "a.whl", {"big.py": b"x" * 11})
    with pytest.raises(ValueError, match="11 bytes, the limit is 10"):
        list(read_members(wheel))


def test_changed_file_in_the_cache_is_an_error(tmp_path, code_domain):
    make_wheel(tmp_path / "cache/pkg-1.0-py3-none-any.whl", {"pkg/m.py": b"evil = True\n"})
    with pytest.raises(ValueError, match=r"SHA-256 is \w{64}, expected \w{64}; delete it and run again"):
        build(tmp_path, code_domain)
    assert not list((tmp_path / "out").glob("*"))


def test_finished_domain_is_kept_even_without_its_package(tmp_path, code_domain):
    _, built = build(tmp_path, code_domain)
    before = (tmp_path / "out/code.jsonl").stat()
    (tmp_path / "cache/pkg-1.0-py3-none-any.whl").unlink()
    record, built_again = build(tmp_path, code_domain)
    after = (tmp_path / "out/code.jsonl").stat()
    assert built and not built_again
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert record["documents"] == 5


def test_changed_options_file_or_version_are_built_again(tmp_path, code_domain, monkeypatch):
    build(tmp_path, code_domain)
    record, built = build(tmp_path, code_domain, max_bytes=130)
    assert built and record["documents"] == 2 and record["bytes"] <= 130
    with (tmp_path / "out/code.jsonl").open("a") as file:
        file.write("{}\n")
    assert build(tmp_path, code_domain, max_bytes=130)[1]
    monkeypatch.setattr("tools.corpus.build.FORMAT", 0)
    assert build(tmp_path, code_domain, max_bytes=130)[1]
    assert len(read_jsonl(tmp_path / "out/code.jsonl")) == 2


def test_limit_below_the_first_document_says_so(tmp_path, code_domain):
    with pytest.raises(ValueError, match="raise --max-bytes-per-domain"):
        build(tmp_path, code_domain, max_bytes=10)
    assert not list((tmp_path / "out").glob("*"))


def test_killed_run_leaves_no_file_to_select(tmp_path):
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom tools.corpus import build_corpus, load_table\n"
        "build_corpus(Path(sys.argv[1]), [load_table().domains['ja']], offline=True,"
        " on_domain=lambda domain: lambda count: os._exit(9))"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=50)
    assert killed.returncode == 9
    assert [path.name for path in tmp_path.iterdir()] == [".ja.jsonl.partial"]
    assert main(["--out", str(tmp_path), "--offline", "--domains", "ja"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.json", "ja.jsonl"]


def test_offline_the_default_domains_come_from_committed_text(tmp_path, capsys):
    assert (
        main(["--out", str(tmp_path), "--offline", "--max-bytes-per-domain", "200000", "--json", f"{tmp_path}/r"]) == 0
    )
    records = json.loads((tmp_path / "corpus.json").read_text())["domains"]
    assert json.loads((tmp_path / "r").read_text())["domains"] == records
    assert {name: record["fallback"] for name, record in records.items()} == {
        "wiki_en": True,
        "ja": True,
        "code_py": False,
        "scripture_en": True,
    }
    assert "novel" in records["wiki_en"]["description"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "FALLBACK" in line] == ["wiki_en", "ja", "scripture_en"]
    for name, record in records.items():
        rows = read_jsonl(tmp_path / f"{name}.jsonl")
        assert len(rows) == record["documents"] > 10
        assert 150_000 < sum(len(row["text"].encode()) for row in rows) == record["bytes"] <= 200_000
    japanese = "".join(row["text"] for row in read_jsonl(tmp_path / "ja.jsonl"))
    assert "吾輩は猫である。名前はまだ無い。" in japanese
    assert len(re.findall("[\u3040-\u30ff\u4e00-\u9fff]", japanese)) > 0.85 * len(japanese)


def test_same_bytes_whatever_the_hash_seed(tmp_path):
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-m", "tools.corpus", "--out", tmp_path / seed, "--offline", "--domains", "ja"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            timeout=50,
        )
    for name in ("ja.jsonl", "corpus.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_domain_out_of_reach_is_named_and_the_others_are_built(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--offline", "--domains", "wiki_fr", "scripture_en", "biomed"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --domains") and "wiki_fr" in error and "biomed" in error
    assert "scripture_en" not in error
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["scripture_en.jsonl"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--domains", "nope"], "nope: unknown; choose from wiki_en"),
        (["--max-bytes-per-domain", "-1"], "--max-bytes-per-domain -1: must be at least 0"),
    ],
)
def test_wrong_arguments_exit_with_2(tmp_path, capsys, argv, message):
    try:
        status = main(["--out", str(tmp_path), *argv])
    except SystemExit as stop:  # argparse
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_broken_record_is_an_error(tmp_path, capsys):
    (tmp_path / "corpus.json").write_text("[1]")
    assert main(["--out", str(tmp_path), "--offline", "--domains", "ja"]) == 2
    assert "corpus.json: not a corpus record" in capsys.readouterr().err


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Put a script named ``apt-get`` in front of PATH; the callable sets its shell lines."""

    def install(lines: str) -> None:
        script = tmp_path / "bin/apt-get"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\n{lines}\n")
        script.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return install


def test_client_fetches_the_pinned_version_once(tmp_path, client):
    deb = make_deb(tmp_path / "pkg_1.0_all.deb", {"./usr/a.html": b"<p>a</p>"})
    client(f'echo "$@" >> {tmp_path}/calls; cp {deb} .')
    package, cache = package_of(deb, "apt"), tmp_path / "cache"
    path = fetch(package, cache)
    assert path == fetch(package, cache) == cache / deb.name
    assert path.read_bytes() == deb.read_bytes()
    [call] = (tmp_path / "calls").read_text().splitlines()
    assert call.endswith("download pkg=1.0")
    assert [path.name for path in cache.iterdir()] == [deb.name]


def test_download_with_another_checksum_never_enters_the_cache(tmp_path, client):
    deb = make_deb(tmp_path / "pkg_1.0_all.deb", {"./usr/a.html": b"<p>a</p>"})
    client(f"echo evil > {deb.name}")
    with pytest.raises(ValueError, match=r"SHA-256 is .*--offline"):
        fetch(package_of(deb, "apt"), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("lines", "reason"),
    [("echo 'E: no route' >&2; exit 100", "apt: E: no route"), ("exit 0", r"apt fetched \[\], not pkg_1.0_all.deb")],
)
def test_failing_client_says_why(tmp_path, client, lines, reason):
    client(lines)
    package = package_of(make_deb(tmp_path / "pkg_1.0_all.deb", {}), "apt")
    with pytest.raises(UnavailableError, match=reason):
        fetch(package, tmp_path / "cache")


def test_prose_is_nfc_and_never_nfkc():
    assert clean_text("か\u3099ＡＢＣ１２３ﬁ", normalise=True) == "がＡＢＣ１２３ﬁ"
    [(code, _)] = clean_documents([Document("name = 'か\u3099'  # decomposed, and so it must stay", "m.py")], "code")
    assert "か\u3099" in code
    assert clean_text("\ufeffa\u00adb\x00\x7f\x1bc\r\nd\u2028e\tf", normalise=True) == "abc\nd\ne\tf"


def test_line_dedup_is_for_prose_only_and_spares_short_lines():
    line = "A line that is long enough to be boilerplate."
    documents = [Document(f"Heading\n{line}\nThe first text, which is long enough to keep.", "a")]
    documents += [Document(f"Heading\n{line}\nThe other text, which is long enough to keep.", "b")]
    prose = [text for text, _ in clean_documents(documents, "prose")]
    assert prose == [documents[0].text, documents[1].text.replace(f"{line}\n", "")]
    assert list(clean_documents(documents, "records")) == documents
    assert list(clean_documents(documents + documents, "code")) == documents
    assert list(clean_documents([Document("x" * 39, "short"), Document("x" * 40, "kept")], "code")) == [
        ("x" * 40, "kept")
    ]


def test_cut_is_between_documents_and_passes_over_too_large_ones():
    documents = [Document("あ" * 10, "30 bytes"), Document("b" * 40, "40 bytes"), Document("c" * 3, "3 bytes")]
    assert list(take_bytes(documents, None)) == documents
    assert list(take_bytes(documents, 73)) == documents
    assert list(take_bytes(documents, 72)) == documents[:2]
    assert list(take_bytes(documents, 69)) == [documents[0], documents[2]]
    assert list(take_bytes(documents, 33)) == documents[:1], "nine tenths are enough: read no further"


def test_string_constant_is_parsed_and_never_run(tmp_path):
    trap = tmp_path / "ran"
    module = (
        f"open({str(trap)!r}, 'w')\nTEXT = 'In the [very] beginning\\n\\nwas {'the word ' * 30}'\nother = 'short'\n"
    )
    [(_, text)] = string_constant([("m.py", module.encode())])
    assert text == f"In the very beginning\nwas {'the word ' * 30}".strip()
    assert not trap.exists()


def test_source_code_follows_its_coding_line():
    [(_, text)] = source_code([("m.py", "# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))])
    assert text.endswith("name = 'é'\n")


def test_html_keeps_the_wanted_visible_lines():
    page = """<html><head><title>no</title></head><body><nav>no</nav><div id="main"><h1>日本語の<span>見出し</span></h1>
    <div class="toc"><p>目次</p><br></div><p>本文は
    一行<p>次の段落</div><p>フッター</p><script>no</script></body></html>"""
    [(place, text)] = html_pages([("usr/share/doc/a.html", page.encode())], drop="toc", within_id="main")
    assert place == "share/doc/a.html"
    assert [line.strip() for line in text.split("\n") if line.strip()] == ["日本語の見出し", "本文は 一行", "次の段落"]
    mixed = "<p>English only</p><p>日本語 and English</p>".encode()
    [(_, text)] = html_pages([("a.html", mixed)], script=("[\u3040-\u30ff\u4e00-\u9fff]", 0.15))
    assert text.strip() == "日本語 and English"


def test_metamath_pairs_comments_with_statements_and_drops_proofs():
    database = b"$( Header. $)\n $( A law.  (Contributed by X (Y), 1-Jan-2000.) $)\n law $p |- ( A -> A ) $= proof $.\n"
    assert list(metamath([("set.mm", database)])) == [("law", "A law.\nlaw |- ( A -> A )")]


def test_ontology_is_read_in_memory(tmp_path):
    with sqlite3.connect(tmp_path / "GO.sqlite") as database:
        database.execute("CREATE TABLE go_term (go_id, term, definition)")
        database.execute("INSERT INTO go_term VALUES ('GO:2', 'no text', NULL), ('GO:1', 'cell', 'A unit of life.')")
    assert list(ontology([("GO.sqlite", (tmp_path / "GO.sqlite").read_bytes())])) == [("GO:1", "cell: A unit of life.")]


def test_r_novels_are_cut_into_chapters():
    def vector(strings: list[str]) -> bytes:
        encoded = b"".join(struct.pack(">Ii", 0x40009, len(string)) + string.encode() for string in strings)
        return struct.pack(">Ii", 16, len(strings)) + encoded

    lines = ["TITLE", "", "By", "", "VOLUME I", "", "CHAPTER I", "", "One", "line.", "", "CHAPTER II", "", "End."]
    record = b"X\n" + vector(["short"]) + vector(lines)
    content = struct.pack(">I", len(record)) + zlib.compress(record)
    assert [text for _, text in r_novels([("a.rdb", content)])] == [
        "TITLE\nBy\nVOLUME I\nCHAPTER I\nOne line.",
        "CHAPTER II\nEnd.",
    ]


def test_table_is_consistent():
    table = load_table()
    parts = [part for domain in table.domains.values() for part in (*domain.parts, *domain.fallback)]
    assert {part.reader for part in parts} <= set(READERS)
    assert {domain.kind for domain in table.domains.values()} == {"prose", "records", "code"}
    assert set(table.default) <= set(table.domains)
    assert not re.search(r"https?:|\.(org|com|io|net)\b", TABLE_PATH.read_text("utf-8")), "clients know their hosts"
    committed = {part.package.file for part in parts if part.package.client == "committed"}
    assert committed == {path.name for path in FALLBACK_DIR.iterdir()}
    assert sum(path.stat().st_size for path in FALLBACK_DIR.iterdir()) <= 1_200_000
    for path in FALLBACK_DIR.iterdir():
        text = path.read_text("utf-8")
        assert text == unicodedata.normalize("NFC", text) and "\r" not in text
    for part in parts:
        assert part.package.licence and part.package.attribution
        assert part.package.client == "interpreter" or re.fullmatch(r"[0-9a-f]{64}", part.package.sha256)
