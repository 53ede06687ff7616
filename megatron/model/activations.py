"""Activation functions of the MLP."""

import functools
from typing import Callable, Tuple

import torch
import torch.nn.functional as F


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh approximation of gelu (Hendrycks and Gimpel 2016): bias_gelu_fusion, and the gate of geglu_tanh."""
    return F.gelu(x, approximate="tanh")


PLAIN = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "mish": F.mish,
    "softsign": F.softsign,
}
"""gelu is the exact form, x * Phi(x) with the error function (Hendrycks and Gimpel 2016)."""

GATES = {
    "geglu": F.gelu,
    "geglu_tanh": gelu_tanh,
    "reglu": F.relu,
    "swiglu": F.silu,
    "glu": torch.sigmoid,
    "bilinear": lambda x: x,
}
"""What is applied to the gate of a gated MLP (Shazeer 2020, table 1)."""


def is_gated(activation: str) -> bool:
    """Whether this activation multiplies two branches, so that linear1 has two branches of rows."""
    return activation in GATES


def get_activation(neox_args) -> Tuple[Callable, bool]:
    """(function, is_gated) for `neox_args.activation`.

    A gated function takes [..., 2f], the branch that passes and the gate in this order, and returns [..., f].
    """
    name = neox_args.activation
    if name in GATES:
        return gated(GATES[name]), True
    if name == "gelu" and neox_args.bias_gelu_fusion:
        return gelu_tanh, False
    return PLAIN[name], False


@functools.cache
def gated(act: Callable) -> Callable:
    """The function [..., 2f] -> [..., f]: first half * act(second half)."""

    def function(x: torch.Tensor) -> torch.Tensor:
        up, gate = x.chunk(2, dim=-1)  # 2 x [..., f]
        return up * act(gate)

    return function
