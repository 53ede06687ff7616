"""What the wrappers of Transformer Engine's modules have in common."""

from typing import Any, Dict

import torch
import torch.distributed as dist

from megatron import mpu


def no_init(tensor: torch.Tensor) -> None:
    """For TE's init_method: initial weights are ours, so that they are those of a model without TE."""


def tensor_parallel_arguments() -> Dict[str, Any]:
    """The arguments by which TE's modules know the model-parallel ranks."""
    ranks = mpu.get_model_parallel_world_size()
    return {"tp_size": ranks, "tp_group": mpu.get_model_parallel_group() if ranks > 1 else None}


def sum_gradient(parameter: torch.nn.Parameter) -> None:
    """Add up the gradients of a replicated parameter of which each model-parallel rank sees only a part.

    A hook on the parameter, because TE's modules use theirs where no function can be put around it.
    """
    if mpu.get_model_parallel_world_size() > 1:
        parameter.register_hook(_summed)


def _summed(gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=mpu.get_model_parallel_group())
    return total


def exempt_from_decay(*parameters: torch.nn.Parameter) -> None:
    """Of norms and biases, which the optimizer's groups know by our own classes and the name `bias`."""
    for parameter in parameters:
        parameter._no_weight_decay = True
