"""Tokenizers: a file goes in; ids that the indexed data, the model and the export agree on come out.

A sentencepiece `.model` or a Hugging Face `tokenizer.json` is accepted. Text is data: neither "</s>" nor any other
control token spelled out in a document ever becomes a control id, and BOS and EOS are never added by `encode`.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Roles by convention, for files that do not name them. The end of a document is not always the end of a turn (EOS).
EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "<EOD>")
BOS_TOKENS = ("<s>", "<|begin_of_text|>", "<bos>")
EOS_TOKENS = ("</s>", "<eos>", *EOD_TOKENS)
PAD_TOKENS = ("<pad>", "[PAD]", "<|pad|>")


class Tokenizer(ABC):
    """Maps text to ids and back.

    path: the file it was read from; fingerprint: SHA-256 (hex) of that file.
    vocab_size: largest id + 1, added tokens included. bos, eos, pad, eod: ids, or None where the tokenizer has none;
    eod closes a document.
    """

    path: Path
    fingerprint: str
    vocab_size: int
    bos: int | None
    eos: int | None
    pad: int | None
    eod: int | None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with no BOS or EOS, and no control id whatever the text says."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[np.ndarray]:
        """`encode` of each text on up to `num_threads` threads, as integer arrays in the order given."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; control ids give no text."""

    def require_eod(self) -> int:
        """The id that ends a document. Raises ValueError if there is none."""
        if self.eod is None:
            raise ValueError(
                f"{self.path}: this tokenizer has no end-of-document token (looked for EOS, {', '.join(EOD_TOKENS)}); "
                "name an eos_token in the tokenizer_config.json beside it, or use another tokenizer"
            )
        return self.eod


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model. Control pieces are unreachable from text by sentencepiece's own rules."""

    def __init__(self, path: Path):
        import sentencepiece

        self.path, self.fingerprint = path, _sha256(path)
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path}: not a sentencepiece model ({error})") from error
        self.vocab_size = self.processor.get_piece_size()
        self.bos, self.eos, self.pad = (
            None if i < 0 else i for i in (self.processor.bos_id(), self.processor.eos_id(), self.processor.pad_id())
        )
        pieces = (self.processor.piece_to_id(piece) for piece in EOD_TOKENS)
        self.eod = next((i for i in pieces if self.processor.is_control(i)), self.eos)

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[np.ndarray]:
        return [np.asarray(ids, dtype=np.int32) for ids in self.processor.encode(list(texts), num_threads=num_threads)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.processor.decode([int(i) for i in ids])


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`; roles come from the `tokenizer_config.json` beside it, else from conventional names.

    `num_threads` has no effect: the library's own pool (RAYON_NUM_THREADS) does the work.
    """

    def __init__(self, path: Path):
        import tokenizers

        self.path, self.fingerprint = path, _sha256(path)
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise ValueError(f"{path}: not a Hugging Face tokenizer ({error})") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._assign_roles()
        self._refuse_forgeable_control_tokens()

    def _assign_roles(self) -> None:
        special = {t.content: i for i, t in self.tokenizer.get_added_tokens_decoder().items() if t.special}
        config = _read_object(self.path.with_name("tokenizer_config.json"))

        def role(key: str, conventional: Sequence[str]) -> int | None:
            if key not in config:
                return next((special[name] for name in conventional if name in special), None)
            token = config[key]
            content = token.get("content") if isinstance(token, dict) else token
            return None if content is None else self.tokenizer.token_to_id(str(content))

        self.bos, self.eos = role("bos_token", BOS_TOKENS), role("eos_token", EOS_TOKENS)
        self.pad = role("pad_token", PAD_TOKENS)
        self.eod = next((special[name] for name in EOD_TOKENS if name in special), self.eos)
        unknown = config.get("unk_token", getattr(self.tokenizer.model, "unk_token", None))
        roles = {self.bos, self.eos, self.pad, self.eod} - {None}
        self._control = {i: name for name, i in special.items() if name != unknown or i in roles}

    def _refuse_forgeable_control_tokens(self) -> None:
        for i, name in self._control.items():
            if i in self.encode(name):
                raise ValueError(
                    f"{self.path}: the text {name!r} encodes to the control id {i}, so a document could forge it; "
                    "remove the merges that build this token, or use another tokenizer"
                )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[np.ndarray]:
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a `.model` or `.json` file, or the one such file of a folder (`*.model` or `tokenizer.json`).

    Raises ValueError for a missing or malformed file, an unknown kind, and a folder with none or several.
    """
    path = Path(path)
    if path.is_dir():
        found = [*sorted(path.glob("*.model")), *path.glob("tokenizer.json")]
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise ValueError(
                f"{path}: expected one *.model or tokenizer.json in this folder, found {names}; name the file"
            )
        path = found[0]
    if not path.is_file():
        raise ValueError(f"{path}: no such tokenizer file; train one with `python -m tools.tokenizer train`")
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path)
    raise ValueError(f"{path}: unknown tokenizer kind {path.suffix!r}; use a sentencepiece .model or a tokenizer.json")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
