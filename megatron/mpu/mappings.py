"""Moves between "whole on every rank" and "a piece on each rank" of the model-parallel group, with their gradients.

Each move is an autograd function whose backward is the transpose of its forward. With one rank they are identities.
None changes its input.
"""

from typing import Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.mpu.groups import (
    get_fp32_allreduce,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_world_size,
)
from megatron.mpu.utils import divide

# torch 2.13 renames the collectives on one tensor; the old names still work but warn.
_gather_pieces = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_sum_and_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks, in a new tensor."""
    dtype = torch.float32 if get_fp32_allreduce() else tensor.dtype
    total = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=get_model_parallel_group())
    return total.to(tensor.dtype)


def _piece(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's piece along dim."""
    size = divide(tensor.shape[dim], get_model_parallel_world_size(), f"dimension {dim} of an activation")
    return tensor.narrow(dim, get_model_parallel_rank() * size, size).contiguous()


def _all_gather(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """All ranks' pieces, joined along dim in rank order."""
    world_size = get_model_parallel_world_size()
    stacked = tensor.new_empty(_times(tensor.shape, 0, world_size))
    _gather_pieces(stacked, tensor.contiguous(), group=get_model_parallel_group())
    # The collective joins along dimension 0.
    return stacked if dim == 0 else torch.cat(stacked.chunk(world_size, 0), dim)


def _reduce_scatter(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over the ranks, of which each keeps its piece along dim."""
    world_size = get_model_parallel_world_size()
    size = divide(tensor.shape[dim], world_size, f"dimension {dim} of an activation")
    dtype = torch.float32 if get_fp32_allreduce() else tensor.dtype
    stacked = tensor if dim == 0 else torch.cat(tensor.split(size, dim), 0)
    stacked = stacked.to(dtype).contiguous()
    piece = stacked.new_empty((stacked.shape[0] // world_size, *stacked.shape[1:]))
    _sum_and_scatter(piece, stacked, group=get_model_parallel_group())
    return piece.to(tensor.dtype)


def _times(shape: torch.Size, dim: int, factor: int) -> Tuple[int, ...]:
    return tuple(size * factor if index == dim else size for index, size in enumerate(shape))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return _all_reduce(gradient)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return _all_reduce(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, dim):
        ctx.dim = dim
        return _piece(tensor, dim)

    @staticmethod
    def backward(ctx, gradient):
        return _all_gather(gradient, ctx.dim), None


class _Gather(torch.autograd.Function):
    """`partial_gradient`: what follows is sharded, so each rank's gradient is one term of a sum."""

    @staticmethod
    def forward(ctx, tensor, dim, partial_gradient):
        ctx.dim, ctx.partial_gradient = dim, partial_gradient
        return _all_gather(tensor, dim)

    @staticmethod
    def backward(ctx, gradient):
        own = _reduce_scatter if ctx.partial_gradient else _piece
        return own(gradient, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, dim):
        ctx.dim = dim
        return _reduce_scatter(tensor, dim)

    @staticmethod
    def backward(ctx, gradient):
        return _all_gather(gradient, ctx.dim), None


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, weight, bias, seq_dim):
        ctx.save_for_backward(piece, weight)
        ctx.seq_dim, ctx.has_bias = seq_dim, bias is not None
        return F.linear(_all_gather(piece, seq_dim), weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        piece, weight = ctx.saved_tensors
        whole = _all_gather(piece, ctx.seq_dim)
        rows = gradient.flatten(0, -2)
        weight_gradient = rows.T @ whole.flatten(0, -2) if ctx.needs_input_grad[1] else None
        bias_gradient = rows.sum(0) if ctx.has_bias else None
        return _reduce_scatter(gradient @ weight, ctx.seq_dim), weight_gradient, bias_gradient, None


def _alone() -> bool:
    return get_model_parallel_world_size() == 1


def copy_to_model_parallel_region(tensor: torch.Tensor) -> torch.Tensor:
    """Identity; the gradient is summed over the ranks. Put before a column-parallel layer."""
    return tensor if _alone() else _Copy.apply(tensor)


def reduce_from_model_parallel_region(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks; the gradient passes unchanged. Put after a row-parallel layer."""
    return tensor if _alone() else _Reduce.apply(tensor)


def scatter_to_model_parallel_region(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of the last dimension; the gradients are gathered."""
    return tensor if _alone() else _Scatter.apply(tensor, tensor.dim() - 1)


def gather_from_model_parallel_region(tensor: torch.Tensor) -> torch.Tensor:
    """All pieces of the last dimension; the gradient, equal on all ranks, is split."""
    return tensor if _alone() else _Gather.apply(tensor, tensor.dim() - 1, False)


def scatter_to_sequence_parallel_region(tensor: torch.Tensor, seq_dim: int = 0) -> torch.Tensor:
    """This rank's piece of the sequence (dimension seq_dim); the gradients are gathered."""
    return tensor if _alone() else _Scatter.apply(tensor, seq_dim)


def gather_from_sequence_parallel_region(
    tensor: torch.Tensor, seq_dim: int = 0, partial_gradient: bool = True
) -> torch.Tensor:
    """The whole sequence; the gradient is summed over the ranks and split (reduce-scatter).

    partial_gradient=False: what follows is computed alike on all ranks, so the gradient is only split.
    """
    return tensor if _alone() else _Gather.apply(tensor, seq_dim, partial_gradient)


def reduce_scatter_to_sequence_parallel_region(tensor: torch.Tensor, seq_dim: int = 0) -> torch.Tensor:
    """Sum over the ranks, of which each keeps its piece of the sequence; the gradients are gathered."""
    return tensor if _alone() else _ReduceScatter.apply(tensor, seq_dim)


def gathered_linear(
    piece: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None, seq_dim: int = 0
) -> torch.Tensor:
    """linear(gather_from_sequence_parallel_region(piece), weight, bias), keeping only the piece for the backward pass.

    The whole sequence is gathered a second time there: the memory sequence_parallel is to save for one more collective
    (Korthikanti et al. 2022, section 4.2.2).
    """
    return F.linear(piece, weight, bias) if _alone() else _GatheredLinear.apply(piece, weight, bias, seq_dim)


def copy_weight_to_sequence_parallel_region(weight: torch.Tensor) -> torch.Tensor:
    """Identity; the gradient is summed over the ranks.

    For a replicated weight (norm scale, row-parallel bias, learned position) used on pieces of the sequence: each
    rank sees only its tokens' share of the gradient. Done here, the optimizer finds equal gradients on all ranks.
    """
    return weight if _alone() else _Copy.apply(weight)
