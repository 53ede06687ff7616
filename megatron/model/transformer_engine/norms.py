"""Transformer Engine's norms behind the interface of megatron.model.norms. GPT-NeoX's names: `<norm>.norm.weight`."""

from functools import partial
from typing import Callable, Tuple

import torch

from megatron import mpu
from megatron.model.transformer_engine import api
from megatron.model.transformer_engine.common import exempt_from_decay, sum_gradient
from megatron.model.transformer_engine.extra_state import keep_extra_state_plain


class _TENorm(torch.nn.Module):
    """A TE norm over the last dimension, of `shape`; sum_gradient: as in megatron.model.norms."""

    kind: type

    def __init__(self, shape: int, eps: float, sum_gradient: bool = False, **options):
        super().__init__()
        if not isinstance(shape, int):
            raise ValueError(f"{shape}: a norm of Transformer Engine is over one dimension")
        self.norm = self.kind(shape, eps=eps, device=mpu.current_device(), **options)
        exempt_from_decay(*self.norm.parameters())
        if sum_gradient:
            _sum_gradients(self.norm)
        keep_extra_state_plain(self)  # TE 2's norms have such an entry

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., shape]"""
        return self.norm(x.contiguous())


def _sum_gradients(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        sum_gradient(parameter)


class TELayerNorm(_TENorm):
    """LayerNorm of Transformer Engine."""

    kind = api.LayerNorm


class TERMSNorm(_TENorm):
    """RMSNorm of Transformer Engine."""

    kind = api.RMSNorm


def te_norm(neox_args) -> Tuple[Callable[..., torch.nn.Module], float]:
    """(class, eps) of norm te_layernorm or te_rmsnorm, as megatron.model.norms.get_norm returns it."""
    options = {"zero_centered_gamma": neox_args.zero_centered_gamma, "params_dtype": neox_args.params_dtype}
    if neox_args.norm == "te_layernorm":
        return partial(TELayerNorm, **options), neox_args.layernorm_epsilon
    return partial(TERMSNorm, **options), neox_args.rms_norm_epsilon
