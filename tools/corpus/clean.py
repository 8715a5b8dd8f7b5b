"""From raw documents to corpus text: characters, lines, duplicates, size.

Prose is normalised to NFC, never NFKC: NFKC would rewrite full-width Japanese punctuation and ligatures. Code keeps
its characters and its lines.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

MIN_DOCUMENT_CHARS = 40
MIN_DUPLICATE_LINE_BYTES = 30  # shorter lines (headings, "yes" in a dialogue) may repeat


class Document(NamedTuple):
    """``text`` without a final newline; ``source`` is a label: package, then the place inside it."""

    text: str
    source: str


_LINE_ENDS = re.compile("\r\n?|[\v\f\x1c-\x1e\x85\u2028\u2029]")  # all that str.splitlines would split at
_DROPPED = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u00ad\ufeff]")  # control characters, soft hyphen, BOM


def clean_text(text: str, normalise: bool) -> str:
    """Unify line ends, drop control characters, soft hyphens and byte-order marks; NFC if ``normalise``."""
    text = _DROPPED.sub("", _LINE_ENDS.sub("\n", text))
    return unicodedata.normalize("NFC", text) if normalise else text


def clean_documents(documents: Iterable[Document], kind: str) -> Iterator[Document]:
    """Clean and deduplicate the documents of one domain, in order; ``kind`` as in ``Domain``."""
    seen: set[bytes] = set()

    def is_new(text: str) -> bool:
        digest = blake2b(text.encode(), digest_size=16).digest()
        if digest in seen:
            return False
        seen.add(digest)
        return True

    for text, source in documents:
        text = clean_text(text, normalise=kind != "code")
        if kind == "code":
            text = text.strip("\n")
        else:
            lines = [line for line in (line.strip() for line in text.split("\n")) if re.search(r"\w", line)]
            if kind == "prose":
                lines = [line for line in lines if len(line.encode()) < MIN_DUPLICATE_LINE_BYTES or is_new(line)]
            text = "\n".join(lines)
        if len(text) >= MIN_DOCUMENT_CHARS and (kind == "prose" or is_new(text)):
            yield Document(text, source)


def take_bytes(documents: Iterable[Document], max_bytes: int | None) -> Iterator[Document]:
    """Whole documents, in order, whose UTF-8 text fits into ``max_bytes`` (None: all).

    A document too large for the rest is passed over as long as a tenth of ``max_bytes`` is free: one huge file at the
    front must not empty a small corpus.
    """
    used = 0
    for document in documents:
        size = len(document.text.encode())
        if max_bytes is None or used + size <= max_bytes:
            used += size
            yield document
        elif used >= 0.9 * max_bytes:
            return
