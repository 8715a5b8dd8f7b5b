"""The index: exact cover, strict parsing of what nobody vouches for."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.checkpoint.format import MANIFEST, open_checkpoint
from recipes.checkpoint.manifest import MAX_BOXES, Manifest, ShardRecord, StoredBox, check_cover

SHA = "0" * 64


def box(offsets: tuple[int, ...], shape: tuple[int, ...], key: str = "k") -> StoredBox:
    return StoredBox("f.safetensors", key, offsets, shape)


def manifest_dict() -> dict[str, Any]:
    """A legal manifest: one 4 x 2 matrix in two files."""
    files = [f"model-0000{i}-of-00002.safetensors" for i in range(2)]
    boxes = [{"file": file, "key": "w", "offsets": [2 * i, 0], "shape": [2, 2]} for i, file in enumerate(files)]
    return {
        "format": "sparse-pretraining-recipes/checkpoint",
        "version": 1,
        "step": 10,
        "committed_at": 1.5,
        "files": {file: {"kind": "model", "size": 100, "sha256": SHA} for file in files},
        "tensors": {"model": {"w": {"dtype": "F32", "shape": [4, 2], "boxes": boxes}}},
    }


@st.composite
def some_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[StoredBox, ...]]:
    """A small shape and boxes inside it that cover it often, but by no means always."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=0, max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, 4))):
        offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
        boxes.append(box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))))
    return shape, tuple(boxes)


@settings(max_examples=300, deadline=None)
@given(some_boxes())
def test_cover_agrees_with_counting_every_element(case: tuple[tuple[int, ...], tuple[StoredBox, ...]]) -> None:
    shape, boxes = case
    count = np.zeros(shape, dtype=int)
    for b in boxes:
        count[tuple(slice(o, o + s) for o, s in zip(b.offsets, b.shape, strict=True))] += 1
    if (count == 1).all() and not any(0 in b.shape for b in boxes):
        check_cover("w", shape, boxes)
    else:
        with pytest.raises(ValueError, match=r"hole|overlap|empty"):
            check_cover("w", shape, boxes)


@pytest.mark.parametrize(
    ("shape", "boxes", "message"),
    [
        ((4,), [box((0,), (2,)), box((0,), (2,))], "overlap"),
        ((4,), [box((0,), (2,)), box((3,), (1,))], "hole: the boxes hold 3 of the 4"),
        ((4,), [], "hole"),
        ((4,), [box((2,), (3,))], "not inside"),
        ((4,), [box((-1,), (4,))], "not inside"),
        ((4,), [box((0, 0), (4, 1))], "not inside"),
        ((4,), [box((0,), (4,)), box((4,), (0,))], "boxes is empty"),
        ((), [box((), ()), box((), ())], "overlap"),
        ((0, 3), [], "empty tensor"),
        ((1,), [box((0,), (1,))] * (MAX_BOXES + 1), "at most"),
    ],
)
def test_cover_faults(shape: tuple[int, ...], boxes: list[StoredBox], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cover("w", shape, tuple(boxes))


def test_legal_manifest_survives_json() -> None:
    manifest = Manifest.parse(json.dumps(manifest_dict()))
    assert Manifest.parse(manifest.to_json()) == manifest
    assert json.loads(manifest.to_json()) == manifest_dict()


FIRST = "model-00000-of-00002.safetensors"
FAULTS: dict[str, tuple[list[Any], Any, str]] = {
    "other format": (["format"], "pickle", "'format' is 'pickle'"),
    "newer version": (["version"], 2, "reads version 1"),
    "true as a number": (["step"], True, "'step' must be int"),
    "negative step": (["step"], -1, "must be >= 0"),
    "step as text": (["step"], "10", "'step' must be int"),
    "files as list": (["files"], [], "'files' must be dict"),
    "negative size": (["files", FIRST, "size"], -1, "must be >= 0"),
    "short hash": (["files", FIRST, "sha256"], "00", "64 hexadecimal"),
    "kind is no identifier": (["files", FIRST, "kind"], "../x", "lower-case"),
    "file of another kind": (["files", FIRST, "kind"], "rng", "not among the files of kind 'model'"),
    "boxes larger than their file": (["files", FIRST, "size"], 16, "cannot hold boxes of 16 bytes"),
    "kind holds no object": (["tensors", "model"], 3, "must be an object"),
    "tensor holds no object": (["tensors", "model", "w"], None, "must be an object"),
    "unknown dtype": (["tensors", "model", "w", "dtype"], "O", "dtype 'O' is none of"),
    "huge dimension": (["tensors", "model", "w", "shape"], [2**70, 2], "integers in"),
    "fractional dimension": (["tensors", "model", "w", "shape"], [4.0, 2], "integers in"),
    "hole": (["tensors", "model", "w", "shape"], [5, 2], "hole"),
    "boxes as object": (["tensors", "model", "w", "boxes"], {}, "must be a list"),
    "file that is not listed": (
        ["tensors", "model", "w", "boxes", 0, "file"],
        "../../etc/passwd",
        "not among the files",
    ),
    "duplicate box": (["tensors", "model", "w", "boxes", 1, "offsets"], [0, 0], "overlap"),
    "key without text": (["tensors", "model", "w", "boxes", 0, "key"], 7, "'key' must be str"),
    "box outside": (["tensors", "model", "w", "boxes", 0, "shape"], [9, 2], "not inside"),
}


@pytest.mark.parametrize(("path", "value", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_damaged_field_is_named(path: list[Any], value: Any, message: str) -> None:
    data = manifest_dict()
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        Manifest.parse(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, "\x00", '{"format": 1e999}', "9" * 5000])
def test_what_is_no_manifest_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|must be"):
        Manifest.parse(text)


@pytest.mark.parametrize(
    "name",
    ["../up.safetensors", "/etc/passwd", "a/b", ".hidden", "..", "", "manifest.json", "a\x00b", "a\n", "x" * 201],
)
def test_file_names_that_leave_the_folder_are_refused(name: str) -> None:
    data = manifest_dict()
    data["files"][name] = {"kind": "model", "size": 1, "sha256": SHA}
    with pytest.raises(ValueError, match="not a plain name"):
        Manifest.parse(json.dumps(data))


def test_one_key_under_two_names_is_refused() -> None:
    data = manifest_dict()
    data["tensors"]["model"]["w2"] = copy.deepcopy(data["tensors"]["model"]["w"])
    with pytest.raises(ValueError, match="used twice"):
        Manifest.parse(json.dumps(data))


def leaves(data: Any, path: tuple = ()) -> list[tuple]:
    """The paths to everything inside a JSON value."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, value in inner for found in ((*path, key), *leaves(value, (*path, key)))]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(leaves(manifest_dict())), VALUES)
def test_any_value_in_any_place_is_read_or_refused(path: tuple, value: Any) -> None:
    manifest = manifest_dict()
    place: Any = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    try:
        parsed = Manifest.parse(json.dumps(manifest))
    except ValueError:
        return
    for entry in parsed.tensors.get("model", {}).values():  # whatever is accepted is covered
        assert sum(math.prod(b.shape) for b in entry.boxes) == math.prod(entry.shape)


def test_record_survives_json_and_is_checked(save: Any) -> None:
    manifest = open_checkpoint(save(1)).manifest
    name, file = next(iter(manifest.files.items()))
    record = ShardRecord(name, file, manifest.tensors.get(file.kind, {}))
    sent = json.loads(json.dumps(record.to_dict()))
    assert ShardRecord.from_dict(sent) == record
    sent["file"]["sha256"] = "no hash"
    with pytest.raises(ValueError, match="64 hexadecimal"):
        ShardRecord.from_dict(sent)


def test_open_names_the_manifest_and_a_way_out(save: Any) -> None:
    folder: Path = save(1)
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"step_00000001/manifest\.json: not JSON.*take another step"):
        open_checkpoint(folder)
