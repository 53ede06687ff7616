"""Index maps that one of several processes builds, and the share of the batches that each reads."""

import os
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron import mpu
from megatron.data import build_train_valid_test_data_iterators
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from megatron.errors import DataError
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed


def on_one_rank(rank, world_size, data_path):
    """What this rank reads with data parallelism, then with tensor parallelism; then two kinds of failure."""
    results = {}
    for name, model_parallel_size in (("data", 1), ("tensor", 2)):
        mpu.initialize_model_parallel(model_parallel_size)
        train, valid, _ = build_train_valid_test_data_iterators(args_for(data_path, model_parallel_size))
        results[name] = np.stack([next(train)["text"].numpy() for _ in range(3)])
        mpu.destroy_model_parallel()
    dist.barrier()
    mpu.initialize_model_parallel(1)
    results["empty"] = message_of(args_for(data_path + "_short", 1, train_iters=None, train_epochs=1))
    os.environ["LOCAL_RANK"] = "0"  # as on two hosts: both build, here into one folder
    build_train_valid_test_data_iterators(args_for(data_path, 1, seed=77, use_shared_fs=False))
    return results


def args_for(data_path, model_parallel_size, **overrides):
    return tiny_args(
        data_path=data_path,
        split="1",
        model_parallel_size=model_parallel_size,
        global_num_gpus=2,
        num_workers=0,
        **{"train_iters": 4, **overrides},
    )


def message_of(args):
    try:
        build_train_valid_test_data_iterators(args)
    except DataError as error:
        return str(error)
    return None


def write(prefix, documents):
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", np.int32)
    for document in documents:
        builder.add_item(np.asarray(document, dtype=np.int32))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def test_two_ranks(tmp_path):
    data_path = str(tmp_path / "text")
    write(data_path, [np.random.default_rng(number).integers(0, 128, 50) for number in range(12)])
    write(data_path + "_short", [[1, 2, 3]])
    first, second = run_distributed(2, on_one_rank, data_path, tmp_path=tmp_path)

    np.testing.assert_array_equal(first["tensor"], second["tensor"])
    # The halves of a global batch of four are the whole run's samples in order: two batches of two for one rank.
    together = np.concatenate([first["data"], second["data"]], axis=1).reshape(-1, 33)
    np.testing.assert_array_equal(together[:6], first["tensor"].reshape(-1, 33))

    # Rank 0 builds and knows the reason; the other is told instead of waiting for ever.
    assert "fewer than one sample" in first["empty"] and "another rank" in second["empty"]
    assert list(Path(tmp_path).glob("*.tmp*")) == []
    assert len(list(Path(tmp_path).glob("text_train_indexmap_*_77s_*.npy"))) == 3
