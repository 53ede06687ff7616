"""Files and batches made by GPT-NeoX itself (tests/golden/data_index), byte for byte."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron import mpu
from megatron.data import build_train_valid_test_data_iterators
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from tests.helpers.configs import tiny_args
from tools.datasets import preprocess_data

GOLDEN = Path(__file__).parent / "data_index"
NAME = "enwik8_tiny_text_document"
TOKENIZER = str(GOLDEN / "tiny_tokenizer.json")


@pytest.fixture
def data_path(tmp_path):
    """A copy of the data without its index maps."""
    for ending in (".bin", ".idx"):
        shutil.copy(GOLDEN / f"{NAME}{ending}", tmp_path)
    return str(tmp_path / NAME)


def case6_args(data_path, **overrides):
    """The data settings of GPT-NeoX's run."""
    values = dict(
        data_path=data_path,
        data_impl="mmap",
        split="80,10,10",
        train_micro_batch_size_per_gpu=4,
        train_iters=8,
        eval_interval=100,
        eval_iters=2,
        num_workers=0,
        seed=1234,
        padded_vocab_size=384,
    )
    return tiny_args(**{**values, **overrides})


@pytest.mark.parametrize("name", ["enwik8_tiny", "enwik8_gpt2"])
def test_files_are_read_as_described_and_written_equal(name, tmp_path):
    note = json.loads((GOLDEN / "note.json").read_text())[name]
    dataset = MMapIndexedDataset(str(GOLDEN / f"{name}_text_document"))
    assert dataset.sizes.tolist() == note["sizes"]
    assert dataset.pointers.tolist() == note["pointers"]
    assert dataset.doc_idx.tolist() == note["doc_idx"]
    assert dataset[0][:16].tolist() == note["first16"]
    assert dataset[len(dataset) - 1][-8:].tolist() == note["last8"]

    builder = MMapIndexedDatasetBuilder(str(tmp_path / "copy.bin"), dataset.dtype)
    for number in range(len(dataset)):
        builder.add_item(dataset[number])
        builder.end_document()
    builder.finalize(str(tmp_path / "copy.idx"))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"copy{ending}").read_bytes() == (GOLDEN / f"{name}_text_document{ending}").read_bytes()


@pytest.mark.parametrize("workers", [1, 2])
def test_preprocess_writes_the_same_files(workers, tmp_path):
    preprocess_data.main(
        f"--input {GOLDEN}/enwik8_docs.jsonl --tokenizer-type HFTokenizer --vocab-file {TOKENIZER} --append-eod "
        f"--output-prefix {tmp_path}/enwik8_tiny --workers {workers}".split()
    )
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"{NAME}{ending}").read_bytes() == (GOLDEN / f"{NAME}{ending}").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{NAME}.bin", f"{NAME}.idx"]


@pytest.mark.parametrize("train_batch_size, maps", [(4, 9), (8, 9)])
def test_index_maps_are_the_same_files(train_batch_size, maps, data_path, tmp_path):
    args = case6_args(data_path, train_micro_batch_size_per_gpu=train_batch_size)
    build_train_valid_test_data_iterators(args)
    assert (args.do_train, args.do_valid, args.do_test) == (True, True, True)
    made = sorted(tmp_path.glob("*.npy"))
    assert len(made) == maps
    for path in made:
        assert path.read_bytes() == (GOLDEN / path.name).read_bytes(), path.name


def test_index_maps_of_gpt_neox_are_used(data_path, tmp_path):
    for path in GOLDEN.glob("*.npy"):
        shutil.copy(path, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    build_train_valid_test_data_iterators(case6_args(data_path))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_batches_are_those_gpt_neox_trained_on(data_path):
    train, _, _ = build_train_valid_test_data_iterators(case6_args(data_path))
    batches = np.stack([next(train)["text"].numpy() for _ in range(8)])
    np.testing.assert_array_equal(batches, np.load(GOLDEN / "case6_batches.npy"))


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_read_the_two_halves_of_each_batch(rank, data_path, monkeypatch):
    monkeypatch.setattr(mpu, "get_data_parallel_world_size", lambda: 2)
    monkeypatch.setattr(mpu, "get_data_parallel_rank", lambda: rank)
    args = case6_args(data_path, train_micro_batch_size_per_gpu=2, global_num_gpus=2)
    assert args.train_batch_size == 4
    train, _, _ = build_train_valid_test_data_iterators(args)
    batches = np.stack([next(train)["text"].numpy() for _ in range(8)])
    np.testing.assert_array_equal(batches, np.load(GOLDEN / "case6_batches.npy")[:, 2 * rank : 2 * rank + 2])
