"""Text that people or other programs wrote, made safe to print and to store."""

from __future__ import annotations

import re
import unicodedata

_HIDDEN = "***"
# scheme://user:password@host, where people leave slashes in passwords as they are, and values of a query that sign or authorise.
_USER_INFO = re.compile(
    r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)(?:[^\s/?#'\"@:]*:(?!\d+(?:[/?#]|$))[^\s'\"]*|[^\s/?#'\"]+)@"
)
_QUERY = re.compile(
    r"(?P<name>[?&;][^=&;\s]*(?:key|token|secret|passw|pwd|sig|auth|credential)[^=&;\s]*=)[^&;\s'\"]+", re.IGNORECASE
)
# What well-known services begin their keys with, and bearer tokens.
_KEYS = re.compile(
    r"\b(?:hf_|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abp]-|sk-|AKIA|wandb_v1_)[A-Za-z0-9_-]{12,}|(?<=Bearer )\S+"
)


def redact(text: str) -> str:
    """`text` without passwords and keys: those in URLs, and those that can be told by their form."""
    text = _USER_INFO.sub(rf"\g<scheme>{_HIDDEN}@", text)
    return _KEYS.sub(_HIDDEN, _QUERY.sub(rf"\g<name>{_HIDDEN}", text))


def printable(text: str) -> str:
    """`text` with control characters (but line breaks) and bytes that are no UTF-8 as escapes, for any terminal or log."""
    return "".join(
        character
        if character == "\n" or unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def shown(text: str) -> str:
    """`text` as a message quotes it: on one line, without control characters, long ones in part."""
    text = printable(text[:200]).replace("\n", "\\n")
    return text if len(text) <= 160 else f"{text[:150]}..."


def error_line(error: object) -> str:
    """What a command prints for a mistake of its user: one message, without passwords and control characters."""
    return f"error: {printable(redact(str(error)))}"
