"""Train, check and export a tokenizer.

    labelled text -> train -> tokenizer.model (sentencepiece) -> export-hf -> tokenizer.json, tokenizer_config.json

The trained tokenizer is BPE with byte fallback and no normalisation: what it decodes is, byte for byte, what was
encoded, with one exception of sentencepiece's own: U+2581 comes back as a space. No space is put before a text, newline
and tab are tokens of their own, and digits are single tokens.
"""

import argparse
import contextlib
import io
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.data.documents import MAX_DOCUMENT_BYTES, find_domains, read_documents
from recipes.data.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer
from tools.arguments import Parser, file_name, integer, refuse, unicode_text

# Text that tokenizers with default settings change: full- and half-width forms, circled digits, newlines, tabs,
# repeated, leading, trailing and ideographic spaces, characters outside the BMP, joined emoji, combining marks.
HARD_TEXTS = (
    "ＡＢＣ１２３",
    "ｶﾞｷﾞ",
    "①②",
    "︰",
    "a\n\nb",
    "a\tb",
    "全角　空白",
    "two  spaces",
    " 先頭",
    "末尾 ",
    "𠮷野家",
    "👩\u200d👩\u200d👧",
    "髙﨑",
    "か\u3099",
    "㌔",
    "…",
)
# Sentencepiece skips longer lines; a cut in mid-line costs nothing, as merges never cross words.
_LONGEST_LINE = 1000
_EPILOG = """examples:
  python -m tools.tokenizer train --input data/corpus --vocab-size 4096 --out data/tokenizer/tokenizer.model
  python -m tools.tokenizer check data/tokenizer/tokenizer.model
  python -m tools.tokenizer export-hf data/tokenizer/tokenizer.model --out data/tokenizer_hf
"""


def train(
    inputs: Sequence[str | Path],
    vocab_size: int,
    out: str | Path,
    max_bytes: int,
    seed: int,
    text_key: str = "text",
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
) -> dict[str, int]:
    """Trains a sentencepiece BPE model and writes it to `out`; returns the bytes of text used per domain.

    At most about `max_bytes` of text go to the trainer, the same amount from every domain where there is enough.
    Equal input and arguments give an equal file. Raises ValueError for bad input and for a vocabulary that the text
    cannot fill.
    """
    import sentencepiece

    domains = find_domains(inputs)

    def lines(path: Path) -> Iterator[str]:
        return _lines(read_documents(path, text_key, max_bytes=max_document_bytes))

    sizes = {name: sum(len(line.encode()) for line in lines(path)) for name, path in domains.items()}
    cap = _balanced_cap(sizes, max_bytes)
    used = dict.fromkeys(domains, 0)

    def sentences() -> Iterator[str]:
        for name, path in domains.items():
            generator = random.Random(f"{seed}/{name}")
            for line in lines(path):
                if generator.random() * sizes[name] < cap:
                    used[name] += len(line.encode())
                    yield line

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            user_defined_symbols=["\n", "\t"],
            split_digits=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            num_threads=1,
            minloglevel=3,
        )
    except RuntimeError as error:
        raise ValueError(
            f"--vocab-size {vocab_size} cannot be trained on {sum(used.values())} bytes of text: {error}"
        ) from error
    _write(Path(out), model.getvalue())
    return used


def round_trip(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One row per text of HARD_TEXTS: text, tokens, and whether decode(encode(text)) gives it back."""
    rows = []
    for text in HARD_TEXTS:
        ids = tokenizer.encode(text)
        decoded = tokenizer.decode(ids)
        rows.append({"text": text, "tokens": len(ids), "decoded": decoded, "ok": decoded == text})
    return rows


def export_hf(model: str | Path, out: str | Path) -> None:
    """Writes OUT/tokenizer.json and OUT/tokenizer_config.json with the ids of a sentencepiece model from `train`.

    Raises ValueError if the model is of another kind, so that the ids would differ.
    """
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as HfTokenizer

    source = load_tokenizer(model)
    if not isinstance(source, SentencePieceTokenizer):
        raise ValueError(
            f"{source.path}: export-hf takes a sentencepiece .model; this already is a Hugging Face tokenizer"
        )
    processor = source.processor
    pieces = [processor.id_to_piece(i) for i in range(source.vocab_size)]
    special = [i for i in range(source.vocab_size) if processor.is_control(i) or processor.is_unknown(i)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    unknown = pieces[processor.unk_id()]
    exported = HfTokenizer(models.BPE(vocab, _merges(source), unk_token=unknown, byte_fallback=True, fuse_unk=True))
    exported.normalizer = normalizers.Replace(" ", "▁")
    exported.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    exported.add_special_tokens([AddedToken(pieces[i], special=True, normalized=False) for i in special])
    _require_equal_ids(source, exported)
    roles = {"bos_token": source.bos, "eos_token": source.eos, "pad_token": source.pad, "unk_token": processor.unk_id()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{role: pieces[i] for role, i in roles.items() if i is not None},
    }
    _write(Path(out) / "tokenizer.json", exported.to_str(pretty=True).encode())
    _write(Path(out) / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n")


def _lines(documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        for line in document.split("\n"):
            for begin in range(0, len(line), _LONGEST_LINE):
                yield line[begin : begin + _LONGEST_LINE]


def _balanced_cap(sizes: Mapping[str, int], total: int) -> float:
    """The cap c for which the sum of min(size, c) is `total` (or all there is): small domains count fully."""
    left, remaining = float(total), sorted(sizes.values())
    while remaining and remaining[0] * len(remaining) <= left:
        left -= remaining.pop(0)
    return left / len(remaining) if remaining else float("inf")


def _merges(source: SentencePieceTokenizer) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, in the order in which sentencepiece prefers the joined piece."""
    processor = source.processor
    kinds = (processor.is_control, processor.is_unknown, processor.is_unused, processor.is_byte)
    text_ids = [i for i in range(source.vocab_size) if not any(kind(i) for kind in kinds)]
    ids = {processor.id_to_piece(i): i for i in text_ids}
    merges: list[tuple[str, str]] = []
    for i in sorted(text_ids, key=lambda i: (-processor.get_score(i), i)):
        piece = processor.id_to_piece(i)
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        known = [(left, right) for left, right in splits if left in ids and right in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _require_equal_ids(source: Tokenizer, exported: Any) -> None:
    for text in ("日本 the end.", *HARD_TEXTS, "".join(HARD_TEXTS)):
        ours, theirs = source.encode(text), exported.encode(text, add_special_tokens=False).ids
        if ours != theirs or exported.decode(theirs) != source.decode(ours):
            raise ValueError(
                f"{source.path}: {text!r} gives {ours} in sentencepiece and {theirs} in the export; only models of "
                "`python -m tools.tokenizer train` (BPE, byte fallback, identity normalisation) can be exported"
            )


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    partial.replace(path)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("python -m tools.tokenizer", description=__doc__, epilog=_EPILOG, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train a sentencepiece BPE model", epilog=_EPILOG, formatter_class=raw)
    command.add_argument(
        "--input", nargs="+", type=file_name, required=True, metavar="PATH", help="folders or files <domain>.jsonl, ..."
    )
    command.add_argument(
        "--vocab-size", type=integer(1, 2**24), default=4096, help="pieces, special ones included (default: 4096)"
    )
    command.add_argument("--out", type=file_name, required=True, metavar="FILE", help="the model to write, *.model")
    command.add_argument(
        "--max-bytes", type=integer(1, 2**40), default=16_000_000, help="text to train on (default: 16000000)"
    )
    command.add_argument(
        "--seed", type=integer(0, 2**32 - 1), default=1234, help="of the choice of lines (default: 1234)"
    )
    command.add_argument(
        "--text-key",
        type=unicode_text,
        default="text",
        help='JSONL key or Parquet column of the text (default: "text")',
    )
    command.add_argument(
        "--max-document-bytes",
        type=integer(1, 2**40),
        default=MAX_DOCUMENT_BYTES,
        metavar="N",
        help=f"longest line or document that is read (default: {MAX_DOCUMENT_BYTES})",
    )
    command = commands.add_parser("check", help="round trip of 16 hard texts", epilog=_EPILOG, formatter_class=raw)
    command.add_argument("tokenizer", type=file_name, help=".model, tokenizer.json or their folder")
    command = commands.add_parser("export-hf", help="write tokenizer.json", epilog=_EPILOG, formatter_class=raw)
    command.add_argument("tokenizer", type=file_name, help=".model from the train command")
    command.add_argument("--out", type=file_name, required=True, metavar="DIR", help="folder for the two files")
    for command in commands.choices.values():
        command.add_argument("--json", type=file_name, metavar="FILE", help="write the results as JSON")
    return parser


def _run(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from rich.console import Console
    from rich.table import Table

    if arguments.command == "train":
        for name in ("vocab_size", "max_bytes", "max_document_bytes"):
            if getattr(arguments, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1")
        if not arguments.out.endswith(".model"):
            raise ValueError(f"--out {arguments.out}: name a file that ends in .model")
        busy = Console(stderr=True)
        with busy.status("training") if busy.is_terminal else contextlib.nullcontext():
            used = train(
                arguments.input,
                arguments.vocab_size,
                arguments.out,
                arguments.max_bytes,
                arguments.seed,
                arguments.text_key,
                arguments.max_document_bytes,
            )
        print(f"{arguments.out}: {arguments.vocab_size} pieces from {sum(used.values())} bytes of {', '.join(used)}")
        return 0, {"path": arguments.out, "vocab_size": arguments.vocab_size, "bytes": used}
    if arguments.command == "export-hf":
        export_hf(arguments.tokenizer, arguments.out)
        print(f"{arguments.out}: tokenizer.json, tokenizer_config.json")
        return 0, {"path": arguments.out}
    tokenizer = load_tokenizer(arguments.tokenizer)
    rows = round_trip(tokenizer)
    good = sum(row["ok"] for row in rows)
    table = Table("text", "tokens", "comes back as", "exact")
    for row in rows:
        table.add_row(repr(row["text"]), str(row["tokens"]), repr(row["decoded"]), "yes" if row["ok"] else "NO")
    Console(markup=False).print(table)
    print(f"{tokenizer.path}: {good} of {len(rows)} exact")
    special = {role: getattr(tokenizer, role) for role in ("bos", "eos", "pad", "eod")}
    return int(good < len(rows)), {"vocab_size": tokenizer.vocab_size, **special, "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when `check` finds a text that does not come back; 2 on bad input."""
    arguments = _parser().parse_args(argv)
    try:
        code, results = _run(arguments)
        if arguments.json:
            _write(Path(arguments.json), json.dumps(results, indent=2, ensure_ascii=False).encode() + b"\n")
    except (ValueError, OSError) as error:
        return refuse(error)
    return code


if __name__ == "__main__":
    sys.exit(main())
