import struct
import subprocess
import sys

import numpy as np
import pytest

from recipes.data.blend import Blend
from recipes.data.indexed import (
    IndexedSource,
    IndexedWriter,
    document_offsets,
    megatron_indexed_dataset,
    narrow,
    num_windows,
    read_header,
)


def write(prefix, documents, dtype):
    builder = megatron_indexed_dataset().IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for ids in documents:
        builder.add_document(narrow(np.asarray(ids), np.dtype(dtype)), [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def test_ids_of_a_large_vocabulary_survive(tmp_path):
    ids = [0, 65499, 65500, 65535, 65536, 151935]
    dtype = megatron_indexed_dataset().DType.optimal_dtype(151936)
    source = IndexedSource(write(tmp_path / "x", [ids, ids[::-1]], dtype), "x")
    assert source.ids.tolist() == ids + ids[::-1] and source.offsets.tolist() == [0, 6, 12]


@pytest.mark.parametrize(("dtype", "bad"), [(np.uint16, 65536), (np.uint16, -1), (np.int32, 2**31)])
def test_an_id_that_does_not_fit_is_refused(dtype, bad):
    fits = np.array([0, np.iinfo(dtype).max])
    assert narrow(fits, np.dtype(dtype)).tolist() == fits.tolist()
    with pytest.raises(ValueError, match=f"token id {bad} does not fit {np.dtype(dtype).name}"):
        narrow(np.array([1, bad]), np.dtype(dtype))


def test_offsets_beyond_32_bits_stay_positive():
    lengths = np.full(3, 10**9, np.int32)
    offsets = document_offsets(lengths, np.array([0, 1, 3]))
    assert offsets.dtype == np.int64 and offsets.tolist() == [0, 10**9, 3 * 10**9]
    writer = megatron_indexed_dataset()._IndexWriter("unused", np.int32)
    assert writer._sequence_pointers(lengths) == [0, 4 * 10**9, 8 * 10**9]


def test_documents_of_several_sequences_are_joined(tmp_path):
    builder = megatron_indexed_dataset().IndexedDatasetBuilder(f"{tmp_path}/x.bin", dtype=np.uint16)
    builder.add_document(np.arange(5), [2, 3])
    builder.add_document(np.arange(1), [1])
    builder.finalize(f"{tmp_path}/x.idx")
    assert IndexedSource(tmp_path / "x", "x").offsets.tolist() == [0, 5, 6]
    assert read_header(tmp_path / "x").num_documents == 2


def test_an_empty_split_can_be_opened(tmp_path):
    source = IndexedSource(write(tmp_path / "x", [], np.uint16), "x")
    assert len(source) == 0 and source.offsets.tolist() == [0]


def test_damaged_files_are_named(tmp_path):
    write(tmp_path / "x", [[1, 2, 3], [4]], np.int32)
    idx, data = tmp_path / "x.idx", tmp_path / "x.bin"
    good_idx, good_data = idx.read_bytes(), data.read_bytes()

    def refused(match):
        with pytest.raises(ValueError, match=match):
            IndexedSource(tmp_path / "x", "x")

    idx.write_bytes(good_idx[:-1])
    refused(r"x\.idx: 81 bytes, its header promises 82")
    idx.write_bytes(b"garbage")
    refused(r"x\.idx: not a Megatron index file")
    idx.write_bytes(good_idx[:17] + b"\x07" + good_idx[18:])
    refused("dtype code 7")
    idx.write_bytes(good_idx)
    data.write_bytes(good_data[:-1])
    refused(r"x\.bin: 15 bytes is no multiple of int32")
    data.write_bytes(good_data[:-4])
    refused("do not add up to the 3 ids")
    data.unlink()
    refused(r"x\.bin: no such file")


def test_an_index_is_believed_only_where_its_arrays_agree(tmp_path):
    write(tmp_path / "x", [[1, 2, 3], [4], [5, 6]], np.int32)
    idx = tmp_path / "x.idx"
    good = idx.read_bytes()
    lengths, pointers, boundaries = 34, 34 + 12, 34 + 12 + 24  # of three sequences
    for at, form, value, message in (
        (lengths, "<i", -3, "sequence 0 has a length of -3"),
        (lengths, "<i", 2**31 - 1, "its documents do not add up to the 6 ids"),
        (
            pointers + 8,
            "<q",
            2**62,
            "sequence 1 does not begin where the one before it ends: at byte 4611686018427387904",
        ),
        (pointers + 8, "<q", 13, "sequence 1 does not begin"),
        (pointers, "<q", -4, "sequence 0 does not begin"),
        (boundaries, "<q", 1, "documents must go from sequence 0 to 3"),
        (boundaries + 8, "<q", 10**9, "documents must go"),
        (boundaries + 24, "<q", -1, "documents must go"),
    ):
        damaged = bytearray(good)
        struct.pack_into(form, damaged, at, value)
        idx.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"x\.idx: {message}"):
            IndexedSource(tmp_path / "x", "x")
    for count, at in ((2**63, 18), (2**60, 26)):
        damaged = bytearray(good)
        struct.pack_into("<Q", damaged, at, count)
        idx.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"x\.idx: .* bytes, its header promises"):
            IndexedSource(tmp_path / "x", "x")


def test_ids_beyond_the_vocabulary_are_named_with_file_and_domain(tmp_path):
    write(tmp_path / "x", [[1, 2, 99]], np.uint16)
    assert len(IndexedSource(tmp_path / "x", "en", vocab_size=100)) == 3
    with pytest.raises(
        ValueError, match=r"x\.bin \(domain en\): token id 99 is not in the vocabulary, legal are 0 to 98"
    ):
        IndexedSource(tmp_path / "x", "en", vocab_size=99)
    source = IndexedSource(tmp_path / "x", "en")
    with pytest.raises(ValueError, match=r"x\.bin \(domain en\), sample 0: token id 99"):
        Blend([source], [1.0], seq_length=2, seed=1, vocab_size=99).sample(0)
    with pytest.raises(ValueError, match=r"y\.bin: token id 7 is not in the vocabulary"):
        IndexedWriter(tmp_path / "y", np.dtype(np.uint16), vocab_size=7).add(np.array([7]))


@pytest.mark.parametrize(("tokens", "windows"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_windows_of_eight_tokens_share_one_id(tokens, windows):
    assert num_windows(tokens, 8) == windows


def test_checks_need_neither_torch_nor_megatron():
    code = (
        "import sys, recipes.data.blend, recipes.data.dataset, recipes.data.loader, recipes.data.packing;"
        "sys.exit(bool({'torch', 'megatron', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
