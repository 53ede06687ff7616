"""Norms on queries and keys, before the rotary embedding: see `qk_norm_type`."""

from typing import Dict

from torch import nn

from megatron import mpu
from megatron.errors import ConfigError
from megatron.geometry import HeadGeometry
from megatron.model.norms import ScaleNorm, get_norm


def build_qk_norms(neox_args, qk_norm: str, partition: HeadGeometry) -> Dict[str, nn.Module]:
    """The norm modules of one layer by the names that they have inside `attention`.

    joint: {"qk_layernorm"}, for both; else {"q_layernorm", "k_layernorm"}. partition: this rank's geometry.
    """
    if qk_norm == "joint":
        return {"qk_layernorm": _joint(neox_args, partition)}
    raise ConfigError(f"qk_norm_type={qk_norm} is not built")


def _joint(neox_args, partition: HeadGeometry) -> nn.Module:
    """GPT-NeoX's: one norm over [n, d] for queries and keys."""
    norm, eps = get_norm(neox_args)
    shape = (partition.num_attention_heads, partition.head_dim)
    # ScaleNorm's one number is the same on all ranks but sees only this rank's heads: sum its gradient.
    module = norm(shape, eps, norm is ScaleNorm)
    for parameter in module.parameters():
        if parameter.shape == shape:
            mpu.mark_model_parallel(parameter, 0)
    return module
