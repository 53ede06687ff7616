"""The transformer layer around attention: residual forms, optional biases, dropout; and the model's layer list."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from megatron.model.gpt2_model import GPT2ModelSequential, cross_entropy, masked_cross_entropy
from megatron.model.transformer import ParallelTransformerLayerPipe
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, NARROW, QUOTIENT, WIDE_NON_DIVISIBLE
from tests.helpers.model_runs import SEQ, batch
from tests.helpers.tolerances import FORWARD, LOSS, assert_close

RESIDUALS = {
    "normal": {},
    "gpt_j": dict(gpt_j_residual=True),
    "gpt_j_tied": dict(gpt_j_residual=True, gpt_j_tied=True),
}
ACTIVATIONS = ("gelu", "swiglu")


def _layer(**settings):
    args = tiny_args(**settings)
    layer = ParallelTransformerLayerPipe(args, 0)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return layer


def _hidden(width):
    return torch.randn(SEQ, 2, width, generator=torch.Generator().manual_seed(1))


def _with_bias(output, bias):
    return output if bias is None else output + bias


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize(
    "attention_bias, mlp_bias, activation", list(itertools.product((True, False), (True, False), ACTIVATIONS))
)
def test_residual_forms_with_every_bias_switch(residual, attention_bias, mlp_bias, activation):
    layer = _layer(
        **NARROW,
        **RESIDUALS[residual],
        use_bias_in_attn_linear=attention_bias,
        use_bias_in_mlp=mlp_bias,
        activation=activation,
    )
    x = _hidden(160)
    attention = _with_bias(*layer.attention(layer.input_layernorm(x)))
    if residual == "normal":
        wanted = x + attention
        wanted = wanted + _with_bias(*layer.mlp(layer.post_attention_layernorm(wanted)))
    else:
        norm = layer.input_layernorm if residual == "gpt_j_tied" else layer.post_attention_layernorm
        wanted = x + attention + _with_bias(*layer.mlp(norm(x)))
    assert attention.abs().max() > 0.1  # GPT-NeoX drops it under gpt_j_residual without MLP bias
    assert_close(layer(x), wanted, FORWARD)
    names = {name for name, _ in layer.named_parameters() if name.endswith("bias") and "norm" not in name}
    assert names == {
        *(("attention.query_key_value.bias", "attention.dense.bias") if attention_bias else ()),
        *(("mlp.linear1.bias", "mlp.linear2.bias") if mlp_bias else ()),
    }


def test_gpt_j_tied_keeps_the_unused_norm_of_checkpoints():
    layer = _layer(**NARROW, gpt_j_residual=True, gpt_j_tied=True)
    layer(_hidden(160)).sum().backward()
    assert layer.post_attention_layernorm.weight.grad is None and layer.input_layernorm.weight.grad is not None


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("bias", (True, False))
def test_hidden_dropout_acts_on_both_branches_with_and_without_bias(residual, bias):
    """With nearly everything dropped only the residual is left; in evaluation nothing is dropped."""
    settings = dict(NARROW, **RESIDUALS[residual], use_bias_in_attn_linear=bias, use_bias_in_mlp=bias)
    layer, plain = _layer(**settings, hidden_dropout=0.9999999), _layer(**settings)
    plain.load_state_dict(layer.state_dict())
    x = _hidden(160)
    assert torch.equal(layer(x), x)
    assert torch.equal(layer.eval()(x), plain.eval()(x)) and not torch.equal(plain(x), x)


@pytest.mark.parametrize("name", ALL)
def test_parameter_count_follows_from_the_numbers(name):
    args = tiny_args(**ALL[name])
    model = GPT2ModelSequential(args)
    numbers, h = ALL[name], ALL[name]["hidden_size"]
    n = numbers["num_attention_heads"]
    m, d = numbers.get("num_kv_heads") or n, numbers.get("head_dim") or h // n
    layer = h * (n + 2 * m) * d + (n + 2 * m) * d + n * d * h + h + 4 * h + (4 * h * h + 4 * h) + (4 * h * h + h)
    assert sum(p.numel() for p in model.parameters()) == 2 * layer + 2 * h + 2 * 128 * h


def test_state_dict_names_of_a_layer():
    model = GPT2ModelSequential(tiny_args(**WIDE_NON_DIVISIBLE, use_qk_layernorm=True))
    prefix = "sequential.3."
    names = {name[len(prefix) :] for name in model.state_dict() if name.startswith(prefix)}
    modules = ("input_layernorm", "post_attention_layernorm", "attention.query_key_value", "attention.dense")
    modules += ("attention.qk_layernorm", "mlp.linear1", "mlp.linear2")
    assert names == {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    others = {name for name in model.state_dict() if not name.startswith(("sequential.2.", prefix))}
    assert others == {
        "sequential.0.word_embeddings.weight",
        "sequential.5.norm.weight",
        "sequential.5.norm.bias",
        "sequential.6.final_linear.weight",
    }


def test_tied_head_has_no_weight_of_its_own_and_trains_the_embedding():
    args = tiny_args(**WIDE_NON_DIVISIBLE, no_weight_tying=False)
    model = GPT2ModelSequential(args)
    assert not [name for name in model.state_dict() if name.startswith("sequential.6")]
    logits = model(batch()[0])
    weight = model.sequential[0].word_embeddings_weight
    hidden = torch.randn(2, 3, 80)
    torch.testing.assert_close(model.local_layers()[-1][1](hidden), hidden @ weight.T)
    logits.sum().backward()
    assert (weight.grad.abs().sum(-1) > 0).all()  # rows that no token reads, too


def test_head_dim_equal_to_the_quotient_gives_the_same_model_bit_for_bit():
    outputs, states = [], []
    for settings in (QUOTIENT, dict(QUOTIENT, head_dim=None), dict(QUOTIENT, head_dim=16)):
        model = GPT2ModelSequential(tiny_args(**settings, rotary_pct=0.25))
        outputs.append(model(batch()[0]))
        states.append(model.state_dict())
    for output, state in zip(outputs[1:], states[1:], strict=True):
        assert torch.equal(output, outputs[0]) and state.keys() == states[0].keys()
        assert all(torch.equal(state[key], states[0][key]) for key in state)


def test_initial_weights_follow_the_seed_and_the_layer():
    one, same, other = (GPT2ModelSequential(tiny_args(**NARROW, seed=seed)).state_dict() for seed in (1, 1, 2))
    key = "sequential.{}.attention.query_key_value.weight"
    assert torch.equal(one[key.format(2)], same[key.format(2)])
    assert not torch.equal(one[key.format(2)], other[key.format(2)])
    assert not torch.equal(one[key.format(2)], one[key.format(3)])


@pytest.mark.parametrize("precision, dtype", [("bfloat16", torch.bfloat16), ("fp16", torch.float16)])
def test_all_parameters_have_the_configured_precision(precision, dtype):
    model = GPT2ModelSequential(tiny_args(**NARROW, precision=precision))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(batch()[0]).dtype == dtype


def test_causality_and_window_of_the_whole_model():
    """Changing a token changes nothing before it, and with a window of w over L layers nothing L·w after it."""
    args = tiny_args(**WIDE_NON_DIVISIBLE, sliding_window_width=3)
    model = GPT2ModelSequential(args).eval()
    (tokens, positions), _ = batch()
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 128
    difference = (model((tokens, positions)) - model((changed, positions))).abs().amax((0, 2))
    assert (difference[:5] == 0).all() and (difference[5:12] > 0).all() and (difference[12:] == 0).all()


def test_loss_is_the_masked_mean():
    logits = torch.randn(2, 7, 128)
    labels, mask = torch.randint(0, 128, (2, 7)), torch.tensor([[1.0] * 7, [0.0, 1.0] * 3 + [0.0]])
    wanted = F.cross_entropy(logits[mask.bool()].double(), labels[mask.bool()])
    loss = cross_entropy(tiny_args(**NARROW))(logits, (labels, mask))
    assert loss.dtype == torch.float32 and abs(loss.item() - wanted.item()) <= LOSS


def test_loss_of_nothing_is_zero_not_nan():
    assert masked_cross_entropy(torch.randn(1, 3, 128), (torch.zeros(1, 3).long(), torch.zeros(1, 3))).item() == 0.0
