"""Transformer Engine's linear layers, norms and MLP (the real Python of 1.12) against fp64 and our own layers."""

import io
import pickle

import pytest
import torch
import torch.nn.functional as F

from megatron import costs, mpu
from megatron.checkpointing.shards import Shards
from megatron.errors import ConfigError
from megatron.model.gpt2_model import build_model, cross_entropy
from megatron.model.mlp import ParallelMLP
from megatron.model.norms import get_norm
from megatron.model.utils import get_params_for_weight_decay_optimization
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import MHA, MQA, NARROW, WIDE_NON_DIVISIBLE
from tests.helpers.model_runs import batch, disturb, named_parameters
from tests.helpers.te import install_te, requires_te
from tests.helpers.te_layers import NATIVE_NAME, native_layout
from tests.helpers.tolerances import GRADIENT, LOSS, assert_close

pytestmark = [requires_te, pytest.mark.filterwarnings("ignore:.*cuda.amp.autocast:FutureWarning")]

S, B, H = 5, 3, 56
SHORT = dict(seq_length=16, max_position_embeddings=16)


@pytest.fixture(scope="module", autouse=True)
def transformer_engine():
    install_te()


def _noise(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _fill(module, scale=0.2):
    """Values from the order of the parameters; returns them by name in fp64, as leaves."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(_noise(*parameter.shape, seed=number) * scale)
    return {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}


def _compare(module, inputs, wanted, leaves, leaf_input):
    """Output of `module`, gradients of its parameters and input, with an fp64 result and its leaves."""
    x = inputs.clone().requires_grad_()
    output = module(x)
    if isinstance(output, tuple):
        output = output[0] + (0 if output[1] is None else output[1])
    weights = _noise(*output.shape, seed=9)
    (output * weights).sum().backward()
    (wanted * weights.double()).sum().backward()
    assert_close(output, wanted, what="output")
    assert_close(x.grad, leaf_input.grad, GRADIENT, "input")
    for name, parameter in module.named_parameters():
        assert_close(parameter.grad, leaves[name].grad, GRADIENT, name)
    with torch.no_grad():
        again = module(inputs)
    assert_close(again[0] if isinstance(again, tuple) else again, module(x)[0] if isinstance(again, tuple) else output)


# Norms


def _norm_formula(kind, x, leaves, eps, zero_centered, prefix=""):
    gamma = leaves[f"{prefix}weight"] + (1 if zero_centered else 0)
    if kind.endswith("rmsnorm"):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * gamma + leaves[f"{prefix}bias"]


@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero_centered"])
@pytest.mark.parametrize("kind", ["te_layernorm", "te_rmsnorm"])
def test_norms(kind, zero_centered):
    """With an epsilon that shows, over hidden states and over the heads of a transposed view."""
    args = tiny_args(norm=kind, zero_centered_gamma=zero_centered, layernorm_epsilon=0.1, rms_norm_epsilon=0.2)
    norm, eps = get_norm(args)
    assert eps == (0.1 if kind == "te_layernorm" else 0.2)
    fresh = norm(H, eps, False)
    assert [name for name, _ in fresh.named_parameters()] == ["norm.weight", "norm.bias"][: 2 - (kind == "te_rmsnorm")]
    assert torch.equal(fresh.norm.weight, torch.full((H,), 0.0 if zero_centered else 1.0))
    leaves = _fill(fresh)
    for inputs in (_noise(S, B, H), _noise(B, S, 4, H).transpose(0, 1)):
        x = inputs.double().requires_grad_()
        _compare(fresh, inputs, _norm_formula(kind, x, leaves, eps, zero_centered, "norm."), leaves, x)
        fresh.zero_grad()
        for leaf in leaves.values():
            leaf.grad = None


def test_norms_in_bfloat16_have_its_dtype_and_fp32_sums():
    args = tiny_args(norm="te_rmsnorm", precision="bfloat16")
    norm, eps = get_norm(args)
    module = norm(H, eps, False)
    assert module.norm.weight.dtype == torch.bfloat16
    x = _noise(S, B, H).bfloat16() * 3
    output = module(x)
    assert output.dtype == torch.bfloat16
    wide = x.double()
    assert_close(output, wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt())


# Linear layers


def _linears(args, native):
    if native:
        column, row = mpu.ColumnParallelLinear, mpu.RowParallelLinear
    else:
        from megatron.model.transformer_engine import TEColumnParallelLinear as column
        from megatron.model.transformer_engine import TERowParallelLinear as row
    with mpu.parameter_scope(7, 2):
        init = torch.nn.init.normal_
        return [
            column(args, H, 40, init_method=init),
            column(args, H, 40, init_method=init, bias=False, row_groups=[24, 16]),
            column(args, H, 40, init_method=init, stride=2, skip_bias_add=True),
            row(args, H, 40, init_method=init),
            row(args, H, 40, init_method=init, skip_bias_add=True, input_is_parallel=False),
            row(args, H, 40, init_method=init, bias=False, parallel_output=True),
        ]


def test_linear_layers():
    args = tiny_args()
    for ours, native in zip(_linears(args, False), _linears(args, True), strict=True):
        assert torch.equal(ours.weight, native.weight), "initial weights"
        names = [name for name, _ in native.named_parameters()]
        assert [name for name, _ in ours.named_parameters()] == names
        for name in names:
            mine, theirs = getattr(ours, name), getattr(native, name)
            for mark in ("model_parallel", "partition_dim", "partition_groups"):
                assert getattr(mine, mark, None) == getattr(theirs, mark, None), (name, mark)
        leaves = _fill(ours)
        x = _noise(S, B, H).double().requires_grad_()
        wanted = torch.einsum("sbh,oh->sbo", x, leaves["weight"]) + leaves.get("bias", 0)
        output, bias = ours(_noise(S, B, H))
        returned = getattr(ours, "skip_bias_add", False) and ours.use_bias
        assert (bias is not None) == returned
        _compare(ours, _noise(S, B, H), wanted, leaves, x)


def test_linear_layers_refuse_what_native_ones_do():
    from megatron.model.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    args, init = tiny_args(), torch.nn.init.normal_
    with pytest.raises(ValueError, match="gather_output with skip_bias_add"):
        TEColumnParallelLinear(args, H, 40, init_method=init, gather_output=True, skip_bias_add=True)
    with pytest.raises(ValueError, match=r"row_groups=\[24, 24\] do not add up to output_size=40"):
        TEColumnParallelLinear(args, H, 40, init_method=init, row_groups=[24, 24])
    with pytest.raises(ValueError, match="sequence_parallel needs input_is_parallel"):
        TERowParallelLinear(args, H, 40, init_method=init, sequence_parallel=True, input_is_parallel=False)


# MLP

ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "reglu": torch.relu,
    "swiglu": lambda x: x * torch.sigmoid(x),
}
GATED = ("geglu_tanh", "reglu", "swiglu")


def _mlp_formula(args, x, leaves):
    normed = _norm_formula(args.norm, x, leaves, 1e-5, args.zero_centered_gamma, "layer_norm_")
    rows = torch.einsum("sbh,oh->sbo", normed, leaves["fc1_weight"]) + leaves.get("fc1_bias", 0)
    if args.activation in GATED:
        gate, up = rows.tensor_split(2, -1)
        rows = ACTIVATIONS[args.activation](gate) * up
    else:
        rows = ACTIVATIONS[args.activation](rows)
    return torch.einsum("sbf,of->sbo", rows, leaves["fc2_weight"]) + leaves.get("fc2_bias", 0)


def _mlps(**settings):
    """(args, TE's, ours) from the same draw."""
    from megatron.model.transformer_engine import TELayerNormMLP

    values = dict(MHA, bias_gelu_fusion=True, layernorm_epsilon=1e-5, rms_norm_epsilon=1e-5, init_method_std=0.2)
    args = tiny_args(**{**values, **settings}, te_layernorm_mlp=True)
    modules = []
    for kind in (TELayerNormMLP, ParallelMLP):
        with mpu.parameter_scope(7, 2):
            modules.append(kind(args, torch.nn.init.normal_, torch.nn.init.xavier_normal_, layer_number=1))
    return args, *modules


@pytest.mark.parametrize("norm, zero_centered", [("layernorm", False), ("te_rmsnorm", True), ("rmsnorm", False)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_norm_and_mlp(activation, norm, zero_centered):
    bias = norm != "rmsnorm"
    args, module, native = _mlps(
        activation=activation, norm=norm, zero_centered_gamma=zero_centered, use_bias_in_mlp=bias, ffn_hidden_size=44
    )
    for name, parameter in module.named_parameters():
        theirs = dict(native.named_parameters()).get(NATIVE_NAME[name])
        if theirs is not None:
            assert torch.equal(native_layout(name, parameter, activation in GATED), theirs), name
            for mark in ("model_parallel", "partition_dim", "partition_groups"):
                assert getattr(parameter, mark, None) == getattr(theirs, mark, None), (name, mark)
    output, returned = module(_noise(S, B, H))
    assert (returned is None) == (not bias)
    leaves = _fill(module)
    x = _noise(S, B, H).double().requires_grad_()
    _compare(module, _noise(S, B, H), _mlp_formula(args, x, leaves), leaves, x)


@pytest.mark.parametrize(
    "settings",
    [
        dict(activation="swiglu", intermediate_size=200, mlp_multiple_of=16),
        dict(activation="swiglu", ffn_hidden_size=44),
        dict(activation="gelu", expansion_factor=1.5),
        dict(activation="relu"),
    ],
    ids=str,
)
def test_mlp_widths_are_those_of_the_native_mlp(settings):
    _, module, native = _mlps(**settings)
    assert module.fc1_weight.shape == native.linear1.weight.shape
    assert module.fc2_weight.shape == native.linear2.weight.shape


# Whole models

EVERYTHING = dict(te_columnparallel=True, te_rowparallel=True, te_layernorm_mlp=True)
MODELS = {
    "linear layers": dict(WIDE_NON_DIVISIBLE, te_columnparallel=True, te_rowparallel=True, norm="rmsnorm"),
    "norms": dict(NARROW, norm="te_layernorm", use_bias_in_attn_linear=False),
    "rms norms": dict(MQA, norm="te_rmsnorm", qk_norm_type="per_head", zero_centered_gamma=True),
    "mlp": dict(WIDE_NON_DIVISIBLE, te_layernorm_mlp=True, activation="swiglu", norm="rmsnorm", use_bias_in_mlp=False),
    "parallel residual": dict(MHA, **EVERYTHING, norm="te_layernorm", gpt_j_residual=True, bias_gelu_fusion=True),
    "sandwich": dict(MQA, **EVERYTHING, norm="te_rmsnorm", norm_placement="sandwich", activation="geglu_tanh"),
    "groups of heads": dict(
        hidden_size=80, num_attention_heads=6, head_dim=[[24, 2], {"layer": 1, "groups": [[16, 4, 2], [40, 2]]}],
        **EVERYTHING, norm="te_rmsnorm", activation="relu", qk_norm_type="per_head",
    ),
    "all of it": dict(NARROW, **EVERYTHING, te_mha=True, norm="te_rmsnorm", activation="reglu", no_weight_tying=False),
}  # fmt: skip


def _without_te(settings):
    native = {key: value for key, value in settings.items() if not key.startswith("te_")}
    if "norm" in native:
        native["norm"] = native["norm"].removeprefix("te_")
    return native


@pytest.mark.parametrize("name", MODELS)
def test_models_with_and_without_are_one_function(name):
    """Loss, gradients and parameter count, with translated weights; a norm's epsilon of 1e-8 is GPT-NeoX's default."""
    from tests.helpers.te_layers import copy_from_native

    args, native_args = (tiny_args(**{**SHORT, **s}) for s in (MODELS[name], _without_te(MODELS[name])))
    model, native = build_model(args), build_model(native_args)
    disturb(native, native_args)
    pairs = copy_from_native(model, native, args)
    inputs, targets = batch()
    losses = []
    for each, its_args in ((model, args), (native, native_args)):
        losses.append(cross_entropy(its_args)(each(inputs), targets))
        losses[-1].backward()
    assert abs(losses[0].item() - losses[1].item()) < LOSS
    for key, parameter, theirs, translate in pairs:
        if theirs.grad is not None:
            assert_close(parameter.grad, translate(theirs.grad), GRADIENT, key)
    assert sum(p.numel() for _, p in named_parameters(model)) == costs.num_parameters(args)
    assert costs.num_parameters(args) == costs.num_parameters(native_args)


def test_weight_decay_leaves_norms_and_biases_out():
    args = tiny_args(**SHORT, **MODELS["parallel residual"], weight_decay=0.1)
    model = build_model(args)
    decayed = {id(p) for p in get_params_for_weight_decay_optimization(model, args)[0]["params"]}
    for name, parameter in named_parameters(model):
        assert (id(parameter) in decayed) == (parameter.dim() == 2), name


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_know_how_each_parameter_is_split(name):
    args = tiny_args(**{**SHORT, **MODELS[name]})
    for key, parameter in named_parameters(build_model(args)):
        index, _, rest = key.partition(".")
        split = Shards(args).split_of(int(index), rest)
        assert (split.dim, split.groups or None) == (
            getattr(parameter, "partition_dim", None),
            getattr(parameter, "partition_groups", None) or split.groups,
        ), key
        assert split.summed == (args.gpt_j_residual and rest.endswith(("dense.bias", "fc2_bias"))), key


def test_state_dicts_hold_tensors_and_load_with_or_without_extra_state():
    args = tiny_args(**SHORT, **MODELS["mlp"], te_columnparallel=True, te_rowparallel=True)
    model = build_model(args)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert build_model(args).load_state_dict(state).missing_keys == []
    bare = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
    assert len(bare) < len(state)
    build_model(args).load_state_dict(bare)
    as_gpt_neox = {**bare}  # TE 1.12's own entry: a BytesIO around a saved None
    for name in state.keys() - bare.keys():
        as_gpt_neox[name] = io.BytesIO()
        torch.save(None, as_gpt_neox[name])
    build_model(args).load_state_dict(as_gpt_neox)
    two = {name: torch.frombuffer(bytearray(pickle.dumps(None)), dtype=torch.uint8) for name in as_gpt_neox}
    build_model(args).load_state_dict({**two, **bare})  # TE 2's


# Refusals

REFUSED = {
    "activation=gelu": dict(te_layernorm_mlp=True),
    "activation=geglu:": dict(te_layernorm_mlp=True, activation="geglu"),
    "activation=mish": dict(te_layernorm_mlp=True, activation="mish"),
    "norm=scalenorm": dict(te_layernorm_mlp=True, activation="relu", norm="scalenorm"),
    "norm=non_parametric_layernorm": dict(te_layernorm_mlp=True, activation="relu", norm="non_parametric_layernorm"),
    "gpt_j_tied=True": dict(te_layernorm_mlp=True, activation="relu", gpt_j_residual=True, gpt_j_tied=True),
    "norm=te_rmsnorm": dict(norm="te_rmsnorm", use_qk_layernorm=True),
    "norm=te_layernorm": dict(norm="te_layernorm", qk_norm_type="joint"),
    "qk_norm_type=full_width": dict(norm="te_rmsnorm", qk_norm_type="full_width"),
    "use_bias_in_norms=False": dict(norm="te_layernorm", use_bias_in_norms=False),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_these_layers_cannot_do_is_refused_with_the_config(message):
    with pytest.raises(ConfigError) as caught:
        tiny_args(**REFUSED[message])
    assert [problem.startswith(message) for problem in caught.value.problems] == [True], caught.value.problems
