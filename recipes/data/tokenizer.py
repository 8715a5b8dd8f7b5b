"""Tokenizers: a file goes in; ids that the indexed data, the model and the export agree on come out.

A sentencepiece `.model` or a Hugging Face `tokenizer.json` is accepted, and the files beside it that name tokens with a
role (`recipes.data.roles`). Text is data: neither "</s>" nor any other control token spelled out in a document ever
becomes a control id, and BOS and EOS are never added by `encode`. A tokenizer that cannot promise this is refused when
it is read, or at the text where it breaks.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from recipes.data.roles import Roles, read_roles

# Roles by convention, for files that do not name them. The end of a document is not always the end of a turn (EOS).
EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "<EOD>")
BOS_TOKENS = ("<s>", "<|begin_of_text|>", "<bos>")
EOS_TOKENS = ("</s>", "<eos>", *EOD_TOKENS)
PAD_TOKENS = ("<pad>", "[PAD]", "<|pad|>")
MAX_TOKENIZER_BYTES = 1 << 28  # of a tokenizer's file; those of 256,000 pieces have 35 MB


class Tokenizer(ABC):
    """Maps text to ids and back.

    path: the file it was read from; fingerprint: SHA-256 (hex) of that file; role_files: the files beside it that name
    its roles.
    vocab_size: largest id + 1, added tokens included. bos, eos, pad, eod: ids, or None where the tokenizer has none;
    eod closes a document. control: spelling of each id that text never becomes.
    """

    path: Path
    fingerprint: str
    role_files: Sequence[Path]
    vocab_size: int
    bos: int | None
    eos: int | None
    pad: int | None
    eod: int | None
    control: dict[int, str]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with no BOS or EOS, and no control id whatever the text says.

        Raises ValueError when the tokenizer has no other ids for the text, as `encode_batch` does.
        """
        ids = self._encode(text)
        self._refuse_control(np.asarray(ids, np.int64))
        return ids

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[np.ndarray]:
        """`encode` of each text on up to `num_threads` threads, as integer arrays in the order given."""
        batch = self._encode_batch(texts, num_threads)
        if batch:
            self._refuse_control(np.concatenate(batch))
        return batch

    def _refuse_control(self, ids: np.ndarray) -> None:
        """Raise ValueError for ids that text must not become; on top of what is refused when the file is read."""
        if self.control and (forged := ids[np.isin(ids, list(self.control))]).size:
            i = int(forged[0])
            raise ValueError(
                f"{self.path}: some text encodes to the control id {i} ({self.control[i]!r}), as if it ended or began a "
                "document; use a tokenizer that has other tokens for all text (byte-level, or with byte fallback)"
            )

    def _refuse_forgeable(self) -> None:
        """Raise ValueError when a control token's spelling becomes its id, alone or beside other text."""
        for i, name in self.control.items():
            if any(
                i in self._encode(text) for text in (name, f" {name}", f"{name}{name}", f"a{name}a", f"a\n{name} a")
            ):
                raise ValueError(
                    f"{self.path}: the text {name!r} encodes to the control id {i}, so a document could forge it; "
                    "remove the piece or the merges that build this token, name another token in the files that give "
                    f"it a role, or use another tokenizer{self._named_by()}"
                )

    def _named_by(self) -> str:
        names = ", ".join(file.name for file in self.role_files)
        return f" (roles also come from {names})" if names else ""

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _encode_batch(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]: ...

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
    """A sentencepiece model. Control pieces are unreachable from text by sentencepiece's own rules; a user-defined piece
    is not, so that a model to whose user-defined piece some file gives a role is refused."""

    def __init__(self, path: Path):
        import sentencepiece

        self.path, self.fingerprint = path, file_sha256(path)
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path}: not a sentencepiece model ({error})") from error
        self.vocab_size = self.processor.get_piece_size()
        if self.vocab_size == 0:
            raise ValueError(f"{path}: a sentencepiece model without pieces")
        roles = read_roles(path.parent, self._id_of, self._token_of)
        self.role_files = roles.files
        own = {"bos": self.processor.bos_id(), "eos": self.processor.eos_id(), "pad": self.processor.pad_id()}
        ids = {role: None if i < 0 else i for role, i in own.items()}
        ids |= {role: i for role, i in roles.ids.items() if i is not None}  # null says nothing about the model's own
        self.bos, self.eos, self.pad = ids["bos"], ids["eos"], ids["pad"]
        pieces = (self.processor.piece_to_id(piece) for piece in EOD_TOKENS)
        self.eod = next((i for i in pieces if self.processor.is_control(i)), self.eos)
        unknown = self.processor.unk_id()
        named = {i: name for i, name in roles.special.items() if i != unknown}
        own_control = [i for i in range(self.vocab_size) if self.processor.is_control(i)]
        of_roles = [i for i in (self.bos, self.eos, self.pad, self.eod) if i is not None]
        self.control = {i: self.processor.id_to_piece(i) for i in (*own_control, *of_roles)} | named
        self._refuse_forgeable()

    def _id_of(self, token: str) -> int | None:
        i = self.processor.piece_to_id(token)
        return i if self.processor.id_to_piece(i) == token else None

    def _token_of(self, i: int) -> str | None:
        return self.processor.id_to_piece(i) if i < self.vocab_size else None

    def _encode(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def _encode_batch(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]:
        return [np.asarray(ids, dtype=np.int32) for ids in self.processor.encode(list(texts), num_threads=num_threads)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.processor.decode([int(i) for i in ids])


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`; roles come from the files beside it, else from conventional names.

    `num_threads` has no effect: the library's own pool (RAYON_NUM_THREADS) does the work.
    """

    def __init__(self, path: Path):
        import tokenizers

        self.path, self.fingerprint = path, file_sha256(path)
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise ValueError(f"{path}: not a Hugging Face tokenizer ({error})") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"{path}: a tokenizer without tokens")
        self.vocab_size = max(vocabulary.values()) + 1
        roles = read_roles(path.parent, self.tokenizer.token_to_id, self._token_of)
        self.role_files = roles.files
        self._make_special(roles)
        self._assign_roles(roles)
        self._refuse_forgeable()

    def _token_of(self, i: int) -> str | None:
        return self.tokenizer.id_to_token(i) if i < self.vocab_size else None

    def _make_special(self, roles: Roles) -> None:
        """Flag as special what only other files call so: text spelling an added token without the flag becomes its id."""
        from tokenizers import AddedToken

        added = self.tokenizer.get_added_tokens_decoder()
        unknown = roles.ids.get("unk")
        unflagged = [
            AddedToken(name, special=True, normalized=False)
            for i, name in roles.special.items()
            if (not added[i].special if i in added else i != unknown)
        ]
        self.tokenizer.add_special_tokens(unflagged)

    def _assign_roles(self, roles: Roles) -> None:
        special = {t.content: i for i, t in self.tokenizer.get_added_tokens_decoder().items() if t.special}

        def role(name: str, conventional: Sequence[str]) -> int | None:
            return roles.ids.get(name, next((special[token] for token in conventional if token in special), None))

        self.bos, self.eos, self.pad = role("bos", BOS_TOKENS), role("eos", EOS_TOKENS), role("pad", PAD_TOKENS)
        self.eod = next((special[name] for name in EOD_TOKENS if name in special), self.eos)
        of_roles = {i for i in (self.bos, self.eos, self.pad, self.eod) if i is not None}
        unknown = {
            roles.ids.get("unk"),
            self.tokenizer.token_to_id(getattr(self.tokenizer.model, "unk_token", None) or ""),
        }
        named = {i: name for name, i in special.items()} | roles.special
        self.control = {i: name for i, name in named.items() if i not in unknown or i in of_roles}

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_batch(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]:
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

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
    if (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
        raise ValueError(f"{path}: {size} bytes, no tokenizer is larger than {MAX_TOKENIZER_BYTES}")
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path)
    raise ValueError(f"{path}: unknown tokenizer kind {path.suffix!r}; use a sentencepiece .model or a tokenizer.json")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
