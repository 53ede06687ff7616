"""Normalisation layers. Parameter names are those of GPT-NeoX checkpoints: weight and bias, scale, g, none.

All take (shape, eps=, sequence_parallel=): `shape` is the trailing shape of the input that is scaled, an int or a
tuple such as (heads, head_dim). `sequence_parallel` says that the input is a piece of the sequence, so that the
gradient of a replicated parameter is to be summed over the model-parallel ranks.
"""

from typing import Sequence, Tuple, Union

import torch
import torch.nn.functional as F

from megatron import mpu

Shape = Union[int, Sequence[int]]


class Norm(torch.nn.Module):
    """Base of the norms; their parameters get no weight decay."""

    def __init__(self, shape: Shape, eps: float, sequence_parallel: bool = False):
        super().__init__()
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps = eps
        self.sequence_parallel = sequence_parallel

    def extra_repr(self) -> str:
        return f"{self.shape}, eps={self.eps}"

    def _in_use(self, parameter: torch.Tensor) -> torch.Tensor:
        return mpu.copy_weight_to_sequence_parallel_region(parameter) if self.sequence_parallel else parameter


class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias, statistics over all of `shape` (Ba et al. 2016)."""

    def __init__(self, shape: Shape, eps: float = 1e-5, sequence_parallel: bool = False):
        super().__init__(shape, eps, sequence_parallel)
        self.weight = torch.nn.Parameter(torch.ones(self.shape))
        self.bias = torch.nn.Parameter(torch.zeros(self.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._in_use(self.weight).to(x.dtype)
        bias = self._in_use(self.bias).to(x.dtype)
        return F.layer_norm(x, self.shape, weight, bias, self.eps)


class NonParametricLayernorm(Norm):
    """LayerNorm without weight and bias (Groeneveld et al. 2024, OLMo)."""

    def __init__(self, shape: Shape, eps: float = 1e-5, sequence_parallel: bool = False):
        super().__init__(shape, eps, sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.shape, None, None, self.eps)


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * scale, mean over the last dimension only, in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, shape: Shape, eps: float = 1e-8, sequence_parallel: bool = False):
        super().__init__(shape, eps, sequence_parallel)
        self.scale = torch.nn.Parameter(torch.ones(self.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        return (self._in_use(self.scale) * normed).to(x.dtype)


class FusedRMSNorm(RMSNorm):
    """RMSNorm through torch's own kernel (rmsnorm_fusion): one pass over memory, the same parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self._in_use(self.scale).to(x.dtype)
        if len(self.shape) == 1:
            return F.rms_norm(x, self.shape, scale, self.eps)
        return F.rms_norm(x, self.shape[-1:], None, self.eps) * scale


class ScaleNorm(Norm):
    """x / max(|x|, eps) * g, the length over the last dimension, g one number (Nguyen and Salazar 2019)."""

    def __init__(self, shape: Shape, eps: float = 1e-8, sequence_parallel: bool = False):
        super().__init__(shape, eps, sequence_parallel)
        self.g = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # fp32: in half precision the squares overflow from a length of 256 on.
        values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        length = values.norm(dim=-1, keepdim=True).clamp(min=self.eps)
        return (self._in_use(self.g) * (values / length)).to(x.dtype)


def get_norm(neox_args) -> Tuple[type, float]:
    """(class, eps) of the norm that `neox_args.norm` names.

    layernorm_fusion needs no class of its own: torch's layer norm is one kernel.
    """
    if neox_args.norm == "rmsnorm":
        return (FusedRMSNorm if neox_args.rmsnorm_fusion else RMSNorm), neox_args.rms_norm_epsilon
    if neox_args.norm == "layernorm":
        return LayerNorm, neox_args.layernorm_epsilon
    if neox_args.norm == "non_parametric_layernorm":
        return NonParametricLayernorm, neox_args.layernorm_epsilon
    if neox_args.norm == "scalenorm":
        return ScaleNorm, neox_args.scalenorm_epsilon
    if neox_args.norm in ("te_rmsnorm", "te_layernorm"):
        from megatron.model.transformer_engine import te_norm

        return te_norm(neox_args)
    raise ValueError(f"norm={neox_args.norm!r} should have been refused with the config")
