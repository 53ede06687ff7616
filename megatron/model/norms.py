"""Normalisation layers. Parameter names are those of GPT-NeoX checkpoints: weight and bias, scale, g, none.

All take (shape, eps=, sum_gradient=): `shape` is the trailing shape of the input that is scaled, an int or a tuple
such as (heads, head_dim). `sum_gradient` says that the parameters are replicated and that each model-parallel rank
sees only its piece of the input (of the sequence, or of the heads), so their gradient is to be summed over the ranks.
Those with a vector of scales also take zero_centered=: the vector is stored as its difference from 1.
"""

from functools import partial
from typing import Callable, Sequence, Tuple, Union

import torch
import torch.nn.functional as F

from megatron import mpu

Shape = Union[int, Sequence[int]]


class Norm(torch.nn.Module):
    """Base of the norms; their parameters get no weight decay."""

    def __init__(self, shape: Shape, eps: float, sum_gradient: bool = False, zero_centered: bool = False):
        super().__init__()
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps = eps
        self.sum_gradient = sum_gradient
        self.zero_centered = zero_centered

    def extra_repr(self) -> str:
        return f"{self.shape}, eps={self.eps}" + (", zero_centered" if self.zero_centered else "")

    def _new_scale(self) -> torch.nn.Parameter:
        """A multiplier of 1."""
        return torch.nn.Parameter(torch.zeros(self.shape) if self.zero_centered else torch.ones(self.shape))

    def _multiplier(self, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = self._in_use(scale).to(dtype)
        return 1 + scale if self.zero_centered else scale

    def _in_use(self, parameter: torch.Tensor) -> torch.Tensor:
        return mpu.copy_weight_to_sequence_parallel_region(parameter) if self.sum_gradient else parameter

    def _product_dtype(self, x: torch.Tensor) -> torch.dtype:
        """1 + scale would lose the low bits of scale in half precision: that product is made in fp32, cast once."""
        return wide_dtype(x) if self.zero_centered else x.dtype


class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias, statistics over all of `shape` (Ba et al. 2016)."""

    def __init__(self, shape: Shape, eps: float = 1e-5, sum_gradient: bool = False, zero_centered: bool = False):
        super().__init__(shape, eps, sum_gradient, zero_centered)
        self.weight = self._new_scale()
        self.bias = torch.nn.Parameter(torch.zeros(self.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self._product_dtype(x)
        weight, bias = self._multiplier(self.weight, dtype), self._in_use(self.bias).to(dtype)
        return F.layer_norm(x.to(dtype), self.shape, weight, bias, self.eps).to(x.dtype)


class NonParametricLayernorm(Norm):
    """LayerNorm without weight and bias (Groeneveld et al. 2024, OLMo)."""

    def __init__(self, shape: Shape, eps: float = 1e-5, sum_gradient: bool = False):
        super().__init__(shape, eps, sum_gradient)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.shape, None, None, self.eps)


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float, zero_centered: bool) -> torch.Tensor:
    """RMSNorm's formula; zero_centered: scale is the difference from 1."""
    normed = _over_rms(x, eps)
    scale = scale.to(normed.dtype)
    return ((1 + scale if zero_centered else scale) * normed).to(x.dtype)


def rms_norm_without_scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """NonParametricRMSNorm's formula."""
    return _over_rms(x, eps).to(x.dtype)


def _over_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.to(wide_dtype(x))
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * scale, mean over the last dimension only, in fp32 (Zhang and Sennrich 2019)."""

    pieces = ("formula",)
    formula = staticmethod(rms_norm)

    def __init__(self, shape: Shape, eps: float = 1e-8, sum_gradient: bool = False, zero_centered: bool = False):
        super().__init__(shape, eps, sum_gradient, zero_centered)
        self.scale = self._new_scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(x, self._in_use(self.scale), self.eps, self.zero_centered)


class NonParametricRMSNorm(Norm):
    """RMSNorm without weight, as on the values of Gemma 4."""

    pieces = ("formula",)
    formula = staticmethod(rms_norm_without_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(x, self.eps)


class FusedRMSNorm(RMSNorm):
    """RMSNorm through torch's own kernel (rmsnorm_fusion): one pass over memory, the same parameters."""

    pieces = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self._product_dtype(x)
        scale = self._multiplier(self.scale, dtype)
        if len(self.shape) == 1:
            return F.rms_norm(x.to(dtype), self.shape, scale, self.eps).to(x.dtype)
        return (F.rms_norm(x.to(dtype), self.shape[-1:], None, self.eps) * scale).to(x.dtype)


class ScaleNorm(Norm):
    """x / max(|x|, eps) * g, the length over the last dimension, g one number (Nguyen and Salazar 2019)."""

    def __init__(self, shape: Shape, eps: float = 1e-8, sum_gradient: bool = False):
        super().__init__(shape, eps, sum_gradient)
        self.g = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # fp32: in half precision the squares overflow from a length of 256 on.
        values = x.to(wide_dtype(x))
        length = values.norm(dim=-1, keepdim=True).clamp(min=self.eps)
        return (self._in_use(self.g) * (values / length)).to(x.dtype)


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """fp32 for half precision, else the dtype itself."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def get_norm(neox_args) -> Tuple[Callable[..., torch.nn.Module], float]:
    """(class, eps) of the norm that `neox_args.norm` names; under zero_centered_gamma a partial of the class.

    layernorm_fusion needs no class of its own: torch's layer norm is one kernel.
    """
    if neox_args.norm == "rmsnorm":
        return _scaled(neox_args, FusedRMSNorm if neox_args.rmsnorm_fusion else RMSNorm), neox_args.rms_norm_epsilon
    if neox_args.norm == "layernorm":
        return _scaled(neox_args, LayerNorm), neox_args.layernorm_epsilon
    if neox_args.norm == "non_parametric_layernorm":
        return NonParametricLayernorm, neox_args.layernorm_epsilon
    if neox_args.norm == "scalenorm":
        return ScaleNorm, neox_args.scalenorm_epsilon
    if neox_args.norm in ("te_rmsnorm", "te_layernorm"):
        from megatron.model.transformer_engine import te_norm

        return te_norm(neox_args)
    raise ValueError(f"norm={neox_args.norm!r} should have been refused with the config")


def _scaled(neox_args, kind: type) -> Callable[..., torch.nn.Module]:
    """A class of norms with a vector of scales, which is stored as the config says."""
    return partial(kind, zero_centered=True) if neox_args.zero_centered_gamma else kind
