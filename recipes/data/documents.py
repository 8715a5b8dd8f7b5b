"""Labelled text files -> documents.

The name of a file without its extension is its domain. Formats: `.jsonl` and `.jsonl.gz` (one object per line, the text
under a key), `.txt` (a document ends at a blank line) and `.parquet` (one string column).

Files are read as streams: a small file may unpack to any amount, so that memory is bounded by the longest line or document
that is accepted, not by what a file holds.
"""

import contextlib
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

SUFFIXES = (".jsonl.gz", ".jsonl", ".txt", ".parquet")
# Tokenizers need 60 (sentencepiece) to 250 (Hugging Face) times the bytes of a document: about 1 GB at most.
MAX_DOCUMENT_BYTES = 4 << 20
_PARQUET_ROWS = 16  # decoded at once: equal values are stored once and come out as many
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


def read_documents(
    path: Path, text_key: str = "text", report: Report | None = None, max_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[str]:
    """The documents of one file, in order, empty ones included.

    `report` receives the number of bytes of the file read so far, now and then. Raises ValueError naming the file and
    line (or row) of whatever is not text, and of a line or document of more than `max_bytes` bytes.
    """
    report = report or (lambda position: None)
    match _suffix(path):
        case ".parquet":
            yield from _read_parquet(path, text_key, report, max_bytes)
        case ".txt":
            yield from _paragraphs(path, _lines(path, report, max_bytes), max_bytes)
        case _:
            for number, line in _lines(path, report, max_bytes):
                if line.strip():
                    yield _text_of(line, text_key, f"{path}:{number}")


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def _too_long(where: str | Path, what: str, max_bytes: int) -> ValueError:
    return ValueError(
        f"{where}: {what} has more than {max_bytes:,} bytes; divide it, or raise --max-document-bytes (a tokenizer "
        "needs up to 250 bytes of memory for one of text)"
    )


def _lines(path: Path, report: Report, max_bytes: int) -> Iterator[tuple[int, str]]:
    """(line number from 1, line with its newline) of a plain or gzipped UTF-8 file."""
    with contextlib.ExitStack() as stack:
        raw: BinaryIO = stack.enter_context(path.open("rb"))
        stream = stack.enter_context(gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
        number = 0
        try:
            for number, line in enumerate(iter(lambda: stream.readline(max_bytes + 1), b""), start=1):
                if len(line) > max_bytes:
                    raise _too_long(f"{path}:{number}", "this line", max_bytes)
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
    except (ValueError, RecursionError) as error:
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


def _paragraphs(path: Path, lines: Iterator[tuple[int, str]], max_bytes: int) -> Iterator[str]:
    block: list[str] = []
    size = 0
    for number, line in lines:
        if line.strip():
            block.append(line)
            size += len(line.encode())
            if size > max_bytes:
                first = number - len(block) + 1
                raise _too_long(f"{path}:{first}", "the document from here to the next blank line", max_bytes)
        elif block:
            yield "".join(block).rstrip("\r\n")
            block, size = [], 0
    if block:
        yield "".join(block).rstrip("\r\n")


def _read_parquet(path: Path, text_key: str, report: Report, max_bytes: int) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20) as file:
            names, num_rows = file.schema_arrow.names, max(1, file.metadata.num_rows)
            if names.count(text_key) != 1:
                raise ValueError(f'{path}: no column "{text_key}", it has {", ".join(names)}; name one with --text-key')
            kind = file.schema_arrow.field(text_key).type
            _check_average(path, file.metadata, text_key, max_bytes)
            size = path.stat().st_size
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[text_key]):
                for value in batch.column(0):
                    row += 1
                    if not value.is_valid:
                        yield ""
                        continue
                    if not isinstance(value, pyarrow.StringScalar | pyarrow.LargeStringScalar):
                        raise ValueError(f'{path}: row {row} of column "{text_key}" is {kind}, not text')
                    if value.as_buffer().size > max_bytes:
                        raise _too_long(path, f"row {row}", max_bytes)
                    yield value.as_py()
                report(size * row // num_rows)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: damaged Parquet file (after row {row}: {error.reason})") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged Parquet file ({' '.join(str(error).split())})") from error


def _check_average(path: Path, metadata: Any, text_key: str, max_bytes: int) -> None:
    """Refuse values that are too long by what the file says of them, before any of them is unpacked."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema == text_key)
        if size > max_bytes * max(1, group.num_rows) + (1 << 20):  # headers and dictionaries take some of it
            raise _too_long(path, f'on average a value of column "{text_key}"', max_bytes)
