"""Norms on queries and keys, before the rotary embedding: see `qk_norm_type`; and on values: `v_norm`.

Letters: s tokens, b batch, n query heads, m key heads (of this rank), d head_dim.
"""

from functools import partial
from typing import Dict, Optional

import torch
from torch import nn

from megatron import mpu
from megatron.geometry import HeadGeometry
from megatron.model.norms import (
    LayerNorm,
    NonParametricLayernorm,
    NonParametricRMSNorm,
    Norm,
    RMSNorm,
    ScaleNorm,
    get_norm,
    wide_dtype,
)


def build_qk_norms(neox_args, qk_norm: str, geometry: HeadGeometry) -> Dict[str, nn.Module]:
    """The norm modules of one layer by the names that they have inside `attention`. geometry: the whole layer's.

    joint: {"qk_layernorm"}, for both; else {"q_layernorm", "k_layernorm"}.
    """
    if qk_norm == "joint":
        return {"qk_layernorm": _joint(neox_args, geometry.shard(mpu.get_model_parallel_world_size()))}
    if qk_norm == "per_head":
        norm, eps = get_norm(neox_args)
        # The weights serve all heads, of which each rank sees its own.
        return {name: norm(geometry.head_dim, eps, True) for name in ("q_layernorm", "k_layernorm")}
    return _full_width(neox_args, geometry)


def build_v_norm(neox_args, geometry: HeadGeometry) -> nn.Module:
    """The norm over each head of the values; without weights, so that `norm` has no part in it."""
    return NonParametricRMSNorm(geometry.head_dim, neox_args.rms_norm_epsilon)


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


def _full_width(neox_args, geometry: HeadGeometry) -> Dict[str, nn.Module]:
    """OLMo 2's: a norm over all query heads and one over all key heads, each rank with its share of the weights."""
    kind = _FULL_WIDTH[neox_args.norm]  # others are refused with the config
    if neox_args.zero_centered_gamma:
        kind = partial(kind, zero_centered=True)
    _, eps = get_norm(neox_args)
    widths = {"q_layernorm": geometry.query_hidden_size, "k_layernorm": geometry.kv_hidden_size}
    norms = {name: kind(width, eps) for name, width in widths.items()}
    norms["k_layernorm"].key_geometry = geometry
    for name, width in widths.items():
        for parameter in norms[name].parameters():
            _keep_share(parameter, width)
    return norms


def _keep_share(parameter: nn.Parameter, width: int) -> None:
    ranks = mpu.get_model_parallel_world_size()
    parameter.data = mpu.shard(parameter.data, 0, mpu.get_model_parallel_rank(), ranks, [width])
    mpu.mark_model_parallel(parameter, 0, [width])


class _AllHeads(Norm):
    """Makes a norm of one rank's heads, [s, b, n, d], one of the heads of all ranks together.

    key_geometry: the whole layer's, for the norm of the keys, whose heads several ranks can share.
    """

    key_geometry: Optional[HeadGeometry] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._of_row(x.flatten(-2)).unflatten(-1, x.shape[-2:])  # as [s, b, n·d]

    def _of_row(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _in_use(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter if self.key_geometry is None else mpu.gather_kv_head(parameter, self.key_geometry, 0)

    def _mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of the ranks' means: all have as many heads, and all heads are on as many ranks.

        All ranks use the mean, so their gradients of it are summed too.
        """
        total = mpu.reduce_from_model_parallel_region(values.mean(-1, keepdim=True))
        return mpu.copy_to_model_parallel_region(total) / mpu.get_model_parallel_world_size()

    def _standardised(self, x: torch.Tensor) -> torch.Tensor:
        """Mean 0 and variance 1, in fp32 for half precision."""
        values = x.to(wide_dtype(x))
        centred = values - self._mean(values)
        return centred * torch.rsqrt(self._mean(centred.square()) + self.eps)


class AllHeadsRMSNorm(_AllHeads, RMSNorm):
    """RMSNorm over all heads."""

    pieces = ()

    def _of_row(self, x: torch.Tensor) -> torch.Tensor:
        values = x.to(wide_dtype(x))
        normed = values * torch.rsqrt(self._mean(values.square()) + self.eps)
        return (self._multiplier(self.scale, values.dtype) * normed).to(x.dtype)


class AllHeadsLayerNorm(_AllHeads, LayerNorm):
    """LayerNorm over all heads."""

    def _of_row(self, x: torch.Tensor) -> torch.Tensor:
        normed = self._standardised(x)
        return (normed * self._multiplier(self.weight, normed.dtype) + self._in_use(self.bias)).to(x.dtype)


class AllHeadsNonParametricLayernorm(_AllHeads, NonParametricLayernorm):
    """LayerNorm over all heads without weight and bias."""

    def _of_row(self, x: torch.Tensor) -> torch.Tensor:
        return self._standardised(x).to(x.dtype)


_FULL_WIDTH = {
    "rmsnorm": AllHeadsRMSNorm,
    "layernorm": AllHeadsLayerNorm,
    "non_parametric_layernorm": AllHeadsNonParametricLayernorm,
}
"""By the names of `norm`. rmsnorm_fusion changes nothing here: the statistics are summed over the ranks."""
