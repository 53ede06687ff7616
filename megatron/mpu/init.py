"""Initial weights that do not depend on the parallel layout.

Every parameter is drawn whole, from a generator of its own, and then sliced. The generator's seed comes from the
run's seed, the global index of the layer and the number of the parameter within the layer, so neither the number of
ranks nor what other layers drew before makes a difference.
"""

import contextlib
import hashlib
from typing import Callable, List, Optional, Sequence

import torch

from megatron.mpu.groups import get_model_parallel_rank, get_model_parallel_world_size
from megatron.mpu.utils import current_device, shard

PARAMETERS_PER_LAYER = 1024
"""More than any layer has; keeps the seeds of a model distinct for the first 4 million layers."""

_scope: Optional["_Scope"] = None


class _Scope:
    def __init__(self, seed: int, layer_index: int):
        self.seed = seed
        self.layer_index = layer_index
        self.drawn = 0


@contextlib.contextmanager
def parameter_scope(seed: int, layer_index: int):
    """While active, each `next_generator` is a fresh one for the next parameter of layer `layer_index`."""
    global _scope
    outer = _scope
    _scope = _Scope(seed, layer_index)
    try:
        yield
    finally:
        _scope = outer


def next_generator(device: torch.device) -> Optional[torch.Generator]:
    """The generator of the next parameter; None (torch's default generator) outside a `parameter_scope`."""
    if _scope is None:
        return None
    seed = parameter_seed(_scope.seed, _scope.layer_index, _scope.drawn)
    _scope.drawn += 1
    return torch.Generator(device).manual_seed(seed)


def parameter_seed(seed: int, layer_index: int, number: int) -> int:
    """A 32-bit seed, different for each (layer_index, number) under one `seed`.

    32 bits because torch's CPU generator uses no more. `seed` is hashed, so that neighbouring seeds share no
    parameter's stream; the rest goes through MurmurHash3's 32-bit finaliser (Appleby 2011), which is one-to-one.
    """
    base = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "little")
    mixed = (base + layer_index * PARAMETERS_PER_LAYER + number) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


def create_parameter(
    neox_args,
    shape: Sequence[int],
    init_method: Callable,
    partition_dim: Optional[int] = None,
    groups: Optional[List[int]] = None,
) -> torch.nn.Parameter:
    """A parameter of neox_args.params_dtype on the current device: this rank's share of a master of `shape`.

    partition_dim: the dimension that is split over the model-parallel ranks, None for a replicated parameter.
    groups: see `megatron.mpu.utils.shard`.
    The master is drawn in fp32, on the CPU with use_cpu_initialization, else on the current device; the two draw
    different numbers, and so do different kinds of device.
    """
    device = current_device()
    draw_device = torch.device("cpu") if neox_args.use_cpu_initialization else device
    values = torch.empty(tuple(shape), dtype=torch.float32, device=draw_device)
    with torch.no_grad():
        init_method(values, generator=next_generator(draw_device))
        if partition_dim is not None and get_model_parallel_world_size() > 1:
            values = shard(values, partition_dim, get_model_parallel_rank(), get_model_parallel_world_size(), groups)
    parameter = torch.nn.Parameter(values.to(device=device, dtype=neox_args.params_dtype))
    if partition_dim is not None:
        mark_model_parallel(parameter, partition_dim, groups)
    return parameter


def mark_model_parallel(parameter: torch.nn.Parameter, partition_dim: int, groups: Optional[List[int]] = None):
    """Say that `parameter` is one rank's share of a larger one.

    `model_parallel` is what DeepSpeed reads: the gradient norm counts such a parameter on every rank, a replicated
    one only once. `partition_dim` and `partition_groups` say how to join the shares.
    """
    parameter.model_parallel = True
    parameter.partition_dim = partition_dim
    parameter.partition_groups = groups
