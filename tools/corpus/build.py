"""Build labelled corpora: one JSON-lines file per domain and ``corpus.json``, the record of what is in them.

A domain is written under a hidden temporary name, then renamed, then recorded. A domain whose record matches its
inputs, options and file is not built again. The same inputs give the same bytes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from recipes.files import parse_json
from tools.corpus.archives import file_sha256, members_sha256, read_members
from tools.corpus.clean import Document, clean_documents, take_bytes
from tools.corpus.fetch import UnavailableError, fetch, standard_library
from tools.corpus.readers import READERS
from tools.corpus.table import Domain, Package, Part, Table

FORMAT = 1  # raise it when readers or cleaning change, so that no older file passes for a finished one
DEFAULT_MAX_BYTES = 4_000_000

Record = dict[str, Any]
OnBytes = Callable[[int], None]
Fetcher = Callable[[Package], Path]


@dataclass(frozen=True)
class Edition:
    """One way to make a domain: its parts with the SHA-256 of each input, pinned or taken from what is read.

    ``missing`` says why this is the fallback; empty: it is not.
    """

    kind: str
    description: str
    parts: tuple[tuple[Part, str], ...]
    max_bytes: int | None
    missing: str = ""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all that decides the bytes of the domain's file."""
        parts = [(asdict(part), sha256) for part, sha256 in self.parts]
        return hashlib.sha256(json.dumps([self.kind, parts, self.max_bytes], sort_keys=True).encode()).hexdigest()


def build_corpus(
    out: Path,
    domains: Sequence[Domain],
    *,
    offline: bool = False,
    max_bytes: int | None = DEFAULT_MAX_BYTES,
    cache: Path | None = None,
    on_domain: Callable[[Domain], OnBytes] = lambda domain: lambda count: None,
    on_done: Callable[[str, Record, bool], None] = lambda name, record, built: None,
) -> dict[str, Record]:
    """Write ``out/<domain>.jsonl`` and ``out/corpus.json``; return the records of ``domains`` by name.

    Args:
        out: folder of the corpus; records of other domains in it are kept.
        offline: use no client, only the cache and what is committed.
        max_bytes: UTF-8 bytes of text per domain, cut between documents; None: everything.
        cache: folder of downloaded packages; default ``out/.packages``.
        on_domain: called before a domain is fetched and built; the callable it returns gets the bytes of each document.
        on_done: called with name, record and whether the domain was built in this run.

    Raises:
        ValueError: a checksum differs, or domains without fallback cannot be had (raised after the others are built).
    """
    out.mkdir(parents=True, exist_ok=True)
    records = _read_records(out)
    fetcher = partial(fetch, cache=cache or out / ".packages", offline=offline)
    unavailable: list[str] = []
    for domain in domains:
        on_bytes = on_domain(domain)
        try:
            record, built = _build_domain(out, domain, records.get(domain.name), fetcher, max_bytes, on_bytes)
        except UnavailableError as error:
            unavailable.append(f"{domain.name} ({error})")
            continue
        if built:
            records[domain.name] = record
            _write_atomically(out / "corpus.json", json.dumps({"format": FORMAT, "domains": records}, indent=1) + "\n")
        on_done(domain.name, record, built)
    if unavailable:
        raise ValueError(
            f"--domains: no source within reach and no committed text for {', '.join(unavailable)}; leave "
            f"{'it' if len(unavailable) == 1 else 'them'} out, or run where the package clients work"
        )
    return {domain.name: records[domain.name] for domain in domains}


def _build_domain(
    out: Path, domain: Domain, old: Record | None, fetcher: Fetcher, max_bytes: int | None, on_bytes: OnBytes
) -> tuple[Record, bool]:
    """Return the domain's record and whether its file was written; a finished file needs no package any more."""
    path = out / f"{domain.name}.jsonl"
    edition = Edition(domain.kind, domain.description, _with_sha256(domain.parts), max_bytes)
    if old is not None and _is_finished(path, old, edition):
        return old, False
    try:
        paths = [fetcher(part.package) for part in domain.parts]
    except UnavailableError as error:
        if not domain.fallback:
            raise
        parts = _with_sha256(domain.fallback)
        edition = Edition(domain.kind, domain.fallback_description, parts, max_bytes, missing=str(error))
        if old is not None and _is_finished(path, old, edition):
            return old, False
        paths = [fetcher(part.package) for part in domain.fallback]
    documents = clean_documents(_read_documents(edition, paths), domain.kind)
    written = _write_documents(path, take_bytes(documents, max_bytes), on_bytes)
    return {**_describe(edition), **written, "fingerprint": edition.fingerprint}, True


def _with_sha256(parts: Sequence[Part]) -> tuple[tuple[Part, str], ...]:
    """Pair each part with its pinned SHA-256, or with that of the interpreter's files it reads."""
    return tuple(
        (part, part.package.sha256 or members_sha256(read_members(standard_library(), part.members))) for part in parts
    )


def _is_finished(path: Path, record: Record, edition: Edition) -> bool:
    return (
        record["fingerprint"] == edition.fingerprint and path.is_file() and file_sha256(path) == record["jsonl_sha256"]
    )


def _read_documents(edition: Edition, paths: Sequence[Path]) -> Iterator[Document]:
    for (part, _), path in zip(edition.parts, paths, strict=True):
        members = read_members(path, part.members)
        for place, text in READERS[part.reader](members, **part.options):
            yield Document(text, f"{part.package.pin}:{place}")


def _write_documents(path: Path, documents: Iterable[Document], on_bytes: OnBytes) -> Record:
    unfinished = path.with_name(f".{path.name}.partial")
    count = total = 0
    try:
        with unfinished.open("w", encoding="utf-8", newline="\n") as file:
            for text, source in documents:
                file.write(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
                size = len(text.encode())
                count, total = count + 1, total + size
                on_bytes(size)
            file.flush()
            os.fsync(file.fileno())
        if not count:
            raise ValueError(f"{path.stem}: no document fits; raise --max-bytes-per-domain (0: everything)")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return {"documents": count, "bytes": total, "jsonl_sha256": file_sha256(path)}


def _describe(edition: Edition) -> Record:
    packages = {part.package: sha256 for part, sha256 in edition.parts}
    return {
        "description": edition.description,
        "fallback": bool(edition.missing),
        **({"fallback_reason": edition.missing} if edition.missing else {}),
        "licence": "; ".join(dict.fromkeys(package.licence for package in packages)),
        "max_bytes": edition.max_bytes,
        "inputs": [{**asdict(package), "sha256": sha256} for package, sha256 in packages.items()],
    }


def _read_records(out: Path) -> dict[str, Record]:
    """The records of domains whose files are still there; none where ``corpus.json`` has another format."""
    path = out / "corpus.json"
    if not path.exists():
        return {}
    try:
        content = parse_json(path.read_bytes())
        if content["format"] != FORMAT:
            return {}
        records = {name: record for name, record in content["domains"].items() if (out / f"{name}.jsonl").is_file()}
        if not all(
            {"fingerprint", "jsonl_sha256", "documents", "bytes"} <= record.keys() for record in records.values()
        ):
            raise KeyError("fingerprint, jsonl_sha256, documents, bytes")
        return records
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{path}: not a corpus record ({error!r}); delete it and run again") from error


def _write_atomically(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.partial")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def select(table: Table, names: Sequence[str]) -> list[Domain]:
    """The named domains, each once, in the order given; the default ones where no name is given."""
    unknown = sorted(set(names) - set(table.domains))
    if unknown:
        raise ValueError(f"--domains {' '.join(unknown)}: unknown; choose from {' '.join(table.domains)}")
    return [table.domains[name] for name in dict.fromkeys(names or table.default)]
