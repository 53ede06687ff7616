"""Norms against their formulas in fp64, in every dtype, over one axis and over (heads, head_dim)."""

import pytest
import torch

from megatron.errors import ConfigError
from megatron.model.norms import (
    FusedRMSNorm,
    LayerNorm,
    NonParametricLayernorm,
    NonParametricRMSNorm,
    RMSNorm,
    ScaleNorm,
    get_norm,
)
from tests.helpers.configs import tiny_args
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

EPS = 1e-3
"""Large enough to be missed if it were left out or put outside of the root."""


def _layernorm(x, axes, parameters):
    centred = x - x.mean(axes, keepdim=True)
    normed = centred / (centred.square().mean(axes, keepdim=True) + EPS).sqrt()
    return normed * parameters["weight"] + parameters["bias"] if parameters else normed


def _rmsnorm(x, axes, parameters):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * parameters["scale"]


def _rmsnorm_without_scale(x, axes, parameters):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def _scalenorm(x, axes, parameters):
    return x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=EPS) * parameters["g"]


NORMS = {
    LayerNorm: (_layernorm, ["weight", "bias"]),
    NonParametricLayernorm: (_layernorm, []),
    RMSNorm: (_rmsnorm, ["scale"]),
    FusedRMSNorm: (_rmsnorm, ["scale"]),
    NonParametricRMSNorm: (_rmsnorm_without_scale, []),
    ScaleNorm: (_scalenorm, ["g"]),
}


def _perturbed(norm):
    """Parameters that are not all ones and zeros, which would hide a wrong place."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(10,), (3, 8)], ids=["hidden", "heads"])
@pytest.mark.parametrize("kind", NORMS, ids=lambda kind: kind.__name__)
def test_formula(kind, shape, dtype):
    formula, names = NORMS[kind]
    norm = _perturbed(kind(shape, eps=EPS)).to(dtype)
    assert [name for name, _ in norm.named_parameters()] == names
    x = torch.randn(5, 2, *shape, generator=torch.Generator().manual_seed(2)).mul(0.5).add(0.2).to(dtype)
    x.requires_grad_()
    output = norm(x)
    assert output.dtype == dtype
    output.float().pow(3).sum().backward()

    truth_x = x.detach().double().requires_grad_()
    parameters = {name: value.detach().double().requires_grad_() for name, value in norm.named_parameters()}
    truth = formula(truth_x, tuple(range(-len(shape), 0)), parameters)
    truth.pow(3).sum().backward()
    assert_close(output, truth.to(dtype) if dtype != torch.float32 else truth, FORWARD, "output")
    if dtype == torch.float32:
        assert_close(x.grad, truth_x.grad, GRADIENT, "input gradient")
        for name, parameter in norm.named_parameters():
            assert_close(parameter.grad, parameters[name].grad, GRADIENT, name)


SCALED = (LayerNorm, RMSNorm, FusedRMSNorm)
"""Have a vector of scales, which zero_centered stores as its difference from 1."""


@pytest.mark.parametrize("shape", [(10,), (3, 8)], ids=["hidden", "heads"])
@pytest.mark.parametrize("kind", SCALED, ids=lambda kind: kind.__name__)
def test_zero_centered_is_the_formula_with_one_added(kind, shape):
    formula, names = NORMS[kind]
    norm = kind(shape, eps=EPS, zero_centered=True)
    assert all(torch.equal(value, torch.zeros(shape)) for value in norm.state_dict().values())
    norm = _perturbed(norm)
    x = torch.randn(5, 2, *shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    output = norm(x)
    output.pow(3).sum().backward()

    truth_x = x.detach().double().requires_grad_()
    stored = {name: value.detach().double().requires_grad_() for name, value in norm.named_parameters()}
    truth = formula(truth_x, tuple(range(-len(shape), 0)), {**stored, names[0]: 1 + stored[names[0]]})
    truth.pow(3).sum().backward()
    assert_close(output, truth, FORWARD, "output")
    assert_close(x.grad, truth_x.grad, GRADIENT, "input gradient")
    for name, parameter in norm.named_parameters():
        assert_close(parameter.grad, stored[name].grad, GRADIENT, name)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("shape", [(10,), (3, 8)], ids=["hidden", "heads"])
@pytest.mark.parametrize("kind", SCALED, ids=lambda kind: kind.__name__)
def test_zero_centered_rounds_once_in_half_precision(kind, shape, dtype):
    """The error is half a step of the output's dtype, though 1 + scale has no exact form in it."""
    formula, names = NORMS[kind]
    norm = _perturbed(kind(shape, eps=EPS, zero_centered=True)).to(dtype)
    x = torch.randn(50, *shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    stored = {name: value.detach().double() for name, value in norm.named_parameters()}
    truth = formula(x.double(), tuple(range(-len(shape), 0)), {**stored, names[0]: 1 + stored[names[0]]})
    half_steps = (norm(x).double() - truth).abs() / (truth.abs().clamp(min=1e-2) * torch.finfo(dtype).eps / 2)
    assert half_steps.max() <= 1.01


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_zero_centered_rmsnorm_has_the_bits_of_gemma3(dtype):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    ours, theirs = _perturbed(RMSNorm(48, eps=1e-6, zero_centered=True)).to(dtype), Gemma3RMSNorm(48, 1e-6).to(dtype)
    assert torch.equal(RMSNorm(48, zero_centered=True).scale, Gemma3RMSNorm(48).weight)
    with torch.no_grad():
        theirs.weight.copy_(ours.scale)
    x = torch.randn(50, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(ours(x), theirs(x))


def test_an_int_is_a_shape_of_one_axis():
    assert LayerNorm(10).weight.shape == RMSNorm(10).scale.shape == (10,)


@pytest.mark.parametrize("kind", [RMSNorm, FusedRMSNorm, ScaleNorm], ids=lambda kind: kind.__name__)
def test_half_precision_does_not_overflow(kind):
    """300 squared is beyond fp16."""
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    output = kind(64).half()(x)
    expected = 1.0 if kind is not ScaleNorm else 64**-0.5
    assert torch.allclose(output.float(), torch.tensor(expected), rtol=2e-3)


@pytest.mark.parametrize("kind", [k for k in NORMS if k is not NonParametricLayernorm], ids=lambda kind: kind.__name__)
def test_fp32_parameters_serve_half_inputs(kind):
    x = torch.randn(2, 10, generator=torch.Generator().manual_seed(3))
    norm = _perturbed(kind(10, eps=EPS))
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    assert_close(norm(x.bfloat16()), norm(x))


@pytest.mark.parametrize(
    "settings, kind, eps",
    [
        (dict(norm="layernorm"), LayerNorm, 1e-5),
        (dict(norm="layernorm", layernorm_epsilon=2e-3), LayerNorm, 2e-3),
        (dict(norm="rmsnorm"), RMSNorm, 1e-8),
        (dict(norm="rmsnorm", rms_norm_epsilon=1e-6, rmsnorm_fusion=True), FusedRMSNorm, 1e-6),
        (dict(norm="scalenorm", scalenorm_epsilon=1e-4), ScaleNorm, 1e-4),
        (dict(norm="non_parametric_layernorm", layernorm_epsilon=1e-4), NonParametricLayernorm, 1e-4),
    ],
)
def test_get_norm(settings, kind, eps):
    assert get_norm(tiny_args(**settings)) == (kind, eps)


@pytest.mark.parametrize(
    "settings, kind",
    [
        (dict(norm="layernorm"), LayerNorm),
        (dict(norm="rmsnorm"), RMSNorm),
        (dict(norm="rmsnorm", rmsnorm_fusion=True), FusedRMSNorm),
    ],
)
def test_get_norm_knows_zero_centered_gamma(settings, kind):
    norm, eps = get_norm(tiny_args(**settings, zero_centered_gamma=True))
    built = norm(10, eps)
    assert type(built) is kind and built.eps == eps and built.zero_centered
    assert not get_norm(tiny_args(**settings))[0](10, eps).zero_centered


@pytest.mark.parametrize("norm", ("scalenorm", "non_parametric_layernorm"))
def test_zero_centered_gamma_needs_a_gamma(norm):
    with pytest.raises(ConfigError, match=f"zero_centered_gamma=True.*norm={norm}"):
        tiny_args(norm=norm, zero_centered_gamma=True)
