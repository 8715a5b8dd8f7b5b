"""dataset.json: what an indexed data set says of itself, written once and believed only where it agrees with the files.

`write_manifest` adds the digest of all the rest, so that `read_manifest` refuses a file that was changed afterwards. Files of
format 1, which had neither digests nor the sizes of the text, are still read.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.data.indexed import AGAIN, INTEGER_DTYPES, regular_size
from recipes.files import parse_json, read_small

SPLITS = ("train", "valid", "test")
MANIFEST = "dataset.json"
FORMAT_VERSION = 2
_DOMAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")  # names become file names
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_SHA256 = re.compile("[0-9a-f]{64}")
_MAX_BYTES = 1 << 26
_MAX_COUNT = 1 << 48


@dataclass(frozen=True)
class SplitInfo:
    """Size of one split of one domain, and the SHA-256 of its files by suffix ("bin", "idx"); None in older data sets.

    text_bytes: UTF-8 bytes of the raw text; None where they were not counted. Those of each document are in a file whose
    SHA-256 is text_digest.
    """

    documents: int
    tokens: int
    content: dict[str, str] | None = None
    text_bytes: int | None = None
    text_digest: str | None = None


@dataclass(frozen=True)
class Manifest:
    """A dataset.json whose values are of the right types and in range.

    tokenizer_file: name of the tokenizer in the folder, None where there is none; tokenizer_files: SHA-256 of it and of the
    files that name its roles.
    """

    format_version: int
    tokenizer_fingerprint: str
    tokenizer_file: str | None
    tokenizer_files: dict[str, str]
    vocab_size: int
    eod: int
    dtype: np.dtype
    domains: dict[str, dict[str, SplitInfo]]
    inputs: Mapping[str, Any]


def write_manifest(
    folder: Path, tokenizer: Mapping[str, Any], dtype: np.dtype, domains: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Writes FOLDER/dataset.json and returns its contents. `domains`: name -> {"splits": split -> IndexedWriter.finish()}."""
    values: dict[str, Any] = {"format_version": FORMAT_VERSION, "tokenizer": dict(tokenizer), **more}
    values |= {"dtype": np.dtype(dtype).name, "domains": dict(domains)}
    values["digest"] = _digest(values)
    (folder / MANIFEST).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return values


def read_values(folder: Path) -> dict[str, Any]:
    """The JSON object in FOLDER/dataset.json, unchecked. Raises ValueError naming the file."""
    path = folder / MANIFEST
    regular_size(path, "the folder is not an indexed data set, make one with `python -m tools.index`")
    raw = read_small(path, _MAX_BYTES)
    try:
        values = parse_json(raw)
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); {AGAIN}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: damaged (a JSON object is expected, not {type(values).__name__}); {AGAIN}")
    return values


def read_manifest(folder: Path) -> Manifest:
    """Reads FOLDER/dataset.json. Raises ValueError naming it for any value that is missing, of a wrong type or out of range.

    The digest is not compared here (`check_digest`), so that a value which contradicts the files is reported as such.
    """
    path, values = folder / MANIFEST, read_values(folder)
    version = values.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(f"{path}: format version {version!r:.40}, this reader knows 1 to {FORMAT_VERSION}; {AGAIN}")
    try:
        return _parse(values, version)
    except KeyError as error:
        raise ValueError(f"{path}: damaged ({error} is missing); {AGAIN}") from error
    except _DamagedError as error:
        raise ValueError(f"{path}: damaged ({error}); {AGAIN}") from error


def check_digest(folder: Path) -> None:
    """Raises ValueError when FOLDER/dataset.json is not as it was written."""
    values = read_values(folder)
    recorded = values.pop("digest", None)
    if (values.get("format_version") == 1) == (recorded is None) and recorded in (None, _digest(values)):
        return
    raise ValueError(
        f"{folder / MANIFEST}: was changed after it was written (its digest is that of other values); {AGAIN}"
    )


def _digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of the values, whatever their order and layout in the file."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class _DamagedError(Exception):
    """A value of dataset.json is not what it must be."""


def _parse(values: dict[str, Any], version: int) -> Manifest:
    tokenizer = _object(values["tokenizer"], "tokenizer")
    dtypes = {np.dtype(dtype).name: np.dtype(dtype) for dtype in INTEGER_DTYPES.values()}
    if not isinstance(values["dtype"], str) or values["dtype"] not in dtypes:
        raise _DamagedError(f"dtype={values['dtype']!r:.40} is none of {', '.join(dtypes)}")
    vocab_size, eod = _count(tokenizer["vocab_size"], "vocab_size"), _count(tokenizer["eod"], "eod")
    if eod >= vocab_size:
        raise _DamagedError(f"eod={eod} is not in a vocabulary of {vocab_size}")
    if not isinstance(tokenizer["fingerprint"], str):
        raise _DamagedError(f"fingerprint={tokenizer['fingerprint']!r:.40} is not text")
    file, files = _tokenizer_files(tokenizer, version)
    domains = {}
    for name, domain in sorted(_object(values["domains"], "domains").items()):
        if not _DOMAIN.fullmatch(name):
            raise _DamagedError(f"domain name {name!r:.80}, legal are up to 200 letters, digits, '_', '-' and '.'")
        splits = _object(_object(domain, name)["splits"], f"{name}.splits")
        domains[name] = {split: _split(splits[split], f"{name}.{split}", version) for split in SPLITS}
    if not domains:
        raise _DamagedError("it has no domains")
    return Manifest(
        format_version=version,
        tokenizer_fingerprint=tokenizer["fingerprint"],
        tokenizer_file=file,
        tokenizer_files=files,
        vocab_size=vocab_size,
        eod=eod,
        dtype=dtypes[values["dtype"]],
        domains=domains,
        inputs={
            name: _object(file, f"inputs.{name}") for name, file in _object(values.get("inputs", {}), "inputs").items()
        },
    )


def _tokenizer_files(tokenizer: dict[str, Any], version: int) -> tuple[str | None, dict[str, str]]:
    """Name of the tokenizer file, and the digests of all that belong to it: format 1 has only the fingerprint."""
    file = tokenizer.get("file") if version == 1 else tokenizer["file"]
    if file is None or (version == 1 and file == "none"):
        return None, {}
    files = {file: tokenizer["fingerprint"]} if version == 1 else _object(tokenizer["files"], "files")
    for name, digest in files.items():
        if not isinstance(name, str) or not _FILE.fullmatch(name) or not _is_sha256(digest):
            raise _DamagedError(f"the tokenizer's file {name!r:.80} has SHA-256 {digest!r:.80}")
    if file not in files or files[file] != tokenizer["fingerprint"]:
        raise _DamagedError(f"the tokenizer's file {file!r:.80} is not the one with its fingerprint")
    return file, files


def _split(value: Any, where: str, version: int) -> SplitInfo:
    split = _object(value, where)
    content = split.get("content") if version == 1 else split["content"]
    if content is not None and (
        sorted(_object(content, where)) != ["bin", "idx"] or not all(map(_is_sha256, content.values()))
    ):
        raise _DamagedError(f"{where}: content={content!r:.80} is not the SHA-256 of bin and idx")
    if content is None and version > 1:
        raise _DamagedError(f"{where}: content=None is not the SHA-256 of bin and idx")
    text = None if version == 1 else split["text"]
    if text is not None and not _is_sha256(_object(text, f"{where}.text")["sha256"]):
        raise _DamagedError(f"{where}: text={text!r:.80} has no SHA-256")
    return SplitInfo(
        documents=_count(split["documents"], f"{where}.documents"),
        tokens=_count(split["tokens"], f"{where}.tokens"),
        content=content,
        text_bytes=None if text is None else _count(text["bytes"], f"{where}.text.bytes"),
        text_digest=None if text is None else text["sha256"],
    )


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _DamagedError(f"{where} is {type(value).__name__}, not an object")
    return value


def _count(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise _DamagedError(f"{where}={value!r:.40} is not a count")
    return value


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None
