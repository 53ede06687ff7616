"""Groups, ranks and seeds of initialize_megatron, where torch.distributed is initialised already."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron import mpu
from megatron.errors import ConfigError
from megatron.initialize import initialize_megatron
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed


def _describe(pipe, model, data):
    neox_args = tiny_args(
        num_layers=4, pipe_parallel_size=pipe, model_parallel_size=model, global_num_gpus=max(pipe, 1) * model * data
    )
    for _ in range(2):  # calling it again replaces the groups
        initialize_megatron(neox_args)
    assert (neox_args.rank, neox_args.world_size) == (dist.get_rank(), dist.get_world_size())
    axes = {}
    for name in ("pipe", "data", "model"):
        group = getattr(mpu, f"get_{name}_parallel_group")()
        size = getattr(mpu, f"get_{name}_parallel_world_size")()
        rank = getattr(mpu, f"get_{name}_parallel_rank")()
        assert dist.get_world_size(group) == size and dist.get_rank(group) == rank
        axes[name] = (rank, size)
    axes["source"] = mpu.get_model_parallel_src_rank()
    axes["replicated"] = torch.rand(8).numpy()
    with mpu.get_cuda_rng_tracker().fork():
        axes["sharded"] = torch.rand(8).numpy()
    return axes


def _run(rank, world_size):
    shapes = {shape: _describe(*shape) for shape in [(2, 2, 1), (0, 2, 2), (1, 1, 4), (0, 4, 1), (4, 1, 1)]}
    with pytest.raises(ConfigError, match="4 processes cannot hold pipe_parallel_size=1 x model_parallel_size=8"):
        initialize_megatron(tiny_args(model_parallel_size=8, num_attention_heads=8, hidden_size=64, global_num_gpus=8))
    with pytest.raises(ConfigError, match="train_batch_size=2 is not .*=2 x .*=1 x 4 model.*global_num_gpus=1"):
        initialize_megatron(tiny_args(global_num_gpus=1))
    with pytest.raises(ConfigError, match="pipe x data x model = 4 x 1 x 1 does not fit"):
        mpu.initialize_model_parallel(4, topology=mpu.get_topology())
    mpu.destroy_model_parallel()
    assert not mpu.model_parallel_is_initialized() and mpu.get_model_parallel_world_size() == 1
    return shapes


def _same(values):
    return all(np.array_equal(value, values[0]) for value in values)


def _all_different(values):
    return len({value.tobytes() for value in values}) == len(values)


def test_groups_and_seeds(tmp_path):
    ranks = run_distributed(4, _run, tmp_path=tmp_path)
    for (pipe, model, data), _ in ranks[0].items():
        places = [rank[(pipe, model, data)] for rank in ranks]
        for rank, place in enumerate(places):
            # pipe is the outermost dimension of the rank order, model the innermost.
            assert place["model"] == (rank % model, model)
            assert place["data"] == (rank // model % data, data)
            assert place["pipe"] == (rank // model // data, max(pipe, 1))
            assert place["source"] == rank - rank % model
        assert _all_different([place["sharded"] for place in places])
        for first in range(0, 4, model):
            assert _same([place["replicated"] for place in places[first : first + model]])
        assert _all_different([place["replicated"] for place in places[::model]])
