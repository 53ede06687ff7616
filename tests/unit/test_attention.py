"""ParallelSelfAttention against an fp64 einsum, over all geometries, kernels and both row layouts."""

import pytest
import torch

from megatron.model.attention import ParallelSelfAttention
from megatron.model.attention.core import chunked, eager, flash
from megatron.model.attention.core.masks import first_visible_key, hidden_keys
from tests.helpers.attention_reference import core_reference, layer_reference
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, GQA_TP4, MHA, MQA, QUOTIENT, WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

KINDS = ("global", "flash", "chunked")
SEQ, BATCH = 11, 2


def _attention(kind="global", dtype=torch.float32, seed=0, **settings):
    args = tiny_args(attention_config=[kind] * 2, **settings)
    attention = ParallelSelfAttention(args, layer_number=1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in attention.parameters():  # far from the small initial weights, biases not zero
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return args, attention.to(dtype)


def _hidden(width, seq=SEQ, seed=1):
    return torch.randn(seq, BATCH, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALL)
def test_output_and_gradients_equal_the_fp64_einsum(name, kind):
    args, attention = _attention(kind, **ALL[name], rotary_pct=0.5 if name != "gqa_tp4" else 0.4)
    parameters = {key: p.detach().double().requires_grad_() for key, p in attention.named_parameters()}
    hidden = _hidden(args.hidden_size)
    wanted_input = hidden.clone().requires_grad_()
    d = args.head_geometry(1).head_dim
    wanted = layer_reference(parameters, wanted_input, args.head_geometry(1), scale=d**-0.5)
    pull = _hidden(args.hidden_size, seed=2)
    wanted.backward(pull)

    given = hidden.float().requires_grad_()
    output, bias = attention(given)
    (output + bias).backward(pull.float())
    assert_close(output + bias, wanted, FORWARD, "output")
    assert_close(given.grad, wanted_input.grad, GRADIENT, "input gradient")
    for key, parameter in attention.named_parameters():
        assert_close(parameter.grad, parameters[key].grad, GRADIENT, key)


@pytest.mark.parametrize("name", ALL)
def test_widths_follow_from_the_configured_numbers(name):
    args, attention = _attention(**ALL[name])
    numbers = ALL[name]
    heads = numbers["num_attention_heads"]
    kv_heads = numbers.get("num_kv_heads", heads)
    d = numbers.get("head_dim", numbers["hidden_size"] // heads)
    assert attention.hidden_size_per_attention_head == d
    assert attention.query_hidden_size == attention.query_hidden_size_per_partition == heads * d
    assert attention.kv_hidden_size == attention.kv_hidden_size_per_partition == kv_heads * d
    assert (attention.num_attention_heads_per_partition, attention.num_kv_heads_per_partition) == (heads, kv_heads)
    assert attention.gqa == (kv_heads < heads)
    shapes = {key: tuple(p.shape) for key, p in attention.named_parameters()}
    assert shapes == {
        "query_key_value.weight": ((heads + 2 * kv_heads) * d, numbers["hidden_size"]),
        "query_key_value.bias": ((heads + 2 * kv_heads) * d,),
        "dense.weight": (numbers["hidden_size"], heads * d),
        "dense.bias": (numbers["hidden_size"],),
    }


def test_projections_of_qwen3_0_6b():
    args = tiny_args(hidden_size=1024, num_attention_heads=16, num_kv_heads=8, head_dim=128)
    attention = ParallelSelfAttention(args)
    assert tuple(attention.query_key_value.weight.shape) == (4096, 1024)
    assert tuple(attention.dense.weight.shape) == (1024, 2048)


@pytest.mark.parametrize("kind", KINDS)
def test_head_dim_equal_to_the_quotient_changes_no_bit(kind):
    outputs = []
    for settings in (QUOTIENT, dict(QUOTIENT, head_dim=16), dict(QUOTIENT, head_dim=16, num_kv_heads=4)):
        _, attention = _attention(kind, **settings)
        output, _ = attention(_hidden(64).float())
        outputs.append(output)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_stays_near_fp64(kind, dtype):
    precision = {torch.bfloat16: "bfloat16", torch.float16: "fp16"}[dtype]
    args, attention = _attention(kind, dtype, **WIDE_NON_DIVISIBLE, precision=precision, attention_softmax_in_fp32=True)
    parameters = {key: p.detach().double() for key, p in attention.named_parameters()}
    hidden = _hidden(args.hidden_size).to(dtype)
    wanted = layer_reference(parameters, hidden.double(), args.head_geometry(1), scale=24**-0.5)
    output, bias = attention(hidden)
    assert output.dtype == dtype
    assert_close(output + bias, wanted, FORWARD, precision)


@pytest.mark.parametrize("kind", KINDS)
def test_softmax_scale_reaches_the_kernel(kind):
    args, attention = _attention(kind, **WIDE_NON_DIVISIBLE, softmax_scale=0.07)
    parameters = {key: p.detach().double() for key, p in attention.named_parameters()}
    hidden = _hidden(80)
    output, bias = attention(hidden.float())
    wanted = layer_reference(parameters, hidden, args.head_geometry(), scale=0.07)
    assert_close(output + bias, wanted, FORWARD)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", (1, 3, SEQ - 1, 31))
def test_sliding_window(kind, window):
    args, attention = _attention(kind, **GQA_TP4, sliding_window_width=window)
    parameters = {key: p.detach().double() for key, p in attention.named_parameters()}
    hidden = _hidden(args.hidden_size)
    output, bias = attention(hidden.float())
    wanted = layer_reference(parameters, hidden, args.head_geometry(), scale=10**-0.5, window=window)
    assert_close(output + bias, wanted, FORWARD)


def test_query_key_layer_scaling_changes_no_value():
    plain = _attention(**MHA)[1](_hidden(56).float())[0]
    args = tiny_args(**MHA, num_layers=8, apply_query_key_layer_scaling=True)
    scaled = ParallelSelfAttention(args, layer_number=7)
    scaled.load_state_dict(_attention(**MHA)[1].state_dict())
    assert scaled.score_divisor == 7 and scaled.attention_softmax_in_fp32
    assert_close(scaled(_hidden(56).float())[0], plain, FORWARD)


def test_query_key_layer_scaling_keeps_fp16_scores_finite():
    q = torch.full((2, 1, 1, 64), 60.0, dtype=torch.float16)
    k, v = torch.stack([q[0] * 0.98, q[0]]), torch.stack([-q[0], q[0]])
    common = dict(scale=1.0, causal_offset=0, softmax_in_fp32=True)
    assert not eager.attend(q, k, v, **common).isfinite().all()
    assert eager.attend(q, k, v, **common, score_divisor=8.0).isfinite().all()


@pytest.mark.parametrize("norm", ("layernorm", "rmsnorm", "scalenorm", "non_parametric_layernorm"))
@pytest.mark.parametrize("kind", KINDS)
def test_qk_layernorm_acts_before_rotation_with_a_scale_per_query_head(kind, norm):
    settings = dict(WIDE_NON_DIVISIBLE, use_qk_layernorm=True, norm=norm, pos_emb="none")
    args, attention = _attention(kind, **settings)
    q, k, v = (
        torch.randn(SEQ, BATCH, heads, 24, generator=torch.Generator().manual_seed(heads), dtype=torch.float64)
        for heads in (6, 2, 2)
    )
    parameters = {key: p.detach().double() for key, p in attention.qk_layernorm.named_parameters()}
    repeated = torch.stack([k[:, :, i // 3] for i in range(6)], dim=2)
    wanted = [_norm_reference(x, norm, parameters, args) for x in (q, repeated)]
    got = attention._normalise(q.float(), k.float())
    for actual, expected in zip(got, wanted, strict=True):
        assert_close(actual, expected, FORWARD, norm)
    # The kernels take keys of all query heads beside values of the kv heads.
    context = attention._attend(*(x.float() for x in (*wanted, v)), oldest_key=0)
    assert_close(context, core_reference(*wanted, v, scale=24**-0.5), FORWARD)


def _norm_reference(x, norm, parameters, args):
    if norm in ("layernorm", "non_parametric_layernorm"):  # over heads and width together
        mean = x.mean((-2, -1), keepdim=True)
        normed = (x - mean) / ((x - mean).square().mean((-2, -1), keepdim=True) + args.layernorm_epsilon).sqrt()
        return normed * parameters.get("weight", 1.0) + parameters.get("bias", 0.0)
    if norm == "rmsnorm":  # over the width of each head
        return x / (x.square().mean(-1, keepdim=True) + args.rms_norm_epsilon).sqrt() * parameters["scale"]
    return x / x.square().sum(-1, keepdim=True).sqrt() * parameters["g"]


def test_biases_are_optional():
    _, attention = _attention(**MQA, use_bias_in_attn_linear=False)
    output, bias = attention(_hidden(40).float())
    assert bias is None and output.shape == (SEQ, BATCH, 40)
    assert [name for name, _ in attention.named_parameters()] == ["query_key_value.weight", "dense.weight"]


def test_attention_dropout_only_in_training():
    _, attention = _attention(**MHA, attention_dropout=0.5)
    hidden = _hidden(56).float()
    train = [attention(hidden)[0] for _ in range(2)]
    attention.eval()
    evaluated = [attention(hidden)[0] for _ in range(2)]
    assert not torch.equal(*train) and torch.equal(*evaluated)


# The kernels by themselves: chunks behind a cache, windows, odd widths.


@pytest.mark.parametrize("kernel", (eager, flash, chunked))
@pytest.mark.parametrize("width", (5, 12, 24))
@pytest.mark.parametrize(
    "queries, keys, window", [(9, 9, None), (1, 9, None), (4, 9, None), (4, 9, 2), (1, 9, 3), (9, 9, 4)]
)
def test_kernels_equal_the_reference_behind_a_cache(kernel, width, queries, keys, window):
    generator = torch.Generator().manual_seed(keys)
    shapes = ((queries, BATCH, 6, width), (keys, BATCH, 2, width), (keys, BATCH, 2, width))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    offset = keys - queries
    got = kernel.attend(q.float(), k.float(), v.float(), scale=0.3, causal_offset=offset, window=window)
    assert_close(got, core_reference(q, k, v, 0.3, offset, window), FORWARD)


@pytest.mark.parametrize("queries, keys", [(4, 9), (1, 9), (9, 9)])
def test_flash_without_masks_as_on_cuda(monkeypatch, queries, keys):
    monkeypatch.setattr(flash, "_takes_masks", lambda device: False)
    monkeypatch.setattr(flash, "hidden_keys", lambda *a: None if queries == 1 else pytest.fail("a mask was built"))
    q, k, v = (
        torch.randn(t, BATCH, heads, 12, dtype=torch.float64) for t, heads in ((queries, 6), (keys, 2), (keys, 2))
    )
    got = flash.attend(q.float(), k.float(), v.float(), scale=0.3, causal_offset=keys - queries)
    assert_close(got, core_reference(q, k, v, 0.3, keys - queries), FORWARD)


def test_flash_runs_the_flash_kernel_and_nothing_else():
    q = torch.randn(9, BATCH, 2, 16, requires_grad=True)
    output = flash.attend(q, q, q, scale=0.25, causal_offset=0)
    names, nodes = set(), [output.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(type(node).__name__)
        nodes += [following for following, _ in node.next_functions if following is not None]
    assert "ScaledDotProductFlashAttentionForCpuBackward0" in names


def test_eager_adds_the_bias_to_the_scaled_scores():
    q, k, v = (torch.randn(7, BATCH, 3, 8, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(3, 7, 7, dtype=torch.float64)
    got = eager.attend(q, k, v, scale=0.2, causal_offset=0, bias=bias)
    assert_close(got, core_reference(q, k, v, 0.2, bias=bias), FORWARD)


EDGES = ((0, None), (1, None), (1, 3), (1, 2), (4, 6), (4, 5))
"""Offset and window of 3 queries over 2 keys: the first sees both from offset 1 on, the last with window offset + 2."""
NONE_HIDDEN = [False, True, True, False, True, False]


def test_hidden_keys_by_hand():
    rows = ["".join(".x"[int(h)] for h in row) for row in hidden_keys(3, 5, 2, 1, torch.device("cpu"))]
    assert rows == ["x..xx", "xx..x", "xxx.."]
    assert [hidden_keys(3, 2, offset, window, torch.device("cpu")) is None for offset, window in EDGES] == NONE_HIDDEN
    assert hidden_keys(1, 5, 4, None, torch.device("cpu")) is None
    assert hidden_keys(1, 5, 4, 4, torch.device("cpu")) is None
    assert hidden_keys(1, 5, 4, 3, torch.device("cpu")).tolist() == [[True, False, False, False, False]]
    assert [first_visible_key(offset, 3) for offset in (0, 3, 4, 9)] == [0, 0, 1, 6]
