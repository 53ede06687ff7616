"""The MLP against its matrix products in fp64, for every activation and with or without biases; its widths."""

import pytest
import torch
import torch.nn.functional as F

from megatron.geometry import MLPGeometry
from megatron.model.activations import GATES, PLAIN, is_gated
from megatron.model.init_functions import get_init_methods
from megatron.model.mlp import ParallelMLP
from megatron.model.utils import get_params_for_weight_decay_optimization
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import NARROW, WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

HIDDEN, BRANCH = WIDE_NON_DIVISIBLE["hidden_size"], 52


def _mlp(**settings):
    neox_args = tiny_args(**{**WIDE_NON_DIVISIBLE, "ffn_hidden_size": BRANCH, "init_method_std": 0.2, **settings})
    mlp = ParallelMLP(neox_args, *get_init_methods(neox_args))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in mlp.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return mlp


def _act(name):
    return {**PLAIN, **GATES}[name]


def _truth(activation, parameters, x):
    """By rows of linear1 rather than by halves of its output."""
    rows, bias = parameters["linear1.weight"], parameters.get("linear1.bias")
    hidden = torch.einsum("sbh,fh->sbf", x, rows[:BRANCH]) + (0 if bias is None else bias[:BRANCH])
    if is_gated(activation):
        gate = torch.einsum("sbh,fh->sbf", x, rows[BRANCH:]) + (0 if bias is None else bias[BRANCH:])
        hidden = hidden * _act(activation)(gate)
    else:
        hidden = _act(activation)(hidden)
    return torch.einsum("sbf,hf->sbh", hidden, parameters["linear2.weight"])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", [*PLAIN, *GATES])
def test_output_and_gradients(activation, bias):
    mlp = _mlp(activation=activation, use_bias_in_mlp=bias)
    x = torch.randn(5, 2, HIDDEN, generator=torch.Generator().manual_seed(4)).requires_grad_()
    output, output_bias = mlp(x)
    assert (output_bias is mlp.linear2.bias) and (output_bias is None) == (not bias)
    output.square().sum().mul(0.1).backward()

    parameters = {name: value.detach().double().requires_grad_() for name, value in mlp.named_parameters()}
    truth_x = x.detach().double().requires_grad_()
    truth = _truth(activation, parameters, truth_x)
    truth.square().sum().mul(0.1).backward()
    scale = max(1.0, truth.abs().max().item())
    assert_close(output / scale, truth / scale, FORWARD, "output")
    gradients = {"x": (x.grad, truth_x.grad)}
    gradients.update(
        (name, (p.grad, parameters[name].grad)) for name, p in mlp.named_parameters() if p.grad is not None
    )
    assert len(gradients) == (4 if bias else 3)
    for name, (mine, expected) in gradients.items():
        scale = max(1.0, expected.abs().max().item())
        assert_close(mine / scale, expected / scale, GRADIENT, name)


def test_bias_gelu_fusion_without_a_bias():
    mlp = _mlp(activation="gelu", bias_gelu_fusion=True, use_bias_in_mlp=False)
    x = torch.randn(3, 1, HIDDEN, generator=torch.Generator().manual_seed(4))
    expected = F.gelu(x @ mlp.linear1.weight.T, approximate="tanh") @ mlp.linear2.weight.T
    assert_close(mlp(x)[0], expected)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(
    "widths",
    [
        dict(ffn_hidden_size=52),
        dict(),
        dict(intermediate_size=290, mlp_multiple_of=32),
        dict(intermediate_size=200),
        dict(expansion_factor=2.5),
    ],
    ids=str,
)
def test_widths_are_those_of_the_geometry(activation, widths):
    neox_args = tiny_args(**NARROW, activation=activation, **widths)
    geometry = MLPGeometry.from_config(NARROW["hidden_size"], is_gated(activation), **widths)
    mlp = ParallelMLP(neox_args, *get_init_methods(neox_args))
    assert mlp.linear1.weight.shape == (geometry.linear1_width, NARROW["hidden_size"])
    assert mlp.linear2.weight.shape == (NARROW["hidden_size"], geometry.ffn_hidden_size)
    assert mlp(torch.zeros(1, 1, NARROW["hidden_size"]))[0].shape == (1, 1, NARROW["hidden_size"])


def test_the_second_projection_uses_the_output_init_method():
    mlp = _mlp(init_method="normal", output_layer_init_method="scaled_normal", num_layers=8)
    assert mlp.linear1.weight.std().item() == pytest.approx(0.2, rel=0.05)
    assert mlp.linear2.weight.std().item() == pytest.approx(0.2 / 4, rel=0.05)


def _model_with_every_kind():
    from megatron.model.norms import LayerNorm, RMSNorm, ScaleNorm

    mlp = _mlp()
    norms = torch.nn.ModuleList([LayerNorm(4), RMSNorm((2, 3)), ScaleNorm(4)])
    model = torch.nn.ModuleDict({"mlp": mlp, "norms": norms, "free": torch.nn.Linear(2, 2, bias=False)})
    model["tied"] = torch.nn.Linear(1, 1, bias=False)
    model["tied"].weight = mlp.linear1.weight
    model["free"].weight._no_weight_decay = True
    model["frozen"] = torch.nn.Linear(2, 2)
    model["frozen"].requires_grad_(False)
    return model


def _names(model, parameters):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return sorted(names[id(parameter)] for parameter in parameters)


def test_weight_decay_groups():
    model = _model_with_every_kind()
    decayed, exempt = get_params_for_weight_decay_optimization(model, tiny_args(weight_decay=0.1))
    assert _names(model, decayed["params"]) == ["mlp.linear1.weight", "mlp.linear2.weight"]
    assert "weight_decay" not in decayed and exempt["weight_decay"] == 0.0
    expected = ["free.weight", "mlp.linear1.bias", "mlp.linear2.bias"]
    expected += ["norms.0.bias", "norms.0.weight", "norms.1.scale", "norms.2.g"]
    assert _names(model, exempt["params"]) == expected


def test_no_weight_decay_is_one_group():
    model = _model_with_every_kind()
    (group,) = get_params_for_weight_decay_optimization(model, tiny_args(weight_decay=0.0))
    assert group["weight_decay"] == 0.0 and len(group["params"]) == 9
