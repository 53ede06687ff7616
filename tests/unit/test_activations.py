"""Activations against their formulas in fp64."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron.model.activations import GATES, PLAIN, get_activation, is_gated
from tests.helpers.tolerances import assert_close

X = torch.linspace(-6, 6, 49, dtype=torch.float64)


def _gelu(x):
    return torch.tensor([value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.flatten()]).view_as(x)


def _gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _silu(x):
    return x / (1 + torch.exp(-x))


FORMULAS = {
    "gelu": _gelu,
    "relu": lambda x: x * (x > 0),
    "silu": _silu,
    "swish": _silu,
    "mish": lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
    "softsign": lambda x: x / (1 + x.abs()),
}
GATE_FORMULAS = {
    "geglu": _gelu,
    "geglu_tanh": _gelu_tanh,
    "reglu": FORMULAS["relu"],
    "swiglu": _silu,
    "glu": lambda x: 1 / (1 + torch.exp(-x)),
    "bilinear": lambda x: x,
}


def _activation(name, bias_gelu_fusion=False):
    return get_activation(SimpleNamespace(activation=name, bias_gelu_fusion=bias_gelu_fusion))


def test_every_activation_has_a_formula_here():
    assert PLAIN.keys() == FORMULAS.keys() and GATES.keys() == GATE_FORMULAS.keys()


@pytest.mark.parametrize("name", FORMULAS)
def test_plain(name):
    function, gated = _activation(name)
    assert not gated and not is_gated(name)
    assert_close(function(X), FORMULAS[name](X).double(), what=name)


@pytest.mark.parametrize("name", GATE_FORMULAS)
def test_gated_passes_the_first_half_and_activates_the_second(name):
    function, gated = _activation(name)
    assert gated and is_gated(name)
    up, gate = X.flip(0) * 0.3 + 1, X
    output = function(torch.stack([torch.cat([up, gate])] * 2))
    assert output.shape == (2, len(X))
    assert_close(output[1], up * GATE_FORMULAS[name](gate).double(), what=name)


def test_bias_gelu_fusion_is_the_tanh_form():
    function, _ = _activation("gelu", bias_gelu_fusion=True)
    assert_close(function(X), _gelu_tanh(X), what="tanh form")
    assert (function(X) - _gelu(X)).abs().max() > 1e-4
    # It concerns gelu only.
    assert_close(_activation("geglu", bias_gelu_fusion=True)[0](torch.cat([X, X])), X * _gelu(X).double())
