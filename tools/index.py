"""Labelled text -> token files: one Megatron .bin/.idx pair per domain and split, dataset.json, and the tokenizer.

Each input file is one domain, named after the file: <domain>.jsonl, .jsonl.gz (one JSON object per line), .parquet (a
string column) or .txt (a document ends at a blank line). Every document becomes its ids and one end-of-document id.

Splits are made of whole documents, drawn by a hash of the seed and the text until each split has its share of the
domain's characters. Equal documents go to one split, in whatever domain they are; the order of documents and the number
of workers do not matter.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.data.dataset import SPLITS, copy_tokenizer, load_dataset, tokenizer_entry, write_manifest
from recipes.data.documents import MAX_DOCUMENT_BYTES, Report, find_domains, read_documents
from recipes.data.indexed import IndexedWriter, megatron_indexed_dataset
from recipes.data.manifest import FORMAT_VERSION, MANIFEST, read_values
from recipes.data.roles import ROLE_FILES
from recipes.data.tokenizer import Tokenizer, load_tokenizer
from tools.arguments import Parser, file_name, file_path, integer, refuse, unicode_text

# Text handed to the tokenizer at once: enough to keep its threads busy, little enough to hold in memory.
_BATCH_CHARACTERS = 2_000_000
# What a data set consists of; a folder with anything else is never overwritten.
_OURS = re.compile(
    "|".join([r".*\.(bin|idx|bytes)", r"dataset\.json", r"tokenizer\.(model|json)", *map(re.escape, ROLE_FILES)])
)
_EPILOG = """examples:
  python -m tools.index --input data/corpus --tokenizer data/tokenizer/tokenizer.model --out data/indexed
  python -m tools.index --input books.parquet notes.txt --tokenizer tokenizer.json --split 98,1,1 --out data/mine
  python -m tools.index --verify data/mine
"""


@dataclass(frozen=True)
class Options:
    """What determines the output: the same options on the same files give the same bytes."""

    split: tuple[float, float, float]
    seed: int
    text_key: str


def parse_split(text: str) -> tuple[float, float, float]:
    """Three non-negative weights "train,valid,test". Raises ValueError for anything else."""
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    if len(parts) != len(SPLITS) or not min(parts) >= 0 or not 0 < sum(parts) < float("inf"):
        raise ValueError(f"--split {text}: give three numbers >= 0 for train,valid,test, for example 0.96,0.02,0.02")
    train, valid, test = parts
    return train, valid, test


@dataclass(frozen=True)
class Texts:
    """Key (hash of seed and text, uint64) and size (characters) of each document of a domain, in file order."""

    keys: np.ndarray
    sizes: np.ndarray


def survey(documents: Iterable[str], seed: int) -> Texts:
    """Keys and sizes of all documents, empty ones included."""
    salt, keys, sizes = str(seed).encode(), bytearray(), array("q")
    for text in documents:
        keys += hashlib.blake2b(text.encode(), digest_size=8, key=salt).digest()
        sizes.append(len(text))
    return Texts(np.frombuffer(keys, dtype="<u8"), np.frombuffer(sizes, dtype=np.int64))


def assign_splits(domains: Mapping[str, Texts], split: tuple[float, float, float]) -> dict[str, np.ndarray]:
    """Index into SPLITS of each document of each domain.

    The documents of a domain stand in the order of their keys on a line of its characters; where a document's middle
    falls decides, so that each share is met to within a document. A text known from an earlier domain keeps its split.
    """
    borders = np.array([split[0], split[0] + split[1]]) / sum(split)
    known_keys, known_splits = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    assigned = {}
    for name, texts in domains.items():
        keys, inverse = np.unique(texts.keys, return_inverse=True)
        sizes = np.bincount(inverse, weights=texts.sizes, minlength=len(keys))
        middles = (np.cumsum(sizes) - sizes / 2) / max(1, sizes.sum())
        splits = np.searchsorted(borders, middles, side="right")
        _, here, there = np.intersect1d(keys, known_keys, assume_unique=True, return_indices=True)
        splits[here] = known_splits[there]
        known_keys, first = np.unique(np.concatenate([known_keys, keys]), return_index=True)
        known_splits = np.concatenate([known_splits, splits])[first]
        assigned[name] = splits[inverse]
    return assigned


def index(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer,
    out: Path,
    options: Options,
    *,
    workers: int = 1,
    overwrite: bool = False,
    report: Report = lambda num_bytes: None,
    max_bytes: int = MAX_DOCUMENT_BYTES,
) -> tuple[dict[str, Any], bool]:
    """Writes the data set and returns (contents of dataset.json, whether anything had to be done).

    OUT appears at once and complete, or not at all. `report` receives the bytes read so far; each input is read
    twice. Raises ValueError for bad input, a line or document of more than `max_bytes`, a tokenizer without an
    end-of-document id or with one that text can spell, and an OUT that holds anything but this very data set (or, with
    `overwrite`, anything but a data set). One of an earlier format is written again.
    """
    domains = find_domains(inputs)
    entry = tokenizer_entry(tokenizer)
    more = {
        "options": {**asdict(options), "split": list(options.split)},
        "inputs": {name: _identity(path) for name, path in domains.items()},
    }
    existing = _existing(out, overwrite)
    if existing is not None and not overwrite:
        if _made_from(existing) != _made_from({"tokenizer": entry, **more}):
            raise ValueError(f"{out}: holds a data set of other text or options; pass --overwrite or another --out")
        load_dataset(out)
        if existing.get("format_version") == FORMAT_VERSION:
            return existing, False

    def read(path: Path, done: int) -> Iterator[str]:
        return read_documents(path, options.text_key, lambda position: report(done + position), max_bytes)

    surveys, done = {}, 0
    for name, path in domains.items():
        surveys[name] = survey(read(path, done), options.seed)
        done += path.stat().st_size
    splits = assign_splits(surveys, options.split)
    dtype = np.dtype(megatron_indexed_dataset().DType.optimal_dtype(tokenizer.vocab_size))
    entries: dict[str, Any] = {}
    with _atomic_folder(out) as folder:
        for name, path in domains.items():
            writer = _DomainWriter(folder, name, dtype, tokenizer.vocab_size)
            encoded = _encode(read(path, done), tokenizer, workers, path)
            for split, (ids, num_bytes) in zip(splits[name].tolist(), encoded, strict=True):
                writer.add(SPLITS[split], ids, num_bytes)
            entries[name] = writer.finish()
            done += path.stat().st_size
        copy_tokenizer(tokenizer, folder)
        manifest = write_manifest(folder, entry, dtype, entries, **more)
        load_dataset(folder)
    return manifest, True


def _made_from(manifest: Mapping[str, Any]) -> list[Any]:
    """What decides the ids of a data set, of the present format or of an earlier one."""
    tokenizer = manifest.get("tokenizer")
    known = (
        [tokenizer.get(key) for key in ("fingerprint", "vocab_size", "eod")] if isinstance(tokenizer, dict) else None
    )
    return [known, manifest.get("options"), manifest.get("inputs")]


def _encode(
    documents: Iterable[str], tokenizer: Tokenizer, workers: int, path: Path
) -> Iterator[tuple[np.ndarray, int]]:
    """Per document its ids with the EOD id, and the bytes of its text, in the order given; no ids for an empty document."""
    eod, nothing = np.array([tokenizer.require_eod()]), np.zeros(0, np.int64)
    for batch in _batches(documents):
        try:
            encoded = tokenizer.encode_batch(batch, workers)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        for text, ids in zip(batch, encoded, strict=True):
            yield (np.concatenate([ids, eod]) if len(ids) else nothing), len(text.encode())


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _DomainWriter:
    """The .bin/.idx pairs of one domain."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, vocab_size: int):
        self._prefixes = {split: folder / f"{name}_{split}" for split in SPLITS}
        self._writers = {split: IndexedWriter(prefix, dtype, vocab_size) for split, prefix in self._prefixes.items()}
        self._skipped = 0

    def add(self, split: str, ids: np.ndarray, num_bytes: int) -> None:
        """Adds one document; one without ids is only counted."""
        if len(ids) == 0:
            self._skipped += 1
        else:
            self._writers[split].add(ids, num_bytes)

    def finish(self) -> dict[str, Any]:
        """Closes the files; returns this domain's entry of dataset.json."""
        splits = {}
        for split, writer in self._writers.items():
            sizes = writer.finish()
            splits[split] = {**sizes, "bytes": Path(f"{self._prefixes[split]}.bin").stat().st_size}
        return {"empty_documents": self._skipped, "splits": splits}


def _identity(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        name = path.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return {"file": name, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _existing(out: Path, overwrite: bool) -> dict[str, Any] | None:
    """The manifest of the data set in `out`, None where there is nothing. Raises ValueError for anything else; a damaged
    data set may be overwritten."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not out.is_dir() or not (out / MANIFEST).exists():
        raise ValueError(f"{out}: exists and is not a data set ({MANIFEST} is missing); choose another --out")
    if foreign := sorted(file.name for file in out.iterdir() if not _OURS.fullmatch(file.name)):
        raise ValueError(f"{out}: holds more than a data set ({', '.join(foreign)}); choose another --out")
    return {} if overwrite else read_values(out)


@contextlib.contextmanager
def _atomic_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that takes its place when the block ends well and is removed when it does not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (out.with_name(f".{out.name}.{os.getpid()}.{kind}") for kind in ("partial", "old"))
    partial.mkdir()
    try:
        yield partial
        if out.exists():
            out.rename(old)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "python -m tools.index",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", nargs="+", type=file_name, metavar="PATH", help="folders or files of text")
    parser.add_argument("--tokenizer", type=file_name, metavar="PATH", help=".model, tokenizer.json or their folder")
    parser.add_argument("--out", type=file_path, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--split", type=unicode_text, default="0.96,0.02,0.02", help="train,valid,test (default: 0.96,0.02,0.02)"
    )
    parser.add_argument("--seed", type=integer(0, 2**63 - 1), default=1234, help="of the split (default: 1234)")
    parser.add_argument(
        "--text-key",
        type=unicode_text,
        default="text",
        help='JSONL key or Parquet column of the text (default: "text")',
    )
    parser.add_argument(
        "--workers", type=integer(1, 4096), default=os.cpu_count() or 1, help="threads that encode (default: all cores)"
    )
    parser.add_argument(
        "--max-document-bytes",
        type=integer(1, 2**40),
        default=MAX_DOCUMENT_BYTES,
        metavar="N",
        help=f"longest line or document that is read; memory is up to 250 times that (default: {MAX_DOCUMENT_BYTES})",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a data set of other text or options")
    parser.add_argument(
        "--verify",
        type=file_path,
        metavar="DIR",
        help="write nothing: compare every byte of a data set with its dataset.json",
    )
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write the contents of dataset.json here too")
    return parser


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    for option in ("workers", "max_document_bytes"):
        if (value := getattr(arguments, option)) < 1:
            raise ValueError(f"--{option.replace('_', '-')} {value}: must be at least 1")
    os.environ.setdefault("RAYON_NUM_THREADS", str(arguments.workers))  # threads of Hugging Face tokenizers
    options = Options(parse_split(arguments.split), arguments.seed, arguments.text_key)
    tokenizer = load_tokenizer(arguments.tokenizer)
    console = Console(stderr=True)
    columns = (TextColumn("indexing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        total = 2 * sum(path.stat().st_size for path in find_domains(arguments.input).values())
        task = progress.add_task("indexing", total=total)
        manifest, written = index(
            arguments.input,
            tokenizer,
            arguments.out,
            options,
            workers=arguments.workers,
            overwrite=arguments.overwrite,
            report=lambda position: progress.update(task, completed=position),
            max_bytes=arguments.max_document_bytes,
        )
    _print_summary(manifest)
    print(f"{arguments.out}: {'written' if written else 'up to date'}")
    return manifest


def _verify(folder: Path) -> dict[str, Any]:
    info = load_dataset(folder, verify=True)
    for domain, splits in info.domains.items():
        for split in splits:
            info.open(domain, split)
            info.text_bytes(domain, split)
    manifest = read_values(folder)
    if info.note:
        print(info.note)
    print(f"{folder}: {'its files agree with each other' if info.note else 'every file is as it was written'}")
    return manifest


def _print_summary(manifest: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("domain", *(f"{split} tokens (documents)" for split in SPLITS), "empty")
    for name, domain in manifest["domains"].items():
        sizes = [f"{split['tokens']:,} ({split['documents']:,})" for split in domain["splits"].values()]
        table.add_row(name, *sizes, str(domain["empty_documents"]))
    Console(markup=False).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 on bad input."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    missing = [option for option in ("input", "tokenizer", "out") if getattr(arguments, option) is None]
    if arguments.verify is None and missing:
        parser.error(f"give {' and '.join(f'--{option}' for option in missing)} (or --verify DIR)")
    try:
        manifest = _run(arguments) if arguments.verify is None else _verify(arguments.verify)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        return refuse(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
