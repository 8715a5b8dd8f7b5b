"""The table of sources: which packages hold which text, their licences, versions and checksums."""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

TOOLS_DIR = Path(__file__).resolve().parent.parent
TABLE_PATH = TOOLS_DIR / "corpus_sources.json"
FALLBACK_DIR = TOOLS_DIR / "fallback_corpus"


@dataclass(frozen=True)
class Package:
    """One input.

    ``client`` says where it comes from: ``pip``, ``apt`` or ``npm`` (a downloaded archive), ``committed`` (a text file
    of this repository) or ``interpreter`` (the standard library of the running Python, whose version it takes; it alone
    has no file name and no SHA-256).
    """

    name: str
    client: str
    licence: str
    attribution: str
    version: str = ""
    file: str = ""
    sha256: str = ""

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}" if self.version else self.name


@dataclass(frozen=True)
class Part:
    """A selection of one package: the members whose names match the regular expression, given to a reader."""

    package: Package
    reader: str
    members: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Domain:
    """A labelled corpus: the concatenation of ``parts``, or of ``fallback`` where a part cannot be had.

    ``kind`` is ``prose`` (lines normalised and deduplicated), ``records`` (normalised; only whole documents
    deduplicated) or ``code`` (not normalised; only whole documents deduplicated).
    """

    name: str
    description: str
    kind: str
    parts: tuple[Part, ...]
    fallback: tuple[Part, ...] = ()
    fallback_description: str = ""


@dataclass(frozen=True)
class Table:
    """All domains, in the order of the file, and the names of those built by default."""

    domains: Mapping[str, Domain]
    default: tuple[str, ...]


def load_table(path: Path = TABLE_PATH) -> Table:
    """Read the table of sources."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    packages = {name: Package(name=name, **spec) for name, spec in raw["packages"].items()}
    for package in [package for package in packages.values() if package.client == "interpreter"]:
        packages[package.name] = replace(package, version=platform.python_version())

    def parts(specs: list[dict[str, Any]]) -> tuple[Part, ...]:
        return tuple(Part(**{**spec, "package": packages[spec["package"]]}) for spec in specs)

    domains = {
        name: Domain(name=name, **{**spec, "parts": parts(spec["parts"]), "fallback": parts(spec.get("fallback", []))})
        for name, spec in raw["domains"].items()
    }
    return Table(domains=domains, default=tuple(raw["default"]))
