"""Readers: from the members of one package to documents. Each is a generator of ``(place, text)``."""

import ast
import io
import json
import re
import sqlite3
import struct
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import PurePosixPath
from typing import Any

from tools.corpus.archives import MAX_MEMBER_BYTES, Member

GROUP_BYTES = 6_000  # running text without chapters is cut into documents of about this size

Text = tuple[str, str]
Reader = Callable[..., Iterator[Text]]


def plain_text(members: Iterable[Member]) -> Iterator[Text]:
    """UTF-8 text, one paragraph per line, a blank line between documents."""
    for name, content in members:
        for i, text in enumerate(content.decode("utf-8").split("\n\n")):
            yield f"{name}#{i}", text


def source_code(members: Iterable[Member]) -> Iterator[Text]:
    """Python source files, one document each, decoded as their own coding line says."""
    for name, content in members:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        yield name, content.decode(encoding)


def string_constant(members: Iterable[Member]) -> Iterator[Text]:
    """The longest string constant of a Python module, which is parsed and never run; brackets mark added words."""
    for name, content in members:
        constants = (node.value for node in ast.walk(ast.parse(content)) if isinstance(node, ast.Constant))
        text = max((value for value in constants if isinstance(value, str)), key=len, default="")
        yield from _grouped(name, re.sub(r"[\[\]]", "", text).split("\n"))


def wiki_summaries(members: Iterable[Member]) -> Iterator[Text]:
    """JSON ``{key: {"title": ..., "extract": ...}}``: title line, then the article's summary."""
    for _, content in members:
        for key, article in json.loads(content).items():
            if article.get("extract"):
                yield key, f"{article['title']}\n{article['extract']}"


def recipes(members: Iterable[Member]) -> Iterator[Text]:
    """JSON ``{key: {"title": ..., "ingredients": [...], "steps": [...]}}`` as a titled list and numbered steps."""
    for _, content in members:
        for key, recipe in json.loads(content).items():
            ingredients = [f"- {item}" for item in recipe["ingredients"] or []]
            steps = [f"{i}. {step}" for i, step in enumerate(recipe["steps"] or [], 1)]
            yield key, "\n".join([recipe["title"], *ingredients, *steps])


def licences(members: Iterable[Member]) -> Iterator[Text]:
    """JSON ``{id: {"name": ..., "licenseText": ...}}``; hard-wrapped paragraphs are joined."""
    for _, content in members:
        for key, licence in json.loads(content).items():
            yield key, "\n".join([licence["name"], *_unwrapped(licence["licenseText"])])


def ontology(members: Iterable[Member]) -> Iterator[Text]:
    """SQLite database of the Gene Ontology: one ``term: definition`` per document; opened in memory."""
    for _, content in members:
        database = sqlite3.connect(":memory:")
        try:
            database.deserialize(content)
            rows = database.execute("SELECT go_id, term, definition FROM go_term ORDER BY go_id")
            yield from ((go_id, f"{term}: {definition}") for go_id, term, definition in rows if definition)
        finally:
            database.close()


def metamath(members: Iterable[Member]) -> Iterator[Text]:
    """Metamath database (metamath.org, the book, sec. 4.1): each commented axiom or theorem, without its proof."""
    statement = re.compile(r"\$\(((?:(?!\$\)).)*)\$\)\s+(\S+)\s+\$[ap]\s+(.*?)\s*\$[=.]", re.DOTALL)
    credit = re.compile(r"\((?:Contributed|Revised|Proof|New usage|This theorem)[^()]*(?:\([^()]*\)[^()]*)*\)")
    for _, content in members:
        for comment, label, formula in statement.findall(content.decode("utf-8")):
            yield label, f"{' '.join(credit.sub('', comment).split())}\n{label} {' '.join(formula.split())}"


def r_novels(members: Iterable[Member]) -> Iterator[Text]:
    """R lazy-load database of hard-wrapped books: one document per chapter.

    Records are a 4-byte length and a zlib stream of R's XDR serialisation ("R Internals", sec. 1.8): a character
    vector is type 16 and a count, then per string a type 9 with flags, a length in bytes and the bytes.
    """
    for name, content in members:
        position = 0
        while position < len(content):
            stream = zlib.decompressobj()
            record = stream.decompress(content[position + 4 :], MAX_MEMBER_BYTES)
            if stream.unconsumed_tail:
                raise ValueError(f"{name}: a record at byte {position} unpacks to more than {MAX_MEMBER_BYTES:,} bytes")
            position = len(content) - len(stream.unused_data)
            for chapter in _chapters(_unwrapped("\n".join(_longest_r_strings(record)))):
                yield f"{name}#{position}", chapter


def html_pages(
    members: Iterable[Member], drop: str = "", within_id: str | None = None, script: tuple[str, float] | None = None
) -> Iterator[Text]:
    """HTML pages, one document each.

    ``drop`` lists CSS classes to leave out; ``within_id`` keeps one element only; ``script`` is a character class and
    the least share of it in a line, which leaves untranslated lines out.
    """
    for name, content in members:
        parser = _HtmlText(frozenset(drop.split()), within_id)
        parser.feed(re.sub(r"</?span\b[^>]*>", "", content.decode("utf-8")))  # inline; most tags, and parsing is slow
        parser.close()
        lines = "".join(parser.chunks).split("\n")
        if script is not None:
            characters, share = script
            lines = [line for line in lines if len(re.findall(characters, line)) >= share * max(1, len(line.strip()))]
        yield "/".join(PurePosixPath(name).parts[-3:]), "\n".join(lines)


READERS: dict[str, Reader] = {
    reader.__name__: reader
    for reader in (
        plain_text,
        source_code,
        string_constant,
        wiki_summaries,
        recipes,
        licences,
        ontology,
        metamath,
        r_novels,
        html_pages,
    )
}


class _HtmlText(HTMLParser):
    """Collects the visible text of a page in ``chunks``; block elements end lines, ``pre`` keeps its own."""

    BLOCK = re.compile("p|div|[uod]l|li|d[td]|h[1-6]|t[rdh]|table|caption|pre|br|section|article|blockquote")
    HIDDEN = re.compile("script|style|head|nav|svg|noscript|aside|button|select|header|footer")
    VOID = re.compile("area|base|br|col|embed|hr|img|input|link|meta|source|wbr")  # never closed

    def __init__(self, dropped_classes: frozenset[str], within_id: str | None) -> None:
        super().__init__(convert_charrefs=True)
        self.chunks: list[str] = []
        self._dropped_classes, self._within_id = dropped_classes, within_id
        self._open: list[tuple[str, bool, bool]] = []  # tag, hides its text, is the wanted element

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        attributes = dict(attrs)
        classes = (attributes.get("class") or "").split()
        if not self.VOID.fullmatch(tag):
            hides = self.HIDDEN.fullmatch(tag) is not None or not self._dropped_classes.isdisjoint(classes)
            self._open.append((tag, hides, attributes.get("id") == self._within_id))
        self._end_line(tag)

    def handle_endtag(self, tag: str) -> None:
        if any(tag == opened for opened, _, _ in self._open):  # closes what was left open inside, too
            while self._open.pop()[0] != tag:
                pass
        self._end_line(tag)

    def handle_data(self, data: str) -> None:
        hidden = any(hides for _, hides, _ in self._open)
        if not hidden and (self._within_id is None or any(wanted for _, _, wanted in self._open)):
            preformatted = any(tag == "pre" for tag, _, _ in self._open)
            self.chunks.append(data if preformatted else re.sub(r"\s+", " ", data))

    def _end_line(self, tag: str) -> None:
        if self.BLOCK.fullmatch(tag):
            self.chunks.append("\n")


def _unwrapped(text: str) -> list[str]:
    """Paragraphs of hard-wrapped text, each joined into one line."""
    paragraphs = re.split(r"\n\s*\n", text.replace("\r\n", "\n"))
    return [" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip()]


def _grouped(name: str, lines: Iterable[str]) -> Iterator[Text]:
    """Consecutive lines as documents of about ``GROUP_BYTES``."""
    group: list[str] = []
    size = count = 0
    for line in filter(None, map(str.strip, lines)):
        group.append(line)
        size += len(line.encode()) + 1
        if size >= GROUP_BYTES:
            yield f"{name}#{count}", "\n".join(group)
            group, size, count = [], 0, count + 1
    if group:
        yield f"{name}#{count}", "\n".join(group)


def _chapters(paragraphs: Iterable[str]) -> Iterator[str]:
    chapter: list[str] = []
    for paragraph in paragraphs:
        if re.match(r"chapter\b", paragraph, re.IGNORECASE) and len(chapter) > 3:  # title lines open the first one
            yield "\n".join(chapter)
            chapter = []
        chapter.append(paragraph)
    if chapter:
        yield "\n".join(chapter)


def _longest_r_strings(record: bytes) -> list[str]:
    """The longest character vector of one serialised R object."""
    longest: list[str] = []
    for header in re.finditer(rb"\0\0\0\x10(?=(....))", record, re.DOTALL):
        (count,) = struct.unpack(">i", header[1])
        if not len(longest) < count <= len(record) // 8:  # each string takes at least its own 8-byte header
            continue
        strings: list[str] = []
        position = header.end() + 4
        while len(strings) < count and position + 8 <= len(record):
            flags, length = struct.unpack_from(">Ii", record, position)
            if flags & 0xFF != 9:
                break
            position += 8
            strings.append(record[position : position + max(length, 0)].decode("utf-8", "replace"))
            position += max(length, 0)
        if len(strings) == count:
            longest = strings
    return longest
