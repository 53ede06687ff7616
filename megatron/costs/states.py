"""Bytes of weights, gradients and optimizer states on one rank, as DeepSpeed 0.19 allocates them.

N parameters of a rank, c bytes a number of the model's precision, r data-parallel replicas; M = 4 bytes a master
weight (2 where `fp16` or `bf16` keep masters in half precision):

    precision, ZeRO                   weights     gradients             optimizer: masters, states of them
    fp32, 0                           4N          4N                    none,     4kN
    bfloat16, 0                       2N          2N                    MN,       4kN
    bfloat16, 0, pipeline             2N          2N, and 2N summed     MN/r,     4kN/r
    bfloat16, 1, summed in fp32       2N          2N, and 4N summed     MN/r,     4kN/r
    any, 1                            cN          cN                    MN/r,     MkN/r
    any, 2                            cN          aN/r                  MN/r,     MkN/r
    any, 3                            cN/r        aN/r                  MN/r,     MkN/r

k: numbers per master weight that the optimizer keeps (2 of Adam's), a: bytes of grad_accum_dtype. fp16 without ZeRO
runs as stage 1 here. Flat groups are padded to 2r numbers. ZeRO 3 pads each parameter to r, and keeps those of up to
param_persistence_threshold numbers whole besides. The weights that it fetches ahead arrive in one flat buffer, out of
which they are copied, and which is there until the last of them is used: up to prefetch_bucket_size numbers more.
"""

import math
from typing import Any, List, NamedTuple

from megatron.costs.parameters import Shapes, count

_BYTES = {"fp32": 4, "fp16": 2, "bfloat16": 2, "bf16": 2}
_BUCKET = 500_000_000
_PIECE = 1 << 22
"""Numbers whose bfloat16 gradients are fp32 at a time, if no parameter is larger: that of master_weights.py."""


class States(NamedTuple):
    """Bytes. gradients: at the end of the backward pass; standing: those of them that are allocated all the time.
    buffers: what DeepSpeed allocates for the backward pass. step: what only the optimizer's step needs, or the sum
    over the replicas before it. gathered: weights of other replicas that ZeRO 3 fetches."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    step: int
    gathered: int = 0
    standing: int = 0


def precision_bytes(neox_args) -> int:
    """Bytes of a number of the model's precision."""
    return _BYTES[neox_args.precision]


def zero_stage(neox_args) -> int:
    """The ZeRO stage that runs: fp16 without ZeRO does as stage 1, see megatron/training/engine.py."""
    return 1 if neox_args.precision == "fp16" and neox_args.zero_stage == 0 else neox_args.zero_stage


def states(neox_args, parameters: Shapes, replicas: int) -> States:
    """The bytes of a rank with these parameters in a group of `replicas` data-parallel ranks.

    Frozen ones are weights only, and whole but for ZeRO 3.
    """
    trained = [parameter for parameter in parameters if parameter.trains]
    if zero_stage(neox_args) == 3:
        return _zero3(neox_args, parameters, trained, replicas)
    frozen = precision_bytes(neox_args) * (count(parameters) - count(trained))
    held = _of_trained(neox_args, trained, replicas) if trained else States(0, 0, 0, 0, 0)
    return held._replace(weights=held.weights + frozen)


def _of_trained(neox_args, parameters: Shapes, replicas: int) -> States:
    stage = zero_stage(neox_args)
    in_bf16 = neox_args.precision == "bfloat16"
    if in_bf16 and (neox_args.is_pipe_parallel if stage == 0 else stage == 1 and accumulation_bytes(neox_args) == 4):
        return _bf16_optimizer(neox_args, parameters, replicas)
    if stage == 0:
        return _replicated(neox_args, parameters, replicas)
    return _zero(neox_args, parameters, replicas, stage)


def accumulation_bytes(neox_args) -> int:
    """Bytes of a summed gradient's number: data_types.grad_accum_dtype, by default as the model."""
    extra = (neox_args.deepspeed_extra_args or {}).get("data_types")
    name = (neox_args.data_types or extra or {}).get("grad_accum_dtype")
    return precision_bytes(neox_args) if name is None else _BYTES[name]


def _replicated(neox_args, parameters, replicas: int) -> States:
    """fp32: the torch optimizer itself. bfloat16: see megatron/training/master_weights.py."""
    numel, size = count(parameters), precision_bytes(neox_args)
    masters = 0 if size == 4 else 4 * numel
    kept = sum(4 * _state_numbers(neox_args, parameter.shape) for parameter in parameters)
    summed = size * min(numel, _BUCKET) if replicas > 1 else 0
    piece = min(numel, max(_PIECE, max(parameter.numel for parameter in parameters)))
    step = max(summed, 0 if size == 4 else 4 * piece)
    return States(size * numel, size * numel, masters + kept, 0, step)


def _bf16_optimizer(neox_args, parameters, replicas: int) -> States:
    size, flats = accumulation_bytes(neox_args), _flat_groups(neox_args, parameters, replicas)
    numel, share = sum(flats), sum(flat // replicas for flat in flats)
    kept = 4 * sum(_state_numbers(neox_args, (flat // replicas,)) for flat in flats)
    cast = 0 if size == 4 else 4 * share
    summed = size * numel
    # The sum over the replicas is made in a copy of them all, in bf16 if they are not.
    step = max(cast, (size if size == 2 else 6) * min(numel, _BUCKET))
    # What backward leaves on the parameters is added to the flat sums, and freed after the step only.
    gradients = summed + 2 * count(parameters)
    return States(2 * numel, gradients, 4 * share + kept, 0, step, standing=summed)


def _zero(neox_args, parameters, replicas: int, stage: int) -> States:
    size, flats = precision_bytes(neox_args), _flat_groups(neox_args, parameters, replicas)
    share = sum(flat // replicas for flat in flats)
    master = _master_bytes(neox_args)
    kept = master * sum(_state_numbers(neox_args, (flat // replicas,)) for flat in flats)
    gradients = size * count(parameters) if stage == 1 else accumulation_bytes(neox_args) * share
    largest = max(flat // replicas for flat in flats)
    optimizer, step = master * share + kept, _flat_gradient_bytes(size, master) * largest
    if _offloads(neox_args, "offload_optimizer"):
        optimizer = step = 0
    return States(size * sum(flats), gradients, optimizer, _bucket_bytes(neox_args), step)


def _zero3(neox_args, parameters, trained, replicas: int) -> States:
    size, master = precision_bytes(neox_args), _master_bytes(neox_args)
    held, share = (sum(-(-parameter.numel // replicas) for parameter in some) for some in (parameters, trained))
    threshold = int(_zero_setting(neox_args, "param_persistence_threshold", 100_000))
    whole = sum(parameter.numel for parameter in parameters if parameter.numel <= threshold and replicas > 1)
    live = (
        0
        if replicas == 1
        else min(int(_zero_setting(neox_args, "max_live_parameters", 1_000_000_000)), count(parameters) - whole)
    )
    kept = master * _state_numbers(neox_args, (share,))
    optimizer, step = master * share + kept, _flat_gradient_bytes(size, master) * share
    if _offloads(neox_args, "offload_optimizer"):
        optimizer = step = 0
    weights = size * whole + (0 if _offloads(neox_args, "offload_param") else size * held)
    gradients = accumulation_bytes(neox_args) * share
    gathered = size * (live + min(live, int(_zero_setting(neox_args, "prefetch_bucket_size", 50_000_000))))
    return States(weights, gradients, optimizer, _bucket_bytes(neox_args), step, gathered, standing=gradients)


def _bucket_bytes(neox_args) -> int:
    """The buffers in which gradients are collected for one collective, allocated whole."""
    if not _zero_setting(neox_args, "contiguous_gradients", True):
        return 0
    overlap = _zero_setting(neox_args, "overlap_comm", zero_stage(neox_args) == 3)
    two = overlap and zero_stage(neox_args) < 3 and not neox_args.is_pipe_parallel
    size = int(_zero_setting(neox_args, "reduce_bucket_size", _BUCKET))
    return (2 if two else 1) * size * precision_bytes(neox_args)


def _zero_setting(neox_args, name: str, default: Any) -> Any:
    zero = neox_args.zero_optimization or {}
    value = zero.get(name, zero.get(f"stage3_{name}"))
    return default if value is None else value


def _offloads(neox_args, name: str) -> bool:
    return ((neox_args.zero_optimization or {}).get(name) or {}).get("device", "none") not in (None, "none")


def _master_bytes(neox_args) -> int:
    fp16, bf16 = neox_args.fp16 or {}, neox_args.bf16 or {}
    half = fp16.get("fp16_master_weights_and_grads") or bf16.get("bf16_master_weights_and_grads")
    return 2 if half and neox_args.precision != "fp32" else 4


def _flat_groups(neox_args, parameters, replicas: int) -> List[int]:
    """Numbers of each flat parameter group, padding included."""
    decayed = sum(p.numel for p in parameters if p.decays and neox_args.weight_decay)
    groups = (decayed, count(parameters) - decayed)
    return [-(-numel // (2 * replicas)) * 2 * replicas for numel in groups if numel]


def _flat_gradient_bytes(size: int, master: int) -> int:
    """A gradient's number in the flat copy that the optimizer takes, and in the copy before its precision changes."""
    return master if size == master else size + master


def _state_numbers(neox_args, shape) -> int:
    """Numbers that the optimizer keeps for a tensor that it steps, beside the tensor."""
    kind = (neox_args.optimizer_type or "adam").lower()
    params = (neox_args.optimizer or {}).get("params") or {}
    numel = math.prod(shape)
    momentum = numel if (params.get("momentum") or 0) > 0 else 0
    if kind == "sgd":
        return momentum
    if kind == "sm3":  # one vector per axis
        return sum(shape) + momentum
    return {"lion": 1, "madgrad_wd": 3}.get(kind, 2) * numel
