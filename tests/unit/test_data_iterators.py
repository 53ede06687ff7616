"""The batches of a run: where they start, how they repeat, how much is made, and what is refused."""

import numpy as np
import pytest
import torch

from megatron.data import build_train_valid_test_data_iterators
from megatron.data.data_utils import build_train_valid_test_datasets, set_train_iters
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from megatron.errors import ConfigError, DataError
from tests.helpers.configs import tiny_args


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Forty documents of 20 to 59 tokens below 128."""
    random = np.random.default_rng(0)
    documents = [random.integers(0, 128, size=20 + number) for number in range(40)]
    return write(tmp_path_factory.mktemp("corpus") / "text", documents)


def write(prefix, documents):
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", np.int32)
    for document in documents:
        builder.add_item(np.asarray(document, dtype=np.int32))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def args_for(data_path=None, **overrides):
    values = dict(data_path=data_path, split="80,10,10", eval_interval=4, eval_iters=2, num_workers=0, train_iters=10)
    return tiny_args(**{**values, **overrides})


def take(iterator, count):
    return [next(iterator)["text"] for _ in range(count)]


def equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_reads_what_an_uninterrupted_one_does(accumulation, num_workers, corpus):
    def args(iteration):
        built = args_for(corpus, gradient_accumulation_steps=accumulation, num_workers=num_workers)
        built.iteration = iteration
        return built

    train, valid, test = build_train_valid_test_data_iterators(args(0))
    all_train, all_valid, all_test = (take(one, 10 * accumulation) for one in (train, valid, test))
    train, valid, test = build_train_valid_test_data_iterators(args(6))
    assert equal(take(train, 4 * accumulation), all_train[6 * accumulation :])
    # Six steps hold one evaluation (after the fourth) of two global batches.
    assert equal(take(valid, 4 * accumulation), all_valid[2 * accumulation : 6 * accumulation])
    assert equal(take(test, 2 * accumulation), all_test[: 2 * accumulation])


def test_each_set_is_large_enough_for_the_whole_run(corpus):
    args = args_for(corpus, train_iters=50, gradient_accumulation_steps=2)
    train, valid, test = build_train_valid_test_datasets(args)
    batch = args.train_batch_size
    assert batch == 4
    assert len(train) >= 50 * batch
    assert len(valid) >= (50 // 4 + 1) * 2 * batch
    assert len(test) >= 2 * batch
    # Not a whole epoch more than that.
    for dataset in (train, valid, test):
        tokens = dataset.indexed_dataset.sizes[np.unique(dataset.maps.doc_idx)].sum()
        assert (len(dataset.maps.doc_idx) // len(np.unique(dataset.maps.doc_idx)) - 1) * tokens < 32 * 50 * batch


def test_batches_are_int64_and_the_loader_leaves_the_random_state_alone(corpus):
    before = torch.get_rng_state()
    train, _, _ = build_train_valid_test_data_iterators(args_for(corpus, num_workers=1))
    batch = next(train)
    assert batch.keys() == {"text"} and batch["text"].dtype == torch.int64 and batch["text"].shape == (2, 33)
    assert torch.equal(torch.get_rng_state(), before)


def test_after_the_last_batch_the_first_comes_again(corpus):
    args = args_for(corpus, train_iters=3)
    train, _, _ = build_train_valid_test_datasets(args)
    passes = len(train) // 2
    batches = take(build_train_valid_test_data_iterators(args)[0], 2 * passes + 1)
    assert equal(batches[:passes], batches[passes : 2 * passes]) and torch.equal(batches[0], batches[-1])
    # A run resumed in the second pass goes on to the whole of the third.
    args.iteration = passes + 1
    assert equal(
        take(build_train_valid_test_data_iterators(args)[0], passes + 3), (batches[:passes] * 2)[1:][: passes + 3]
    )


def test_a_validation_set_of_one_short_document_works(tmp_path):
    """GPT-NeoX divides by zero here, or makes no batch of the last sample."""
    data_path = write(tmp_path / "text", [np.arange(120)] * 9 + [np.arange(5)])
    args = args_for(data_path, split="90,10,0", train_micro_batch_size_per_gpu=4, eval_iters=1, eval_interval=100)
    train, valid, test = build_train_valid_test_data_iterators(args)
    assert (args.do_train, args.do_valid, args.do_test) == (True, True, False) and test is None
    assert next(valid)["text"].shape == (4, 33) and next(train)["text"].shape == (4, 33)


def test_exactly_the_samples_needed_are_all_used(tmp_path):
    data_path = write(tmp_path / "text", [np.arange(32 * 4 + 1) % 128])
    args = args_for(data_path, split="1", train_micro_batch_size_per_gpu=4, train_iters=1)
    train, valid, test = build_train_valid_test_data_iterators(args)
    assert valid is None and test is None
    starts = sorted(int(row[0]) for row in next(train)["text"])
    assert starts == [0, 32, 64, 96]


def test_without_evaluation_there_is_no_iterator(corpus):
    args = args_for(corpus, eval_iters=0)
    _, valid, test = build_train_valid_test_data_iterators(args)
    assert valid is None and test is None and not args.do_valid and not args.do_test


def three_paths(tmp_path, **overrides):
    """Tokens below 40 in the first training data set, from 40 in the second."""
    first = write(tmp_path / "first", [np.arange(40)] * 30)
    second = write(tmp_path / "second", [np.arange(40, 80)] * 10)
    paths = dict(train_data_paths=[first, second], valid_data_paths=[second], test_data_paths=[first])
    return args_for(**{**paths, **overrides})


def share_of_second(iterator, count):
    """Of the training samples, how many come from the second data set."""
    samples = torch.cat(take(iterator, count))
    return (samples[:, 0] >= 40).float().mean().item()


def test_paths_are_blended_by_weight(tmp_path):
    args = three_paths(tmp_path, train_data_weights=[3.0, 1.0], train_iters=40)
    train, valid, test = build_train_valid_test_data_iterators(args)
    assert share_of_second(train, 40) == pytest.approx(0.25, abs=0.02)
    assert share_of_second(valid, 2) == 1.0 and share_of_second(test, 2) == 0.0
    assert (tmp_path / "first_train_0_indexmap_61ns_32sl_1234s_packedpi_ac_doc_idx.npy").is_file()  # 80 * .75 * 1.005


def test_equal_weights_are_the_default(tmp_path):
    train, _, _ = build_train_valid_test_data_iterators(three_paths(tmp_path, train_iters=40))
    assert share_of_second(train, 40) == pytest.approx(0.5, abs=0.02)


def test_weights_by_documents(tmp_path):
    args = three_paths(tmp_path, train_iters=40, weight_by_num_documents=True, weighted_sampler_alpha=2.0)
    train, _, _ = build_train_valid_test_data_iterators(args)
    # p = 3/4, 1/4; p ** 2 (1 - p) is 9/64 and 3/64.
    assert share_of_second(train, 40) == pytest.approx(0.25, abs=0.02)


def test_labels(tmp_path):
    text = [np.arange(40)] * 10
    labels = [np.where(document % 3, document, -100) for document in text]
    text_path, label_path = write(tmp_path / "text", text), write(tmp_path / "label", labels)
    args = args_for(
        train_data_paths=[text_path],
        valid_data_paths=[text_path],
        test_data_paths=[text_path],
        train_label_data_paths=[label_path],
    )
    train, valid, _ = build_train_valid_test_data_iterators(args)
    batch = next(train)
    assert torch.equal(batch["label"], torch.where(batch["text"] % 3 != 0, batch["text"], -100))
    assert next(valid).keys() == {"text"}


def test_epochs_give_the_number_of_steps(corpus):
    args = args_for(corpus, train_iters=None, train_epochs=2, gradient_accumulation_steps=2)
    set_train_iters(args)
    tokens = sum(20 + number for number in range(32))
    micro_batches = (tokens - 1) // 32 // 2
    assert args.train_iters == 2 * micro_batches // 2
    train, valid, _ = build_train_valid_test_data_iterators(args)
    batches = take(train, 2 * micro_batches)
    assert equal(batches[:micro_batches], batches[micro_batches:])
    starts = torch.cat(batches[:micro_batches])
    assert len({tuple(row.tolist()) for row in starts}) == 2 * micro_batches  # no sample twice in an epoch
    assert next(valid)["text"].shape == (2, 33)


def test_epochs_of_several_data_sets_read_each_once(tmp_path):
    args = three_paths(tmp_path, train_iters=None, train_epochs=1)
    train, _, _ = build_train_valid_test_datasets(args)
    assert [len(dataset) for dataset in train.datasets] == np.bincount(train.dataset_index).tolist()


@pytest.mark.parametrize(
    "overrides, problem",
    [
        (dict(split="0,50,50"), "leaves no document"),
        (dict(split="a"), "split="),
        (dict(train_iters=None), "train_iters"),
        (dict(data_path="/nowhere/text"), "/nowhere/text.idx"),
        (dict(data_path=None), "data_path is unset"),
        (
            dict(train_iters=None, train_epochs=1, seq_length=2048, max_position_embeddings=2048),
            "fewer than one sample",
        ),
        (dict(train_iters=None, train_epochs=1, train_micro_batch_size_per_gpu=99), "fewer than one micro-batch"),
        (dict(train_iters=None, train_epochs=1, split="0,1,1"), "leaves no document"),
        (dict(padded_vocab_size=64), "another tokenizer"),
    ],
)
def test_what_cannot_work_is_named(overrides, problem, corpus):
    with pytest.raises((ConfigError, DataError), match=problem):
        args = args_for(**{"data_path": corpus, **overrides})
        take(build_train_valid_test_data_iterators(args)[0], 10)


def test_settings_reach_the_files(corpus, tmp_path, monkeypatch):
    data_path = write(tmp_path / "text", [np.arange(120)] * 10)
    read, shared = [], []
    monkeypatch.setattr("megatron.data.indexed_dataset._read_through", read.append)
    monkeypatch.setattr(
        "megatron.data.index_maps.is_builder", lambda use_shared_fs: shared.append(use_shared_fs) or True
    )
    build_train_valid_test_data_iterators(args_for(data_path))
    assert read == [] and shared == [True] * 3
    args = args_for(data_path, mmap_warmup=True, use_shared_fs=False, allow_chopped=False, seed=5)
    build_train_valid_test_data_iterators(args)
    assert read == [f"{data_path}.idx", f"{data_path}.bin"] and shared[3:] == [False] * 3
    assert (tmp_path / "text_train_indexmap_20ns_32sl_5s_packedpi_doc_idx.npy").is_file()  # no _ac


def test_lists_that_do_not_fit_the_paths_are_named(tmp_path):
    for setting in ("train_data_weights", "train_label_data_paths"):
        with pytest.raises(ConfigError, match=setting):
            build_train_valid_test_data_iterators(three_paths(tmp_path, **{setting: [1.0]}))


def test_an_error_in_a_worker_reaches_the_user(corpus):
    args = args_for(corpus, padded_vocab_size=64, num_workers=2)
    with pytest.raises(DataError, match="another tokenizer") as caught:
        take(build_train_valid_test_data_iterators(args)[0], 10)
    assert "Traceback" not in str(caught.value)
