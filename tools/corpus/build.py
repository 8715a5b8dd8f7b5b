"""Build labelled corpora: one JSON-lines file per domain and ``corpus.json``, the record of what is in them.

A domain is written under a hidden temporary name, then renamed, then recorded. A domain whose record matches its
inputs, options and file is not built again. The same inputs give the same bytes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tools.corpus.archives import file_sha256, members_sha256, read_members
from tools.corpus.clean import Document, clean_documents, take_bytes
from tools.corpus.fetch import UnavailableError, fetch
from tools.corpus.readers import READERS
from tools.corpus.table import Domain, Part, Table

FORMAT = 1  # raise it when readers or cleaning change, so that no older file passes for a finished one
DEFAULT_MAX_BYTES = 4_000_000

Record = dict[str, Any]
OnBytes = Callable[[int], None]


class Input(NamedTuple):
    """One part of a domain, where its package lies on this machine, and the SHA-256 of what is read from it."""

    part: Part
    path: Path
    sha256: str


@dataclass(frozen=True)
class Inputs:
    """What a domain is made of on this machine; ``missing`` says why it is the fallback (empty: it is not)."""

    parts: tuple[Input, ...]
    missing: str = ""


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
    unavailable: list[str] = []
    for domain in domains:
        on_bytes = on_domain(domain)
        try:
            inputs = resolve(domain, cache or out / ".packages", offline)
        except UnavailableError as error:
            unavailable.append(f"{domain.name} ({error})")
            continue
        fingerprint = _fingerprint(domain, inputs, max_bytes)
        built = not _is_finished(out, domain.name, records.get(domain.name), fingerprint)
        if built:
            written = _write_documents(out / f"{domain.name}.jsonl", domain, inputs, max_bytes, on_bytes)
            records[domain.name] = {**_describe(domain, inputs, max_bytes), **written, "fingerprint": fingerprint}
            _write_atomically(out / "corpus.json", json.dumps({"format": FORMAT, "domains": records}, indent=1) + "\n")
        on_done(domain.name, records[domain.name], built)
    if unavailable:
        raise ValueError(
            f"--domains: no source within reach and no committed text for {', '.join(unavailable)}; leave "
            f"{'it' if len(unavailable) == 1 else 'them'} out, or run where the package clients work"
        )
    return {domain.name: records[domain.name] for domain in domains}


def resolve(domain: Domain, cache: Path, offline: bool) -> Inputs:
    """Fetch the parts of a domain, or those of its fallback where one of them cannot be had."""
    try:
        return Inputs(tuple(_input(part, cache, offline) for part in domain.parts))
    except UnavailableError as error:
        if not domain.fallback:
            raise
        return Inputs(tuple(_input(part, cache, offline) for part in domain.fallback), missing=str(error))


def _input(part: Part, cache: Path, offline: bool) -> Input:
    path = fetch(part.package, cache, offline)
    return Input(part, path, part.package.sha256 or members_sha256(read_members(path, part.members)))


def read_documents(inputs: Inputs) -> Iterator[Document]:
    """The raw documents of all parts, in order."""
    for part, path, _ in inputs.parts:
        members = read_members(path, part.members)
        for place, text in READERS[part.reader](members, **part.options):
            yield Document(text, f"{part.package.pin}:{place}")


def _fingerprint(domain: Domain, inputs: Inputs, max_bytes: int | None) -> str:
    """SHA-256 over all that decides the bytes of a domain's file."""
    parts = [(asdict(part), sha256) for part, _, sha256 in inputs.parts]
    return hashlib.sha256(json.dumps([FORMAT, domain.kind, parts, max_bytes], sort_keys=True).encode()).hexdigest()


def _is_finished(out: Path, name: str, record: Record | None, fingerprint: str) -> bool:
    path = out / f"{name}.jsonl"
    return (
        record is not None
        and record["fingerprint"] == fingerprint
        and path.is_file()
        and file_sha256(path) == record["jsonl_sha256"]
    )


def _write_documents(path: Path, domain: Domain, inputs: Inputs, max_bytes: int | None, on_bytes: OnBytes) -> Record:
    partial = path.with_name(f".{path.name}.partial")
    documents = total = 0
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            for text, source in take_bytes(clean_documents(read_documents(inputs), domain.kind), max_bytes):
                file.write(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
                size = len(text.encode())
                documents, total = documents + 1, total + size
                on_bytes(size)
            file.flush()
            os.fsync(file.fileno())
        if not documents:
            raise ValueError(f"{domain.name}: no document fits into {max_bytes} bytes; raise --max-bytes-per-domain")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return {"documents": documents, "bytes": total, "jsonl_sha256": file_sha256(path)}


def _describe(domain: Domain, inputs: Inputs, max_bytes: int | None) -> Record:
    packages = {part.package: sha256 for part, _, sha256 in inputs.parts}
    return {
        "description": domain.fallback_description if inputs.missing else domain.description,
        "fallback": bool(inputs.missing),
        **({"fallback_reason": inputs.missing} if inputs.missing else {}),
        "licence": "; ".join(dict.fromkeys(package.licence for package in packages)),
        "max_bytes": max_bytes,
        "inputs": [{**asdict(package), "sha256": sha256} for package, sha256 in packages.items()],
    }


def _read_records(out: Path) -> dict[str, Record]:
    """The records of domains whose files are still there; none where ``corpus.json`` has another format."""
    path = out / "corpus.json"
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return {}
        return {name: record for name, record in content["domains"].items() if (out / f"{name}.jsonl").is_file()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a corpus record ({error!r}); delete it and run again") from error


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def select(table: Table, names: Sequence[str]) -> list[Domain]:
    """The named domains, each once, in the order given; the default ones where no name is given."""
    unknown = sorted(set(names) - set(table.domains))
    if unknown:
        raise ValueError(f"--domains {' '.join(unknown)}: unknown; choose from {' '.join(table.domains)}")
    return [table.domains[name] for name in dict.fromkeys(names or table.default)]
