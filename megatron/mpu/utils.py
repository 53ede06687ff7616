"""Small helpers of the parallel layers: whole-number division, the current device, slicing one rank's share."""

from typing import List, Optional, Tuple

import torch

from megatron.errors import ConfigError


def divide(numerator: int, denominator: int, what: str = "a width") -> int:
    """numerator / denominator, which must be whole. Raises ConfigError naming `what`."""
    if numerator % denominator:
        raise ConfigError(
            f"{what} of {numerator} does not divide by model_parallel_size={denominator}; change one of the two"
        )
    return numerator // denominator


def current_device() -> torch.device:
    """The device of this process: the GPU DeepSpeed chose for it, or the CPU."""
    # Imported here because deepspeed takes seconds to import and not every user of mpu touches a device.
    from deepspeed.accelerator import get_accelerator

    name = get_accelerator().device_name()
    if name == "cpu":
        return torch.device("cpu")
    return torch.device(name, get_accelerator().current_device())


def bounds(size: int, rank: int, world_size: int) -> Tuple[int, int]:
    """(start, end) of one rank's piece of a block of `size` rows. Sizes differ by one if it does not divide."""
    return rank * size // world_size, (rank + 1) * size // world_size


def shard(
    master: torch.Tensor, dim: int, rank: int, world_size: int, groups: Optional[List[int]] = None
) -> torch.Tensor:
    """One rank's share of a master tensor: a copy, so that it does not keep the master's memory alive.

    groups: sizes of the blocks stacked along `dim`; each block is split over the ranks on its own, so that a rank
    holds a piece of every block, e.g. [up_r; gate_r] of [up; gate]. A block need not divide by the ranks: see
    `bounds`. None is one block, which must.
    """
    if groups is None:
        divide(master.shape[dim], world_size, f"dimension {dim} of a weight")
    pieces = []
    for block in torch.split(master, groups or [master.shape[dim]], dim):
        start, end = bounds(block.shape[dim], rank, world_size)
        pieces.append(block.narrow(dim, start, end - start))
    return torch.cat(pieces, dim)


def unshard(shards: List[torch.Tensor], dim: int, groups: Optional[List[int]] = None) -> torch.Tensor:
    """Inverse of `shard`: the master tensor from the shares of all ranks, in rank order."""
    groups = groups or [sum(piece.shape[dim] for piece in shards)]
    by_rank = [torch.split(piece, share_sizes(groups, rank, len(shards)), dim) for rank, piece in enumerate(shards)]
    return torch.cat([piece for pieces in zip(*by_rank, strict=True) for piece in pieces], dim)


def share_sizes(groups: List[int], rank: int, world_size: int) -> List[int]:
    """Rows of one rank's piece of each block."""
    spans = [bounds(size, rank, world_size) for size in groups]
    return [end - start for start, end in spans]
