"""Every move between ranks against its formula, forward and backward, on 1, 2 and 4 ranks."""

import numpy as np
import pytest
import torch

from megatron import mpu
from tests.helpers.distributed import run_distributed

SHAPE = (4, 8, 12)
"""Splits over 4 ranks along each dimension."""


def _moves():
    """name -> function of a tensor. The suffix is the dimension that is split."""
    moves = {
        "copy": mpu.copy_to_model_parallel_region,
        "copy_weight": mpu.copy_weight_to_sequence_parallel_region,
        "reduce": mpu.reduce_from_model_parallel_region,
        "scatter2": mpu.scatter_to_model_parallel_region,
        "gather2": mpu.gather_from_model_parallel_region,
    }
    for dim in (0, 1):
        moves[f"scatter{dim}"] = lambda x, d=dim: mpu.scatter_to_sequence_parallel_region(x, d)
        moves[f"gather_partial{dim}"] = lambda x, d=dim: mpu.gather_from_sequence_parallel_region(x, d)
        moves[f"gather{dim}"] = lambda x, d=dim: mpu.gather_from_sequence_parallel_region(x, d, partial_gradient=False)
        moves[f"reduce_scatter{dim}"] = lambda x, d=dim: mpu.reduce_scatter_to_sequence_parallel_region(x, d)
    return moves


def _output_shape(name, world_size):
    shape = list(SHAPE)
    if name[-1].isdigit():
        dim = int(name[-1])
        shape[dim] = shape[dim] * world_size if name.startswith("gather") else shape[dim] // world_size
    return shape


def _value(seed, rank, shape):
    return torch.from_numpy(np.random.default_rng([seed, rank]).standard_normal(shape))


def _run(rank, world_size):
    mpu.initialize_model_parallel(world_size)
    results = {}
    for name, move in _moves().items():
        x = _value(1, rank, SHAPE).requires_grad_()
        # A view that is not contiguous, as the layers pass them.
        output = move(x.transpose(0, 1).contiguous().transpose(0, 1))
        weights = _value(2, rank, _output_shape(name, world_size))
        (output * weights).sum().backward()
        unchanged = torch.equal(x.detach(), _value(1, rank, SHAPE))
        results[name] = (output.detach().numpy(), x.grad.numpy(), unchanged)
    return results


def _expected(name, rank, world_size):
    """(output, gradient) of one rank, from what all ranks put in."""
    inputs = [_value(1, r, SHAPE) for r in range(world_size)]
    gradients = [_value(2, r, _output_shape(name, world_size)) for r in range(world_size)]
    dim = int(name[-1]) if name[-1].isdigit() else None
    if name.startswith("copy"):
        return inputs[rank], sum(gradients)
    if name == "reduce":
        return sum(inputs), gradients[rank]
    if name.startswith("scatter"):
        return inputs[rank].chunk(world_size, dim)[rank], torch.cat(gradients, dim)
    if name.startswith("gather_partial"):
        return torch.cat(inputs, dim), sum(gradients).chunk(world_size, dim)[rank]
    if name.startswith("gather"):
        return torch.cat(inputs, dim), gradients[rank].chunk(world_size, dim)[rank]
    return sum(inputs).chunk(world_size, dim)[rank], torch.cat(gradients, dim)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_moves_and_their_gradients(world_size, tmp_path):
    for rank, results in enumerate(run_distributed(world_size, _run, tmp_path=tmp_path)):
        for name, (output, gradient, unchanged) in results.items():
            expected_output, expected_gradient = _expected(name, rank, world_size)
            assert unchanged, f"{name} changed its input"
            np.testing.assert_allclose(output, expected_output.numpy(), atol=1e-12, err_msg=f"{name} rank {rank}")
            np.testing.assert_allclose(gradient, expected_gradient.numpy(), atol=1e-12, err_msg=f"{name} grad {rank}")


def _sum_in_bfloat16(rank, world_size):
    mpu.initialize_model_parallel(world_size, fp32_allreduce=True)
    # 1 + 3 x 2^-9: each term alone is lost beside 1 in bfloat16 (8 bits), their sum is not.
    x = torch.full((4, 2), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    total = mpu.reduce_from_model_parallel_region(x)
    piece = mpu.reduce_scatter_to_sequence_parallel_region(x)
    assert total.dtype == piece.dtype == torch.bfloat16
    return total[0, 0].item(), piece[0, 0].item()


def test_fp32_allreduce_sums_half_precision_in_fp32(tmp_path):
    expected = torch.tensor(1 + 3 * 2.0**-9).bfloat16().item()
    assert expected > 1
    for values in run_distributed(4, _sum_in_bfloat16, tmp_path=tmp_path):
        assert values == (expected, expected)
