"""Recomputed activations give the gradients that kept ones give, dropout included, in every storage mode on the CPU."""

import itertools
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from megatron import mpu
from megatron.initialize import initialize_megatron
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed

WIDTH = 8
LAYERS = 3
SETTINGS = SimpleNamespace(params_dtype=torch.float32, use_cpu_initialization=False)
MODES = {
    "kept": {},
    "recomputed": {},
    "partitioned": dict(partition_activations=True),
    "in cpu memory": dict(partition_activations=True, checkpoint_in_cpu=True),
    "contiguous": dict(partition_activations=True, contiguous_checkpointing=True),
    "synchronised": dict(synchronize_each_layer=True),
}
"""Each is what a config would say."""


class _Block(torch.nn.Module):
    """Dropout on sharded and on replicated values."""

    def __init__(self, layer):
        super().__init__()
        with mpu.parameter_scope(1, layer):
            init = dict(init_method=lambda tensor, generator: tensor.normal_(generator=generator))
            self.up = mpu.ColumnParallelLinear(SETTINGS, WIDTH, 4 * WIDTH, **init)
            self.down = mpu.RowParallelLinear(SETTINGS, 4 * WIDTH, WIDTH, **init)

    def forward(self, x):
        middle = torch.tanh(self.up(x)[0])
        with mpu.get_cuda_rng_tracker().fork():
            middle = F.dropout(middle, 0.5)
        return x + F.dropout(self.down(middle)[0], 0.5)


def _gradients(mode):
    initialize_megatron(tiny_args(num_layers=LAYERS, model_parallel_size=2, checkpoint_activations=True, **MODES[mode]))
    blocks = [_Block(layer) for layer in range(LAYERS)]
    x = torch.randn(4, 2, WIDTH, generator=torch.Generator().manual_seed(8)).requires_grad_()
    hidden = x * 1.0  # partitioning empties the tensors it is given
    for block in blocks:
        hidden = block(hidden) if mode == "kept" else mpu.checkpoint(block, hidden)
    hidden.square().sum().backward()
    parameters = itertools.chain.from_iterable(block.parameters() for block in blocks)
    return [p.grad.numpy() for p in parameters] + [x.grad.numpy(), torch.rand(2).numpy()]


def _run(rank, world_size):
    return {mode: _gradients(mode) for mode in MODES}


def test_every_mode_equals_kept_activations(tmp_path):
    for results in run_distributed(2, _run, tmp_path=tmp_path):
        kept = results["kept"]
        for mode, gradients in results.items():
            # The last entry is a draw after the step: recomputing must not disturb the random state.
            for index, (gradient, expected) in enumerate(zip(gradients, kept, strict=True)):
                assert np.array_equal(gradient, expected), f"{mode}, tensor {index}"


def _dropout_masks(rank, world_size):
    with mpu.get_cuda_rng_tracker().fork():  # not seeded yet: must not fail
        pass
    initialize_megatron(tiny_args(model_parallel_size=2))
    before = torch.get_rng_state()
    with mpu.get_cuda_rng_tracker().fork():
        first = torch.rand(50).numpy()
    assert torch.equal(before, torch.get_rng_state())
    states = mpu.get_cuda_rng_tracker().get_states()
    with mpu.get_cuda_rng_tracker().fork():
        second = torch.rand(50).numpy()
    mpu.get_cuda_rng_tracker().set_states(states)
    with mpu.get_cuda_rng_tracker().fork():
        again = torch.rand(50).numpy()
    assert np.array_equal(second, again) and not np.array_equal(first, second)
    return first, torch.rand(50).numpy()


def test_random_states_of_sharded_and_replicated_values(tmp_path):
    (sharded_0, replicated_0), (sharded_1, replicated_1) = run_distributed(2, _dropout_masks, tmp_path=tmp_path)
    assert not np.array_equal(sharded_0, sharded_1)
    assert np.array_equal(replicated_0, replicated_1)
