"""Damaged and forged data folders: each is refused in one message that names the folder; none is loaded.

FUZZ=10 python -m pytest tests/fuzz/test_data.py tries ten times as many; a seed that fails is kept in SEEDS.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from recipes.data.dataset import load_dataset
from tests.fuzz.judging import FACTOR
from tools.index import main as index
from tools.tokenizer import train

CASES = int(200 * FACTOR)
SEEDS: list[int] = []  # that once failed, tried beside the first CASES
PARTS = 4  # each within the time that a test may take
BYTES = 300_000_000  # that all cases together may add to the memory
EVIL_VALUES = [0, -1, 1, 2, 3, 7, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e300, None, True, "", "x", "\0", "\ud800"]
EVIL_VALUES += [
    "../../x",
    "uint8",
    "float32",
    "O",
    "i4,i4",
    "0" * 64,
    "日" * 300,
    [],
    {},
    [1],
    [[1]],
    {"a": 1},
    [0] * 5000,
]
EVIL_TEXTS = [
    "NaN",
    "1e999",
    "[" * 100_000,
    "{" * 900,
    '{"a":' * 300 + "1" + "}" * 300,
    "9" * 5000,
    "",
    "{",
    "\0",
    "[]",
]
WORDS = ["the", "age", "of", "wisdom", "it", "was", "the", "worst", "of", "times", "吾輩は猫である", "名前はまだ無い"]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data sets to damage: with either kind of tokenizer, in the earlier format, and one with other text to take files from."""
    root = tmp_path_factory.mktemp("fuzz")
    for corpus, seed in (("corpus", 1), ("other_corpus", 2)):
        draw = random.Random(seed)
        (root / corpus).mkdir()
        for domain in ("en", "ja"):
            texts = [" ".join(draw.choices(WORDS, k=12)) for _ in range(30)]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (root / corpus / f"{domain}.jsonl").write_text(lines)
    train([root / "corpus"], 330, root / "our.model", max_bytes=10**5, seed=1)
    hugging_face = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    hugging_face.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hugging_face.add_tokens([AddedToken("</s>"), AddedToken("<end>")])
    (root / "hf").mkdir()
    hugging_face.save(str(root / "hf" / "tokenizer.json"))
    (root / "hf" / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    (root / "hf" / "generation_config.json").write_text('{"eos_token_id": [256, 257]}')
    made = {
        "sentencepiece": ("corpus", "our.model"),
        "hugging_face": ("corpus", "hf"),
        "other": ("other_corpus", "our.model"),
    }
    for name, (corpus, tokenizer) in made.items():
        paths = ["--input", root / corpus, "--tokenizer", root / tokenizer, "--out", root / name]
        assert index([*map(str, paths), "--split", "8,1,1"]) == 0
    shutil.copytree(root / "sentencepiece", root / "earlier")
    values = json.loads((root / "earlier" / "dataset.json").read_text())
    values["format_version"] = 1
    del values["digest"], values["tokenizer"]["files"]
    for split in (split for domain in values["domains"].values() for split in domain["splits"].values()):
        del split["content"], split["text"]
    (root / "earlier" / "dataset.json").write_text(json.dumps(values))
    for path in (root / "earlier").glob("*.bytes"):
        path.unlink()
    return {name: root / name for name in (*made, "earlier")}


def use(folder: Path) -> None:
    """Everything that training and evaluation open. Raises ValueError for what they refuse."""
    info = load_dataset(folder)
    for domain, splits in info.domains.items():
        for split in splits:
            info.open(domain, split)
            info.text_bytes(domain, split)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_damage_is_loaded(sets: dict[str, Path], tmp_path: Path, part: int) -> None:
    for folder in sets.values():
        use(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failures, kinds = [], set()
    for seed in [*SEEDS, *range(CASES)][part::PARTS]:
        draw, folder = random.Random(seed), tmp_path / "copy"
        name = draw.choice(["sentencepiece", "hugging_face", "earlier"])
        shutil.copytree(sets[name], folder)
        kind, change = draw.choice([*(UNSIGNED_KINDS if name == "earlier" else KINDS).items()])
        what = change(draw, folder, sets["other"])
        kinds.add(kind)
        if problem := refused(folder):
            failures.append(f"seed {seed}, {name}, {kind} {what}: {problem}")
        shutil.rmtree(folder)
    assert not failures, "\n".join(failures)
    assert CASES < 100 or len(kinds) > len(KINDS) / 2
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < BYTES


def refused(folder: Path) -> str | None:
    """What is wrong with how a damaged folder is met; None when it is refused as it should be, by library and tool."""
    try:
        use(folder)
        return "was loaded"
    except ValueError as error:
        if str(folder) not in str(error) or len(str(error)) > 1000:
            return f"names no file, or at length: {error!r:.300}"
    except Exception as error:  # noqa: BLE001 - any other kind is what is looked for
        return f"{error!r:.300}"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = index(["--verify", str(folder)])
    message = err.getvalue()
    if code != 2 or not message.startswith("error: ") or message.count("\n") != 1:
        return f"--verify: exit code {code}, {message!r:.300}"
    return None


# Changes: what was changed is returned for messages.


def token_file(draw: random.Random, folder: Path, suffix: str) -> Path:
    """A token file with at least one document."""
    least = 62 if suffix == "idx" else 2
    return draw.choice(sorted(path for path in folder.glob(f"*.{suffix}") if path.stat().st_size >= least))


def flip_bit(path: Path, at: int, bit: int) -> str:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at} of {path.name}"


def flip(draw: random.Random, folder: Path, other: Path) -> str:
    path = draw.choice([path for path in sorted(folder.iterdir()) if path.stat().st_size])
    return flip_bit(path, draw.randrange(path.stat().st_size), draw.randrange(8))


def flip_header(draw: random.Random, folder: Path, other: Path) -> str:
    return flip_bit(token_file(draw, folder, "idx"), draw.randrange(34), draw.randrange(8))


def resize(draw: random.Random, folder: Path, other: Path) -> str:
    path = draw.choice(sorted(folder.iterdir()))
    size = path.stat().st_size
    sizes = [0, 1, 8, size // 2, size - 1, size - 2, size + 1, size + 2, size + 4096, 1 << 32]
    new = draw.choice([new for new in sizes if new >= 0 and new != size])
    os.truncate(path, new)
    return f"{path.name} from {size} to {new} bytes"


def replace(draw: random.Random, folder: Path, other: Path) -> str:
    path = draw.choice(sorted(folder.iterdir()))
    how = draw.choice(
        ["nothing", "folder", "pipe", "socket", "link to itself", "link to the same bytes", "link to nothing"]
    )
    shutil.copyfile(path, folder.parent / "elsewhere")
    path.unlink()
    match how:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "socket":
            os.mknod(path, 0o140644)
        case "link to itself":
            path.symlink_to(path.name)
        case "link to the same bytes":
            path.symlink_to(folder.parent / "elsewhere")
        case "link to nothing":
            path.symlink_to("/nowhere")
    return f"{path.name} by {how}"


def swap(draw: random.Random, folder: Path, other: Path) -> str:
    path = draw.choice([path for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".idx", ".bytes")])
    candidates = [*folder.glob(f"*{path.suffix}"), *other.glob(f"*{path.suffix}")]
    source = draw.choice([file for file in sorted(candidates) if file.read_bytes() != path.read_bytes()])
    shutil.copyfile(source, path)
    return f"{path.name} by {source.parent.name}/{source.name}"


def stray(draw: random.Random, folder: Path, other: Path) -> str:
    """One more file, which would change the tokenizer or its roles."""
    if (folder / "tokenizer.json").exists():
        shutil.copyfile(other / "tokenizer.model", folder / "another.model")
        return "another.model"
    value = draw.choice(
        [{"eos_token": "a"}, {"eos_token": 5}, [1], {"eos_token_id": 100}, {"eos_token_id": "x"}, {"pad_token": {}}]
    )
    value = {"pad_token": {"content": [1]}} if value == {"pad_token": {}} else value
    (folder / "tokenizer_config.json").write_text(json.dumps(value))
    return f"tokenizer_config.json {value}"


def rewrite(folder: Path, values: Any, sign: bool) -> None:
    """Replace dataset.json; `sign`: with the digest that its author would have written."""
    if sign:
        values.pop("digest", None)
        values["digest"] = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    (folder / "dataset.json").write_text(json.dumps(values))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in list(inside) for place in [(value, key), *places(item)]]


def read(folder: Path) -> Any:
    """dataset.json, in the earlier format without what decides nothing there: nothing can tell whether that is right."""
    values = json.loads((folder / "dataset.json").read_text())
    if values["format_version"] == 1:
        del values["options"], values["inputs"], values["tokenizer"]["file"]
        for domain in values["domains"].values():
            del domain["empty_documents"]
            for split in domain["splits"].values():
                del split["bytes"]
    return values


def set_value(draw: random.Random, folder: Path, other: Path) -> str:
    values = read(folder)
    container, key = draw.choice(places(values))
    old = container[key]
    value = draw.choice([value for value in EVIL_VALUES if value != old or type(value) is not type(old)])
    container[key] = value
    rewrite(folder, values, sign=False)
    return f"{key}={value!r:.40}"


def drop_key(draw: random.Random, folder: Path, other: Path) -> str:
    values = read(folder)
    domains = ("en", "ja") if values["format_version"] == 1 else ()  # one less is a data set of its own
    container, key = draw.choice(
        [place for place in places(values) if isinstance(place[1], str) and place[1] not in domains]
    )
    del container[key]
    rewrite(folder, values, sign=False)
    return f"without {key}"


def rename_domain(draw: random.Random, folder: Path, other: Path) -> str:
    values = read(folder)
    name = draw.choice(["x", "", ".", "..", "../en", "a/b", "e\0n", "日本", "x" * 300, "EN"])
    values["domains"][name] = values["domains"].pop("en")
    rewrite(folder, values, sign=values["format_version"] > 1)
    return f"en to {name!r:.20}"


def text(draw: random.Random, folder: Path, other: Path) -> str:
    path, value = draw.choice(sorted(folder.glob("*.json"))), draw.choice(EVIL_TEXTS)
    path.write_text(value)
    return f"{path.name}: {value[:20]!r}"


def set_signed(draw: random.Random, folder: Path, values: Any, candidates: list[tuple[Any, str]]) -> str:
    """Another value at one of the places, in a dataset.json whose digest is right."""
    container, key = draw.choice(candidates)
    old = container[key]
    evil = [value for value in EVIL_VALUES if value != old and not (key == "file" and value is None)]
    value = (
        draw.choice([old + 1, abs(old - 1), 2 * old])
        if isinstance(old, int) and draw.random() < 0.7
        else draw.choice(evil)
    )
    container[key] = value
    rewrite(folder, values, sign=True)
    return f"{key}={value!r:.40}"


def signed_tokenizer(draw: random.Random, folder: Path, other: Path) -> str:
    values = read(folder)
    keys = ("eod", "eod", "vocab_size", "fingerprint", "file", "files")
    return set_signed(draw, folder, values, [(values["tokenizer"], key) for key in keys])


def signed_sizes(draw: random.Random, folder: Path, other: Path) -> str:
    values = read(folder)
    split = values["domains"]["ja"]["splits"]["train"]
    sizes = [(values, "dtype"), (values, "domains"), (split, "documents"), (split, "tokens"), (split["text"], "bytes")]
    digests = [(split, "content"), (split["text"], "sha256"), (split["content"], "idx")]
    return set_signed(draw, folder, values, sizes + digests)


def sign_file(folder: Path, path: Path) -> None:
    """Record the present content of a token file."""
    values = read(folder)
    domain, split = path.stem.split("_")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    values["domains"][domain]["splits"][split]["content"][path.suffix[1:]] = digest
    rewrite(folder, values, sign=True)


def signed_index(draw: random.Random, folder: Path, other: Path) -> str:
    """A length, position or boundary that cannot be, with digests that fit."""
    path = token_file(draw, folder, "idx")
    data = bytearray(path.read_bytes())
    (count,) = struct.unpack_from("<Q", data, 18)
    arrays = [("length", "<i", 34, count), ("position", "<q", 34 + 4 * count, count)]
    field, form, start, rows = draw.choice([*arrays, ("boundary", "<q", 34 + 12 * count, count + 1)])
    row, size = draw.randrange(rows), struct.calcsize(form)
    (old,) = struct.unpack_from(form, data, start + row * size)
    most = 2 ** (8 * size - 1)
    new = draw.choice([-1, -most, most - 1, old - 1000, old + 1000, old + 1 + count])
    struct.pack_into(form, data, start + row * size, new)
    path.write_bytes(data)
    sign_file(folder, path)
    return f"{field} {row} of {path.name} from {old} to {new}"


def signed_ids(draw: random.Random, folder: Path, other: Path) -> str:
    """An id beyond the vocabulary, with digests that fit."""
    path = token_file(draw, folder, "bin")
    ids = np.fromfile(path, np.uint16)
    new = draw.choice([load_dataset(folder).vocab_size, 5000, 65535])
    ids[draw.randrange(len(ids))] = new
    ids.tofile(path)
    sign_file(folder, path)
    return f"an id of {path.name} to {new}"


Change = Callable[[random.Random, Path, Path], str]
UNSIGNED: list[Change] = [flip_header, resize, replace, set_value, drop_key, rename_domain, text]
UNSIGNED_KINDS = {change.__name__: change for change in UNSIGNED}
KINDS = UNSIGNED_KINDS | {
    c.__name__: c for c in (flip, swap, stray, signed_tokenizer, signed_sizes, signed_index, signed_ids)
}
