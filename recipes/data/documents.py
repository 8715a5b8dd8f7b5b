"""Labelled text files -> documents.

The name of a file without its extension is its domain. Formats: `.jsonl` and `.jsonl.gz` (one object per line, the text
under a key), `.txt` (a document ends at a blank line) and `.parquet` (one string column).
"""

import contextlib
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

SUFFIXES = (".jsonl.gz", ".jsonl", ".txt", ".parquet")
Report = Callable[[int], None]


def find_domains(inputs: Sequence[str | Path]) -> dict[str, Path]:
    """Domain name -> file, sorted by name, for the files named in `inputs` and those lying directly in a folder there.

    Characters outside [A-Za-z0-9_.-] become "_". Raises ValueError for a missing path, an unknown format, two files
    with one domain name, or no file at all.
    """
    domains: dict[str, Path] = {}
    for path in map(Path, inputs):
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.is_file() and _suffix(file))
        elif path.is_file() and _suffix(path):
            files = [path]
        elif path.is_file():
            raise ValueError(f"{path}: unknown format; use one of {', '.join(SUFFIXES)}")
        else:
            raise ValueError(f"{path}: no such file or folder")
        for file in files:
            stem = file.name.removesuffix(_suffix(file) or "")
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", stem).lstrip(".") or "_"
            if name in domains:
                raise ValueError(f"domain {name!r} comes from both {domains[name]} and {file}; rename one of them")
            domains[name] = file
    if not domains:
        listed = ", ".join(map(str, inputs))
        raise ValueError(f"{listed}: no text found; a domain is a file <domain>{'|'.join(SUFFIXES)}")
    return dict(sorted(domains.items()))


def read_documents(path: Path, text_key: str = "text", report: Report | None = None) -> Iterator[str]:
    """The documents of one file, in order, empty ones included.

    `report` receives the number of bytes of the file read so far, now and then. Raises ValueError naming the file and
    line (or row) of whatever is not text.
    """
    report = report or (lambda position: None)
    match _suffix(path):
        case ".parquet":
            yield from _read_parquet(path, text_key, report)
        case ".txt":
            yield from _paragraphs(_lines(path, report))
        case _:
            for number, line in _lines(path, report):
                if line.strip():
                    yield _text_of(line, text_key, f"{path}:{number}")


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def _lines(path: Path, report: Report) -> Iterator[tuple[int, str]]:
    """(line number from 1, line with its newline) of a plain or gzipped UTF-8 file."""
    with contextlib.ExitStack() as stack:
        raw: BinaryIO = stack.enter_context(path.open("rb"))
        stream = stack.enter_context(gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
        number = 0
        try:
            for number, line in enumerate(stream, start=1):
                report(raw.tell())
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start} of the line)"
            ) from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: damaged gzip data after line {number} ({error})") from error


def _text_of(line: str, text_key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not a JSON object ({error})") from error
    if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
        raise ValueError(f'{where}: expected an object with a string under "{text_key}"; name the key with --text-key')
    return _valid(record[text_key], where)


def _valid(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: a lone surrogate at character {error.start} is not text; remove it") from error
    return text


def _paragraphs(lines: Iterator[tuple[int, str]]) -> Iterator[str]:
    block: list[str] = []
    for _, line in lines:
        if line.strip():
            block.append(line)
        elif block:
            yield "".join(block).rstrip("\r\n")
            block = []
    if block:
        yield "".join(block).rstrip("\r\n")


def _read_parquet(path: Path, text_key: str, report: Report) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names, num_rows = file.schema_arrow.names, max(1, file.metadata.num_rows)
            if text_key not in names:
                raise ValueError(f'{path}: no column "{text_key}", it has {", ".join(names)}; name one with --text-key')
            size, row = path.stat().st_size, 0
            for batch in file.iter_batches(batch_size=512, columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if text is not None and not isinstance(text, str):
                        raise ValueError(f'{path}: row {row} of column "{text_key}" is {type(text).__name__}, not text')
                    yield text or ""
                report(size * row // num_rows)
    except (pyarrow.ArrowInvalid, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: damaged Parquet file ({error})") from error
