"""Samples against the token stream they are cut from, and the care taken of cached index maps."""

import pickle

import numpy as np
import pytest

from megatron.data import index_maps
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.index_maps import SampleRequest, build
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder, make_dataset
from megatron.errors import DataError


def write(prefix, documents, dtype=np.int32):
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for document in documents:
        builder.add_item(np.asarray(document, dtype=dtype))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return make_dataset(str(prefix))


def numbered_documents(lengths):
    """Documents whose tokens are all different: 0, 1, 2, ..."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def dataset_of(indexed, num_samples=10, num_epochs=None, documents=None, seq_length=7, name="train", **options):
    documents = np.arange(len(indexed)) if documents is None else np.asarray(documents)
    return GPT2Dataset(name, indexed.prefix, documents, indexed, num_samples, num_epochs, seq_length, 1234, **options)


@pytest.mark.parametrize(
    "lengths", [[5, 1, 30, 2, 8], [0, 3, 0, 0, 9, 1, 0], [1] * 20, [64], [7, 7, 7], [8, 8, 8], [15, 0]]
)
@pytest.mark.parametrize("num_samples", [1, 3, 50])
def test_packed_samples_are_the_stream_cut_every_seq_length(lengths, num_samples, tmp_path):
    documents = numbered_documents(lengths)
    dataset = dataset_of(write(tmp_path / "data", documents), num_samples)
    maps = dataset.maps
    stream = np.concatenate([documents[number] for number in maps.doc_idx])
    assert len(dataset) == (len(stream) - 1) // 7 >= num_samples
    assert sorted(maps.shuffle_idx) == list(range(len(dataset)))
    for index in range(len(dataset)):
        start = 7 * int(maps.shuffle_idx[index])
        assert dataset[index].keys() == {"text"}
        assert dataset[index]["text"].dtype == np.int64
        assert dataset[index]["text"].tolist() == stream[start : start + 8].tolist()
    # The fewest epochs that do, each with every document once.
    epochs = len(maps.doc_idx) // len(lengths)
    assert np.bincount(maps.doc_idx, minlength=len(lengths)).tolist() == [epochs] * len(lengths)
    assert epochs == 1 or ((epochs - 1) * sum(lengths) - 1) // 7 < num_samples


def test_positions_by_hand():
    """Documents of 0, 5, 0 and 4 tokens, a sample every 3: tokens 0, 3 and 6 begin one, 8 is the last token."""
    lengths = np.array([0, 5, 0, 4], dtype=np.int32)
    positions = index_maps.sample_positions(lengths, 3, np.arange(3))
    assert positions.tolist() == [[0, 0], [1, 3], [3, 1]]  # reading begins with the empty document, as in GPT-NeoX
    assert index_maps.sample_positions(lengths, 3, np.array([2])).tolist() == [[3, 1]]


def test_only_the_documents_of_the_split_are_read(tmp_path):
    dataset = dataset_of(write(tmp_path / "data", numbered_documents([20, 20, 20, 20])), 30, documents=[1, 2])
    seen = np.concatenate([dataset[index]["text"] for index in range(len(dataset))])
    assert seen.min() >= 20 and seen.max() < 60


def test_a_number_of_epochs_is_exact(tmp_path):
    dataset = dataset_of(write(tmp_path / "data", numbered_documents([50, 51])), None, num_epochs=2)
    assert len(dataset) == (2 * 101 - 1) // 7
    assert (tmp_path / "data_train_indexmap_Nonens_7sl_1234s_packedpi_ac_doc_idx.npy").is_file()


def test_another_seed_is_another_order(tmp_path):
    indexed = write(tmp_path / "data", numbered_documents([5] * 40))
    request = [SampleRequest("t", "", np.arange(40), indexed.sizes, 20, None, 7, seed) for seed in (1, 1, 2)]
    first, same, other = (build(one) for one in request)
    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
    assert not np.array_equal(first[0], other[0]) and not np.array_equal(first[2], other[2])


def test_labels_go_with_the_tokens(tmp_path):
    documents = numbered_documents([9, 4, 11])
    labels = [np.where(document % 2, document, -100) for document in documents]
    dataset = dataset_of(write(tmp_path / "text", documents), label_dataset=write(tmp_path / "label", labels))
    for index in range(len(dataset)):
        text, label = dataset[index]["text"], dataset[index]["label"]
        np.testing.assert_array_equal(label, np.where(text % 2, text, -100))


def test_labels_of_other_lengths_are_refused(tmp_path):
    text = write(tmp_path / "text", numbered_documents([9, 4]))
    with pytest.raises(DataError, match="does not match"):
        dataset_of(text, label_dataset=write(tmp_path / "label", numbered_documents([9, 5])))


@pytest.mark.parametrize("pack_impl", ["unpacked", "pack_until_overflow"])
def test_whole_documents(pack_impl, tmp_path):
    lengths = [3, 5, 20, 2, 8, 0, 4]
    documents = numbered_documents(lengths)
    dataset = dataset_of(write(tmp_path / "data", documents), 12, documents=[1, 2, 3, 4, 5, 6], pack_impl=pack_impl)
    assert len(dataset) == 12
    starts = {int(document[0]) for document in documents[1:] if len(document)}
    for index in range(12):
        text, label = dataset[index]["text"], dataset[index]["label"]
        assert text.shape == label.shape == (8,)
        kept = text[label != -100]
        np.testing.assert_array_equal(label[: len(kept)], kept)
        assert (label[len(kept) :] == -100).all() and (text[len(kept) :] == 0).all()
        # Cut into documents, each is whole, or chopped to the sample's length.
        left = kept.tolist()
        parts = 0
        while left:
            assert left[0] in starts
            document = next(one.tolist() for one in documents if len(one) and one[0] == left[0])
            assert left[: len(document)] == document[: len(left)]
            left, parts = left[len(document) :], parts + 1
        assert parts == 1 or pack_impl == "pack_until_overflow"
    if pack_impl == "unpacked":
        first_tokens = [dataset[int(index)]["text"][0] for index in np.argsort(dataset.maps.shuffle_idx)]
        assert first_tokens[:6] == [3, 8, 28, 30, 38, 3]  # document 5 is empty


def test_documents_too_long_are_left_out_if_not_to_be_chopped(tmp_path):
    indexed = write(tmp_path / "data", numbered_documents([9, 8, 20, 3]))
    dataset = dataset_of(indexed, 6, pack_impl="unpacked", allow_chopped=False)
    assert {int(dataset[index]["text"][0]) for index in range(6)} == {9, 37}
    with pytest.raises(DataError, match="allow_chopped=False"):
        dataset_of(indexed, 6, name="valid", documents=[0, 2], pack_impl="pack_until_overflow", allow_chopped=False)


def test_documents_without_a_label_that_counts_are_left_out(tmp_path):
    documents = numbered_documents([4, 5, 6])
    labels = [documents[0], np.full(5, -100), documents[2]]
    indexed, label = write(tmp_path / "text", documents), write(tmp_path / "label", labels)
    dataset = dataset_of(indexed, 8, pack_impl="unpacked", label_dataset=label)
    assert {int(dataset[index]["text"][0]) for index in range(8)} == {0, 9}


def test_too_little_data_is_an_error(tmp_path):
    with pytest.raises(DataError, match="fewer than one sample"):
        dataset_of(write(tmp_path / "data", numbered_documents([3, 4])), None, num_epochs=1)
    empty_part = write(tmp_path / "other", [[], [1, 2, 3]])
    with pytest.raises(DataError, match="no tokens"):
        dataset_of(empty_part, documents=[0])


def test_tokens_of_another_vocabulary_are_named(tmp_path):
    dataset = dataset_of(write(tmp_path / "data", numbered_documents([40])), vocab_limit=40)
    assert max(dataset[index]["text"].max() for index in range(len(dataset))) < 40
    dataset.vocab_limit = 20
    with pytest.raises(DataError, match="another tokenizer"):
        [dataset[index] for index in range(len(dataset))]


def test_floating_point_data_are_refused(tmp_path):
    with pytest.raises(DataError, match="float32"):
        dataset_of(write(tmp_path / "data", [np.ones(30)], np.float32))


@pytest.mark.parametrize("change", ["split", "data", "truncated"])
def test_cached_maps_of_other_data_are_built_again(change, tmp_path):
    """The file names are the same: they leave out the split and what is in the data file."""
    dataset_of(write(tmp_path / "data", numbered_documents([9, 10, 11, 12])), documents=[0, 1, 2])
    documents, new = [0, 1, 2], numbered_documents([9, 10, 11, 12])
    if change == "split":
        documents = [1, 2, 3]
    elif change == "data":
        new = numbered_documents([9, 11, 10, 12])
    else:
        cache = next(tmp_path.glob("*doc_idx.npy"))
        cache.write_bytes(cache.read_bytes()[:-3])
    indexed = write(tmp_path / "data", new)
    dataset = dataset_of(indexed, documents=documents)
    expected = build(SampleRequest("train", indexed.prefix, np.array(documents), indexed.sizes, 10, None, 7, 1234))
    for part, array in zip(index_maps.PARTS, expected, strict=True):
        np.testing.assert_array_equal(getattr(dataset.maps, part), array)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    indexed = write(tmp_path / "data", numbered_documents([50]))

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(index_maps.os, "replace", refuse)
    with pytest.raises(DataError, match=f"Permission denied.*{tmp_path}"):
        dataset_of(indexed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


def test_a_host_without_the_files_is_told_the_setting(tmp_path, monkeypatch):
    monkeypatch.setattr(index_maps, "is_builder", lambda use_shared_fs: False)
    with pytest.raises(DataError, match="use_shared_fs=false"):
        dataset_of(write(tmp_path / "data", numbered_documents([50])))


def test_a_pickled_data_set_reads_the_same(tmp_path):
    dataset = dataset_of(write(tmp_path / "data", numbered_documents([500])), 60)
    again = pickle.loads(pickle.dumps(dataset))
    assert all(np.array_equal(again[index]["text"], dataset[index]["text"]) for index in range(60))
