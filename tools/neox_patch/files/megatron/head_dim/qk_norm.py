"""Norms on queries and keys before the rotary embedding: see the argument `qk_norm_type`."""

from typing import Optional, Tuple

from torch import nn

from megatron import mpu
from megatron.head_dim.config import head_geometry


def qk_norm_type(neox_args) -> Optional[str]:
    """joint, per_head, or None for no norm."""
    if neox_args.qk_norm_type is not None:
        return neox_args.qk_norm_type
    return "joint" if neox_args.use_qk_layernorm else None


def per_head_norms(neox_args) -> Tuple[nn.Module, nn.Module]:
    """A norm for queries and one for keys, [..., head_dim]: one vector of weights that all heads share.

    Each tensor-parallel rank has a copy of the weights and some of the heads, so their gradient is summed over the
    ranks. With sequence_parallel GPT-NeoX does so itself, for every norm (mark_norms_for_sequence_parallel_grad_sync).
    """
    from megatron.model.norms import get_norm  # megatron.model itself imports this module

    norm, eps = get_norm(neox_args)
    norms = tuple(norm(head_geometry(neox_args).head_dim, eps=eps) for _ in range(2))
    if not neox_args.sequence_parallel:
        for parameter in (parameter for module in norms for parameter in module.parameters()):
            parameter.register_hook(_sum_over_ranks)
    return norms


def _sum_over_ranks(gradient):
    return mpu.reduce_from_model_parallel_region(gradient)
