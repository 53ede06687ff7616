"""The .bin/.idx files: what is written is read back, and damaged or foreign files are named."""

import pickle
import struct

import numpy as np
import pytest

from megatron.data.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    best_fitting_dtype,
    infer_dataset_impl,
    make_builder,
    make_dataset,
)
from megatron.errors import DataError


def write(prefix, sequences, dtype=np.uint16):
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for sequence in sequences:
        builder.add_item(sequence)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.float32, np.float64, np.uint16])
def test_every_item_type_comes_back(dtype, tmp_path):
    sequences = [np.arange(5, dtype=dtype), np.array([], dtype=dtype), np.array([7, 1], dtype=dtype)]
    dataset = make_dataset(write(tmp_path / "data", sequences, dtype))
    assert dataset.dtype == dtype and len(dataset) == 3
    for read, written in zip(dataset[:], sequences, strict=True):
        np.testing.assert_array_equal(read, written)


def test_index_is_the_documented_layout(tmp_path):
    write(tmp_path / "data", [[1, 2, 3], [4], [5, 6]], np.int32)
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 4)
    expected += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 12, 16) + struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "data.idx").read_bytes() == expected
    assert (tmp_path / "data.bin").read_bytes() == struct.pack("<6i", 1, 2, 3, 4, 5, 6)


def test_several_sequences_in_a_document(tmp_path):
    builder = make_builder(str(tmp_path / "data.bin"), vocab_size=300)
    for sequence in ([1], [2, 3], [4]):
        builder.add_item(sequence)
        if sequence != [1]:
            builder.end_document()
    builder.finalize(str(tmp_path / "data.idx"))
    assert make_dataset(str(tmp_path / "data"), "mmap").doc_idx.tolist() == [0, 2, 3]


def test_part_of_a_sequence(tmp_path):
    dataset = make_dataset(write(tmp_path / "data", [[9], list(range(10, 20))]))
    assert dataset.get(1, 3).tolist() == list(range(13, 20))
    assert dataset.get(1, 3, 2).tolist() == [13, 14]
    for wrong in [(1, 9, 2), (1, -1), (2,), (-1,)]:
        with pytest.raises(IndexError):
            dataset.get(*wrong)


def test_views_are_read_only(tmp_path):
    with pytest.raises(ValueError):
        make_dataset(write(tmp_path / "data", [[1, 2]]))[0][0] = 3


def test_a_pickled_data_set_opens_its_files_again(tmp_path):
    dataset = make_dataset(write(tmp_path / "data", [list(range(1000))]))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 500
    assert pickle.loads(pickled)[0].tolist() == list(range(1000))


@pytest.mark.parametrize(
    "vocab_size, dtype", [(300, np.uint16), (65499, np.uint16), (65500, np.int32), (None, np.int32)]
)
def test_item_type_fits_the_vocabulary(vocab_size, dtype):
    assert best_fitting_dtype(vocab_size) == dtype


def test_a_token_that_does_not_fit_is_refused(tmp_path):
    builder = make_builder(str(tmp_path / "data.bin"), vocab_size=300)
    for items in ([70000], [-1]):
        with pytest.raises((ValueError, OverflowError)):
            builder.add_item(items)
    builder.abandon()
    assert list(tmp_path.iterdir()) == []


def test_nothing_appears_before_the_end_and_the_old_data_stay(tmp_path):
    prefix = write(tmp_path / "data", [[1, 2, 3]])
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    builder.add_item([4, 5])
    assert make_dataset(prefix)[0].tolist() == [1, 2, 3]
    builder.abandon()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]
    assert make_dataset(prefix)[0].tolist() == [1, 2, 3]


def test_merged_data_sets_keep_their_documents(tmp_path):
    first, second = write(tmp_path / "a", [[1, 2], [3]]), write(tmp_path / "b", [[4], [5, 6, 7]])
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "c.bin"), np.uint16)
    builder.merge_file_(first)
    builder.merge_file_(second)
    builder.finalize(str(tmp_path / "c.idx"))
    dataset = make_dataset(str(tmp_path / "c"))
    assert [sequence.tolist() for sequence in dataset[:]] == [[1, 2], [3], [4], [5, 6, 7]]
    assert dataset.doc_idx.tolist() == [0, 1, 2, 3, 4]
    other = MMapIndexedDatasetBuilder(str(tmp_path / "d.bin"), np.int32)
    with pytest.raises(DataError, match="uint16"):
        other.merge_file_(first)
    other.abandon()


@pytest.mark.parametrize("cut", [1, 8, 60])
def test_a_truncated_index_is_named(cut, tmp_path):
    prefix = write(tmp_path / "data", [[1, 2, 3], [4]])
    content = (tmp_path / "data.idx").read_bytes()
    (tmp_path / "data.idx").write_bytes(content[:-cut])
    with pytest.raises(DataError, match=r"data\.idx is truncated"):
        MMapIndexedDataset(prefix)


@pytest.mark.parametrize("change, problem", [(-1, "is truncated"), (2, "does not belong to its index")])
def test_a_data_file_of_another_length_is_named(change, problem, tmp_path):
    prefix = write(tmp_path / "data", [[1, 2, 3], [4]])
    content = (tmp_path / "data.bin").read_bytes()
    (tmp_path / "data.bin").write_bytes(content[:change] if change < 0 else content + bytes(change))
    with pytest.raises(DataError, match=rf"data\.bin {problem}"):
        MMapIndexedDataset(prefix)


@pytest.mark.parametrize(
    "header, problem",
    [
        (b"", "not a token index"),
        (b"PK\x03\x04 something else entirely, a zip file", "not a token index"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 2, 8, 1, 2), "version 2"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 99, 1, 2), "item type 99"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2**62, 2**62), "truncated"),
    ],
)
def test_foreign_and_damaged_headers_are_named(header, problem, tmp_path):
    prefix = write(tmp_path / "data", [[1, 2, 3], [4]])
    (tmp_path / "data.idx").write_bytes(header)
    with pytest.raises(DataError, match=problem):
        make_dataset(prefix)


def test_missing_files_are_named(tmp_path):
    prefix = write(tmp_path / "data", [[1]])
    with pytest.raises(DataError, match="without .bin or .idx"):
        make_dataset(f"{prefix}.bin")
    (tmp_path / "data.bin").unlink()
    with pytest.raises(DataError, match=r"data\.bin not found.*prepare_data\.py"):
        make_dataset(prefix)


@pytest.mark.parametrize("sequences", [[], [[], []]])
def test_empty_data_are_refused(sequences, tmp_path):
    with pytest.raises(DataError, match="is empty"):
        make_dataset(write(tmp_path / "data", sequences))


def test_the_cached_format_is_recognised_and_refused(tmp_path):
    prefix = write(tmp_path / "data", [[1]])
    assert infer_dataset_impl(prefix) == "mmap"
    with pytest.raises(DataError, match="data_impl=cached"):
        make_dataset(prefix, "cached")
    (tmp_path / "data.idx").write_bytes(b"TNTIDX\0\0" + bytes(64))
    assert infer_dataset_impl(prefix) == "cached"
    for impl in ("infer", "mmap"):
        with pytest.raises(DataError, match="--dataset-impl mmap"):
            make_dataset(prefix, impl)


def test_warm_up_reads_both_files(tmp_path, monkeypatch):
    prefix = write(tmp_path / "data", [[1, 2]])
    read = []
    monkeypatch.setattr("megatron.data.indexed_dataset._read_through", read.append)
    make_dataset(prefix, skip_warmup=True)
    assert read == []
    make_dataset(prefix, skip_warmup=False)
    assert read == [f"{prefix}.idx", f"{prefix}.bin"]
