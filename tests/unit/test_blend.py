"""Blends of data sets, and the weights and split that shape them."""

from fractions import Fraction

import numpy as np
import pytest

from megatron.data.blendable_dataset import BlendableDataset, blending_indices
from megatron.data.samplers import DistributedBatchSampler
from megatron.data.splits import (
    get_normalized_weights_and_num_samples,
    get_train_valid_test_split_,
    num_evaluation_iterations,
    weights_by_num_docs,
)
from megatron.errors import ConfigError, DataError


@pytest.mark.parametrize(
    "weights, order",
    [
        ([0.5, 0.5], [0, 1, 0, 1, 0, 1]),
        ([0.75, 0.25], [0, 1, 0, 0, 0, 1]),
        ([0.25, 0.5, 0.25], [1, 0, 2, 1, 0, 1]),
        ([1.0], [0, 0, 0]),
    ],
)
def test_order_worked_out_by_hand(weights, order):
    """Behind at item i: weight * max(i, 1) - taken; the largest is next, the first of equals."""
    assert blending_indices(np.array(weights), len(order))[0].tolist() == order


@pytest.mark.parametrize("eighths", [[5, 3], [1, 2, 5], [1, 1, 1, 5], [2, 1, 1, 1, 3]])
def test_order_in_exact_arithmetic(eighths):
    """Eighths are exact in binary, so double precision must give what fractions give."""
    taken, expected = [0] * len(eighths), []
    for item in range(400):
        behind = [Fraction(part, 8) * max(item, 1) - count for part, count in zip(eighths, taken, strict=True)]
        expected.append(behind.index(max(behind)))
        taken[expected[-1]] += 1
    dataset_index, sample_index = blending_indices(np.array(eighths) / 8, 400)
    assert dataset_index.tolist() == expected
    for number in range(len(eighths)):
        assert sample_index[dataset_index == number].tolist() == list(range(taken[number]))


def test_shares_follow_the_weights_at_every_length():
    weights = np.array([0.123, 0.456, 0.421])
    chosen = np.eye(3)[blending_indices(weights, 3000)[0]].cumsum(axis=0)
    behind = weights * np.arange(1, 3001)[:, None] - chosen
    assert np.abs(behind).max() < 2


def test_items_come_from_the_data_sets():
    blend = BlendableDataset([["a0", "a1", "a2"], ["b0"]], [3, 1], size=4)
    assert [blend[index] for index in range(len(blend))] == ["a0", "b0", "a1", "a2"]


def test_a_data_set_that_runs_out_starts_again():
    blend = BlendableDataset([["a0", "a1", "a2", "a3"], ["b0"]], [1, 1])
    assert [blend[index] for index in range(len(blend))] == ["a0", "b0", "a1", "b0", "a2"]


@pytest.mark.parametrize("weights", [[1], [0, 0], [-1, 2], [float("nan"), 1], [1, 2, 3]])
def test_weights_that_are_no_proportions_are_refused(weights):
    with pytest.raises(DataError, match="weights"):
        BlendableDataset([[1], [2]], weights)


@pytest.mark.parametrize(
    "split, size, bounds",
    [
        ("969, 30, 1", 1000, [0, 969, 999, 1000]),
        ("80/10/10", 10, [0, 8, 9, 10]),
        ("1", 7, [0, 7, 7, 7]),
        ("1,1", 4, [0, 2, 4, 4]),
        ("0,1,0", 5, [0, 0, 5, 5]),
        ("969, 30, 1", 1, [0, 1, 1, 1]),
        ("0.0,0.5,0.5", 3, [0, 0, 1, 3]),
    ],
)
def test_split(split, size, bounds):
    assert get_train_valid_test_split_(split, size) == bounds


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "1,-1,1", "1,1,1,1", "nan,1", "inf"])
def test_split_that_is_none_is_refused(split):
    with pytest.raises(ConfigError, match="split="):
        get_train_valid_test_split_(split, 10)


@pytest.mark.parametrize("size", range(1, 60))
def test_split_never_overlaps_and_leaves_nothing_out(size):
    for split in ("969,30,1", "1,1,1", "0,1,1", "98,1,1", "1,0,2"):
        bounds = get_train_valid_test_split_(split, size)
        assert bounds == sorted(bounds) and bounds[0] == 0 and bounds[-1] == size


def test_samples_of_each_data_set():
    weights, samples = get_normalized_weights_and_num_samples([3, 1], 1000)
    assert weights == [0.75, 0.25] and samples == [754, 252]
    assert get_normalized_weights_and_num_samples([3, 1], None) == ([0.75, 0.25], [None, None])
    with pytest.raises(ConfigError, match="weights"):
        get_normalized_weights_and_num_samples([0, 0], 10)


def test_weights_by_number_of_documents():
    assert weights_by_num_docs([5], 0.3) == [1.0]
    assert weights_by_num_docs([7, 7, 7], 0.3) == pytest.approx([1 / 3] * 3)
    # p = .1, .2, .7 with alpha 1: p (1 - p) = .09, .16, .21.
    assert weights_by_num_docs([10, 20, 70], 1.0) == pytest.approx([9 / 46, 16 / 46, 21 / 46])
    # alpha 0: only the factor 1 - p is left.
    assert weights_by_num_docs([10, 20, 70], 0.0) == pytest.approx([0.9 / 2, 0.8 / 2, 0.3 / 2])


def test_evaluation_iterations():
    assert num_evaluation_iterations(train_iters=100, eval_interval=30, eval_iters=5) == 20


@pytest.mark.parametrize("world_size, micro_batch_size", [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_global_batches_do_not_depend_on_the_number_of_ranks(world_size, micro_batch_size):
    samplers = [DistributedBatchSampler(20, micro_batch_size, rank, world_size, start=1) for rank in range(world_size)]
    assert {len(sampler) for sampler in samplers} == {3}
    batches = [sum(parts, []) for parts in zip(*samplers, strict=True)]
    assert batches == [list(range(6, 12)), list(range(12, 18))]
