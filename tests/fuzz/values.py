"""Texts for the keys of the schema and the flags of a parser: legal ones, nearly legal ones, and others."""

from __future__ import annotations

import enum
import math
import random
import typing
from typing import Any

from recipes import schema
from recipes.rules import PathText, Range, Text

WORDS = [
    "a",
    "en",
    "ja",
    "2023",
    "007",
    "1e5",
    "null",
    "true",
    "1_000",
    "0x10",
    "1.10",
    "2024_01_02",
    "nan",
    "on",
    "~",
    "出力",
]
MAD = [
    *(
        "",
        " ",
        "???",
        "null",
        "Null",
        "None",
        "nan",
        "NaN",
        "inf",
        "-inf",
        "1e400",
        "-0.0",
        "-1",
        "0",
        "1e3",
        "1_000",
        "0x10",
        "007",
    ),
    *(
        "true",
        "True",
        "yes",
        "on",
        "off",
        "false",
        "2^63",
        str(2**63),
        str(-(2**63) - 1),
        "9" * 5000,
        "1e-400",
        "1" * 70,
        "٣",
        "１２",
    ),
    *(
        "2023-01-01",
        "12:30",
        "1,2",
        "[1,2]",
        "[]",
        "{}",
        "[[1]]",
        "[1,[2,[3]]]",
        "{a:1}",
        "{a:{b:1}}",
        "{1:2}",
        "{a:1,a:2}",
        "[,]",
        "[a,]",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        "[1",
        "{a",
        "{a:",
        "{a:}",
        "'",
        '"',
        "'a",
        '"a"',
        "'a'b",
        "\\",
        "\\\\",
        "a\\",
        "${",
        "${}",
        "$",
        "}${",
    ),
    *(
        "${oc.env:HOME}",
        "${oc.decode:1}",
        "${hydra:run.dir}",
        "${now:%Y}",
        "${run.name}",
        "${run.seed}",
        "${model}",
        "${a.b}",
        "${.x}",
    ),
    *(
        "${${run.name}}",
        "x${run.seed}y",
        "\\${run.seed}",
        "${run.dir}",
        "${data.domain_weights}",
        "${oc.env:X,${run.name}}",
    ),
    *(
        "~",
        "~/x",
        "~root/x",
        "~nobody_of_this_name",
        "/",
        "..",
        "../..",
        "/proc/self/mem",
        "/dev/null",
        "/dev/full",
        "/root/x",
        ".",
    ),
    *(
        "\udcff",
        "a\udcffb",
        "\ud800",
        "\0",
        "a\0b",
        "\n",
        "a\nb",
        "\r",
        "\t",
        "\x1b[31m",
        "\x7f",
        "\x85",
        "\u2028",
        "\u202e",
        "\ufeff",
    ),
    *(
        "x" * 300,
        "x" * 5000,
        "a/" * 3000,
        "/" * 300,
        "é" * 200,
        "🦀",
        "日本語",
        "a b",
        " a",
        "a ",
        "'",
        "''",
        "`id`",
        "$(id)",
        "; rm",
        "a=b",
        "=",
        "==",
    ),
    *(
        "[" * 200,
        "{a:" * 200 + "1" + "}" * 200,
        "[" * 30 + "]" * 30,
        "(" * 500,
        "[" + "1," * 20_000 + "1]",
        "{" + ",".join(f"k{n}:1" for n in range(5000)) + "}",
    ),
    *(
        "@",
        "a@b",
        "*",
        "?",
        "%",
        "%s",
        "{0}",
        "[/b]",
        "[red]x[/red]",
        "int(3)",
        "range(1,5)",
        "choice(a,b)",
        "glob(*)",
        "sweep",
        "!!python/object:x",
    ),
]


def legal(hint: Any, rng: random.Random) -> str:
    """A text that `hint` takes; paths and names among them may still be of nothing that exists."""
    inner, optional = schema.without_null(hint)
    if optional and rng.random() < 0.3:
        return "null"
    kind, rules = schema.bare(inner)
    options = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return "[" + ",".join(legal(options[0], rng) for _ in range(rng.randrange(4))) + "]"
    if typing.get_origin(kind) is dict:
        return "{" + ",".join(f"{rng.choice(WORDS)}{n}:{legal(options[1], rng)}" for n in range(rng.randrange(4))) + "}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return rng.choice(list(kind.__members__))
    if kind is bool:
        return rng.choice(["true", "false"])
    if kind is str:
        return rng.choice(WORDS) + rng.choice(["", "", "x", "1"])
    span = next((rule for rule in rules if isinstance(rule, Range)), Range(0, 10))
    small = math.exp(rng.uniform(0, math.log(max(2.0, min(span.high, 1e12)))))  # small ones more often
    number = rng.choice([span.low, span.high, small, rng.uniform(0, 4)])
    number = min(max(number, span.low), span.high)
    return str(int(number)) if kind is int else repr(float(number))


def nearly(hint: Any, rng: random.Random) -> str:
    """A text beside the border of what `hint` takes."""
    _, rules = schema.bare(schema.without_null(hint)[0])
    for rule in rules:
        if isinstance(rule, Range):
            return rng.choice(
                [
                    f"{rule.low - 1}",
                    f"{rule.high + 1}",
                    f"{rule.high * 2}",
                    f"{rule.low}",
                    f"{rule.high}",
                    f"{rule.low}.5",
                    f"'{rule.low}'",
                ]
            )
        if isinstance(rule, Text):
            longest = rule.longest_name if isinstance(rule, PathText) else rule.most
            return rng.choice(
                [
                    "x" * longest,
                    "x" * (longest + 1),
                    "é" * (longest // 2 + 1),
                    f"'{rng.choice(WORDS)}'",
                    f'"{rng.choice(MAD)}"',
                    *rule.without,
                ]
            )
    text = legal(hint, rng)
    place = rng.randrange(len(text) + 1)
    return rng.choice(
        [
            text[:place],
            text[:place] + rng.choice("[]{},:'\"\\ $") + text[place:],
            text.upper(),
            text * 2,
            f"[{text}]",
            f"{{{text}}}",
        ]
    )


def soup(rng: random.Random) -> str:
    """Characters that mean something to some grammar, at random."""
    characters = "[]{}(),:=+~@$\\'\"#%&*!?<>|;.`^-_ \t0123456789eEaxnulltrue${run.seed}日\n\0\x1b\udcff\u2028"
    return "".join(rng.choice(characters) for _ in range(rng.randrange(1, 30)))


def text(hint: Any, rng: random.Random) -> str:
    """One of these."""
    draw = rng.random()
    if draw < 0.45:
        return legal(hint, rng)
    return nearly(hint, rng) if draw < 0.65 else rng.choice(MAD) if draw < 0.9 else soup(rng)
