"""Shards and reading: every bit comes back, from any split, and damage is named instead of read."""

import errno
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from recipes.checkpoint import format as checkpoint_format
from recipes.checkpoint.format import (
    MANIFEST,
    TRAINER,
    Box,
    Checkpoint,
    open_checkpoint,
    shard_name,
    write_shard,
)
from recipes.checkpoint.manifest import DTYPES, Manifest

NAME = "embedding.weight"
OPTIMIZER_1 = shard_name("optimizer", 1, 2)
MODEL_1 = shard_name("model", 1, 2)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Arbitrary bit patterns: NaNs with payload, infinities, denormals, negative zeros."""
    numel = int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 256, numel * dtype.itemsize, dtype=np.uint8)
    if dtype is torch.bool:
        raw &= 1
    return torch.from_numpy(raw).view(dtype).reshape(shape)


Range = tuple[tuple[int, int], ...]  # (offset, size) per dimension


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Range]:
    """Boxes that tile `shape`: cut one of them in two along any dimension, a few times."""
    tiles: list[Range] = [tuple((0, n) for n in shape)]
    for _ in range(draw(st.integers(0, 5))):
        index = draw(st.integers(0, len(tiles) - 1))
        cuttable = [d for d, (_, size) in enumerate(tiles[index]) if size > 1]
        if cuttable:
            tile = tiles.pop(index)
            d = draw(st.sampled_from(cuttable))
            offset, size = tile[d]
            cut = draw(st.integers(1, size - 1))
            tiles += [(*tile[:d], part, *tile[d + 1 :]) for part in ((offset, cut), (offset + cut, size - cut))]
    return tiles


def slices(ranges: Range) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in ranges)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_part_from_any_tiling_equals_numpy_slicing(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    tensor = random_tensor(shape, dtype, data.draw(st.integers(0, 2**32 - 1)))
    tiles = data.draw(tilings(shape))
    owner = [data.draw(st.integers(0, 2)) for _ in tiles]
    wanted = tuple((o := data.draw(st.integers(0, n)), data.draw(st.integers(0, n - o))) for n in shape)
    with tempfile.TemporaryDirectory() as folder:
        records = [
            write_shard(
                Path(folder),
                shard_name("any", rank, 3),
                "any",
                [
                    Box("w", shape, tuple(o for o, _ in tile), tensor[slices(tile)])
                    for tile, of in zip(tiles, owner, strict=True)
                    if of == rank
                ],
            )
            for rank in range(3)
        ]
        checkpoint = Checkpoint(Path(folder), Manifest.build(0, records, {}))
        part = checkpoint.read("any", "w", tuple(o for o, _ in wanted), tuple(s for _, s in wanted))
        assert bits(checkpoint.read("any", "w")) == bits(tensor)
        assert checkpoint.verify() == []
    expected = tensor.reshape(-1).view(torch.uint8).numpy().reshape(*shape, dtype.itemsize)[slices(wanted)]
    assert (part.dtype, tuple(part.shape)) == (dtype, tuple(s for _, s in wanted))
    assert bits(part) == expected.tobytes()


@pytest.mark.parametrize(
    ("pattern", "integer", "dtype"),
    [
        (0x7FA00001, torch.int32, torch.float32),
        (0x7FA1, torch.int16, torch.bfloat16),
        (-(2**63) + 1, torch.int64, torch.int64),
    ],
)
def test_signalling_nans_and_extremes_keep_their_bits(
    tmp_path: Path, pattern: int, integer: torch.dtype, dtype: torch.dtype
) -> None:
    tensor = torch.tensor([[pattern, 0]], dtype=integer).view(dtype)
    record = write_shard(tmp_path, "any.safetensors", "any", [Box.whole("w", tensor)])
    back = Checkpoint(tmp_path, Manifest.build(0, [record], {})).read("any", "w")
    assert back.dtype == dtype and back.view(integer).tolist() == [[pattern, 0]]


def test_strided_empty_and_mixed_types_share_a_file(tmp_path: Path) -> None:
    boxes = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "grad": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
    }
    record = write_shard(tmp_path, "a.safetensors", "model", [Box.whole(n, t) for n, t in boxes.items()])
    checkpoint = Checkpoint(tmp_path, Manifest.build(0, [record], {}))
    assert all(torch.equal(checkpoint.read("model", name), tensor) for name, tensor in boxes.items())
    assert checkpoint.tensors("model")["transposed"] == ((3, 2), torch.float32)
    loaded = load_file(tmp_path / "a.safetensors")  # an independent reader agrees
    assert loaded.keys() == boxes.keys() and all(torch.equal(loaded[n], t) for n, t in boxes.items())
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    raw = (tmp_path / "a.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:start]).items():  # so that a mapped file can be read in place
        if name != "__metadata__":
            assert (start + entry["data_offsets"][0]) % boxes[name].element_size() == 0


def test_recorded_hash_and_size_are_those_of_the_file(tmp_path: Path) -> None:
    large = Box.whole("large", torch.zeros(1 << 19))  # hashed beside the write
    record = write_shard(tmp_path, "a.safetensors", "model", [Box.whole("small", torch.ones(2)), large])
    assert record.file.size == os.path.getsize(tmp_path / "a.safetensors")
    assert Checkpoint(tmp_path, Manifest.build(0, [record], {})).verify() == []


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box("w", (4,), (3,), torch.ones(2))], "not inside"),
        ([Box.whole("w", torch.ones(2)), Box.whole("w", torch.ones(2))], "twice"),
        ([Box.whole("", torch.ones(2))], "empty"),
        ([Box.whole("__metadata__", torch.ones(2))], "reserved"),
        ([Box.whole("w", torch.ones(2, dtype=torch.complex64))], "complex64 cannot be stored"),
        ([Box("w", (4,), (0,), torch.ones(2)), Box("w", (5,), (2,), torch.ones(2))], "one box is F32"),
    ],
)
def test_illegal_boxes_are_refused(tmp_path: Path, boxes: list[Box], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_shard(tmp_path, "a.safetensors", "model", boxes)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_is_never_overwritten_nor_written_elsewhere(tmp_path: Path) -> None:
    write_shard(tmp_path, "a.safetensors", "model", [])
    with pytest.raises(FileExistsError):
        write_shard(tmp_path, "a.safetensors", "model", [])
    with pytest.raises(ValueError, match="plain name"):
        write_shard(tmp_path, "../a.safetensors", "model", [])


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_format.os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device.*a\.safetensors") as caught:
        write_shard(tmp_path, "a.safetensors", "model", [Box.whole("w", torch.ones(2))])
    assert caught.value.errno == errno.ENOSPC


def test_weights_only_needs_only_weights(save: Callable[..., Path]) -> None:
    folder = save(3, lr=1e-3)
    for file in folder.glob("optimizer-*"):
        file.unlink()
    for file in folder.glob("rng-*"):
        file.unlink()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.step == 3 and checkpoint.trainer == {"step": 3, "lr": 1e-3}
    checkpoint.require("model", "trainer")
    assert set(checkpoint.tensors("model")) == {NAME, "norm.weight"}
    assert torch.equal(checkpoint.read("model", NAME), torch.arange(24.0).view(6, 4) + 3000)
    with pytest.raises(ValueError, match=r"optimizer-00000-of-00002\.safetensors: is missing"):
        checkpoint.require("model", "optimizer")
    with pytest.raises(ValueError, match=r"optimizer-0000\d-of-00002\.safetensors: is missing"):
        checkpoint.read("optimizer", f"exp_avg/{NAME}")


def test_unknown_names_and_ranges_are_refused(save: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(save(1))
    for kind, name, message in (("model", "x", "no model tensor 'x'"), ("ema", NAME, "only model, optimizer, rng")):
        with pytest.raises(ValueError, match=message):
            checkpoint.read(kind, name)
    for offsets, shape in (((0, 1), (6, 4)), ((-1, 0), (1, 1)), ((0,), (6,)), ((7, 0), None)):
        with pytest.raises(ValueError, match="not inside"):
            checkpoint.read("model", NAME, offsets, shape)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def flip(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def huge_header(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(struct.pack("<Q", 1 << 40))


def other_shape(path: Path) -> None:
    """The same size and valid, but another shape than the manifest's."""
    data = path.read_bytes()
    assert data.count(b'"shape":[3,4]') == 1
    path.write_bytes(data.replace(b'"shape":[3,4]', b'"shape":[4,3]'))


def link_away(path: Path) -> None:
    """The very same bytes, but reached through a link."""
    path.rename(path.with_name(".elsewhere"))
    path.symlink_to(".elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def not_finite(path: Path) -> None:
    """One number of the size of the others."""
    data = path.read_bytes()
    path.write_bytes(data[:-4] + struct.pack("<f", float("nan")))


def sign(folder: Path, name: str) -> None:
    """Record the present size and checksum of a file."""
    manifest, data = json.loads((folder / MANIFEST).read_text()), (folder / name).read_bytes()
    manifest["files"][name] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "bytes instead of"),
        (Path.unlink, "is missing"),
        (link_away, "cannot be read as a regular file"),
        (pipe, "not a regular file"),
        *((damage, "sha256 differs") for damage in (huge_header, other_shape, not_finite, flip)),
    ],
)
def test_damaged_shards_are_never_read(save: Callable[..., Path], damage: Callable[[Path], Any], message: str) -> None:
    folder = save(1)
    damage(folder / MODEL_1)
    refused(folder, message)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "model-00001-of-00002.safetensors: Error while deserializing header"),
        (huge_header, "header too large"),
        (other_shape, r"is F32 \[4, 3\], the manifest says F32 \[3, 4\]"),
        (not_finite, r"'embedding.weight\[3:6,0:4\]' is not finite"),
    ],
)
def test_neither_are_shards_with_the_right_checksum_of_wrong_content(
    save: Callable[..., Path], damage: Callable[[Path], Any], message: str
) -> None:
    folder = save(1)
    damage(folder / MODEL_1)
    sign(folder, MODEL_1)
    refused(folder, message)


def refused(folder: Path, message: str) -> None:
    """Both ways to look at the second shard of weights see what is wrong; the others are as they were."""
    problems = open_checkpoint(folder).verify()
    assert len(problems) == 1 and MODEL_1 in problems[0]
    with pytest.raises(ValueError, match=message):
        open_checkpoint(folder).read("model", NAME)
    assert open_checkpoint(folder).read("model", "norm.weight").tolist() == [1.0] * 4  # the other file is untouched


def test_a_shard_that_agrees_with_its_hash_but_not_with_the_index(save: Callable[..., Path]) -> None:
    folder = save(1)
    text = (folder / MANIFEST).read_text().replace('"key": "norm.weight"', '"key": "norm.other"')
    (folder / MANIFEST).write_text(text)
    problems = open_checkpoint(folder).verify()
    assert len(problems) == 1 and "norm.other" in problems[0]


@pytest.mark.parametrize("damage", [link_away, pipe, Path.unlink])
def test_a_manifest_must_be_a_regular_file(save: Callable[..., Path], damage: Callable[[Path], Any]) -> None:
    folder = save(1)
    damage(folder / MANIFEST)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("content", "message"), [(b"[1]", "must be an object"), (b"{", "not JSON"), (b"[" * 100_000, "not JSON")]
)
def test_trainer_state_is_checked(save: Callable[..., Path], content: bytes, message: str) -> None:
    folder = save(1)
    (folder / TRAINER).write_bytes(content)
    with pytest.raises(ValueError, match="bytes instead of"):
        _ = open_checkpoint(folder).trainer
    sign(folder, TRAINER)
    with pytest.raises(ValueError, match=message):
        _ = open_checkpoint(folder).trainer


def test_ranks_share_the_bytes_out(save: Callable[..., Path]) -> None:
    folder = save(1)
    shares = [open_checkpoint(folder) for _ in range(3)]
    for number, checkpoint in enumerate(shares):
        assert checkpoint.verify(part=(number, 3)) == []
    looked_at = sorted(name for checkpoint in shares for name in checkpoint.trusted)
    assert looked_at == sorted(shares[0].manifest.files)
    flip(folder / MODEL_1)
    assert [len(open_checkpoint(folder).verify(part=(number, 3))) for number in range(3)].count(1) == 1
    assert "no files of kind 'ema'" in open_checkpoint(folder).verify(["ema", "model"])[0]


def test_a_file_is_hashed_once(save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: hashed.append(file.name) or digest(file, name))
    checkpoint = open_checkpoint(save(1))
    for _ in range(3):
        checkpoint.read("model", NAME)
    assert len(hashed) == 2
    assert checkpoint.verify() == [] and len(hashed) == len(checkpoint.manifest.files)


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_weights_and_moments_that_are_not_finite_are_not_written(tmp_path: Path, kind: str) -> None:
    for value in (float("nan"), float("-inf")):
        with pytest.raises(ValueError, match=f"{kind} tensor 'w' is not finite"):
            write_shard(tmp_path, "a.safetensors", kind, [Box.whole("w", torch.tensor([1.0, value]))])
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_larger_than_the_files_beside_it_is_not_parsed(save: Callable[..., Path]) -> None:
    folder = save(1)
    with open(folder / MANIFEST, "ab") as file:
        file.truncate(checkpoint_format._MAX_JSON_BYTES * 2)
    with pytest.raises(ValueError, match=r"manifest\.json: \d+ bytes, more than the limit"):
        open_checkpoint(folder)


def test_only_safetensors_and_json_are_written(save: Callable[..., Path]) -> None:
    assert {path.suffix for path in save(1).iterdir()} == {".safetensors", ".json"}
