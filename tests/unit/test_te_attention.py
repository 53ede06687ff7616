"""Transformer Engine's attention (its real Python, 1.12) is the function of our own, in value and gradient.

Truths: the fp64 einsum of tests.helpers.attention_reference, ParallelSelfAttention (itself under test against it),
and rows counted one head at a time.
"""

import pytest
import torch

from megatron import mpu
from megatron.errors import ConfigError
from megatron.model.attention import KVCache, ParallelSelfAttention
from megatron.model.attention.cache import layer_cache_bytes
from tests.helpers.attention_reference import layer_reference
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, MHA, MQA, NARROW, WIDE_NON_DIVISIBLE
from tests.helpers.te import install_te, requires_te
from tests.helpers.te_attention import NAMES, as_te
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

pytestmark = requires_te

QWEN3 = dict(hidden_size=1024, num_attention_heads=16, num_kv_heads=8, head_dim=128)
"""The widths of Qwen3-0.6B."""

SPREAD = dict(init_method="normal", output_layer_init_method="normal", init_method_std=0.1)
"""Outputs of order one, scores that differ."""

CASES = {
    **{name: numbers for name, numbers in ALL.items()},
    "qwen3": dict(QWEN3, init_method_std=0.03),
    "half rotated": dict(WIDE_NON_DIVISIBLE, rotary_pct=0.5),
    "quarter rotated": dict(NARROW, rotary_pct=0.25),
    "half rotated mha": dict(MHA, rotary_pct=0.5, rotary_emb_base=100),
    "not rotated": dict(MQA, pos_emb="none"),
    "window": dict(WIDE_NON_DIVISIBLE, sliding_window_width=4),
    "window of one": dict(MHA, sliding_window_width=1),
    "window beyond the text": dict(MQA, sliding_window_width=20),
    "scale": dict(NARROW, softmax_scale=0.7),
    "no bias": dict(WIDE_NON_DIVISIBLE, use_bias_in_attn_linear=False),
    "qkv bias only": dict(WIDE_NON_DIVISIBLE, use_bias_in_attn_linear=False, add_qkv_bias=True),
    "yarn": dict(
        NARROW,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    ),
    "width and kv heads by layer": dict(NARROW, head_dim=[24, 40], num_kv_heads=[2, 1], rotary_pct=0.5),
    "slower positions": dict(NARROW, rope_scaling={"rope_type": "linear", "factor": 3.0}),
}


@pytest.fixture(scope="module", autouse=True)
def transformer_engine():
    install_te()


def _pair(seed=5, layer_number=0, **settings):
    """(args, native attention, TE attention), both drawn from the same scope; biases are not zero."""
    from megatron.model.transformer_engine.attention import TEMultiheadAttention

    args = tiny_args(**{**SPREAD, **settings}, te_mha=True)
    with mpu.parameter_scope(seed, 2):
        native = ParallelSelfAttention(args, layer_number)
    with mpu.parameter_scope(seed, 2):
        engine = TEMultiheadAttention(args, layer_number)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in native.named_parameters():
            if name.endswith("bias"):
                assert not parameter.any() and not engine.get_parameter(NAMES[name]).any()
                parameter.normal_(std=0.5, generator=generator)
        for name, values in as_te(dict(native.named_parameters()), native.geometry).items():
            if name.endswith("bias"):
                engine.get_parameter(name).copy_(values)
    return args, native, engine


def _input(args, tokens=12, seed=1):
    return torch.randn(tokens, 2, args.hidden_size, generator=torch.Generator().manual_seed(seed))


def _run(attention, hidden, upstream):
    """(output with bias, gradient of the input, {name: gradient})"""
    hidden = hidden.clone().requires_grad_()
    output, bias = attention(hidden)
    output = output if bias is None else output + bias
    output.backward(upstream)
    return output.detach(), hidden.grad, {name: parameter.grad for name, parameter in attention.named_parameters()}


def _reference(args, native, hidden, upstream):
    """The same in fp64, from the definition."""
    parameters = {name: p.detach().double().requires_grad_() for name, p in native.named_parameters()}
    geometry, function = native.geometry, native.function
    zeros = {"query_key_value.bias": geometry.qkv_hidden_size, "dense.bias": geometry.hidden_size}
    complete = {**{name: torch.zeros(size).double() for name, size in zeros.items()}, **parameters}
    hidden = hidden.double().requires_grad_()
    base = 10000 if function.rotary is None else function.rotary.base
    output = layer_reference(complete, hidden, geometry, function.softmax_scale, base, function.window)
    output.backward(upstream.double())
    return output.detach(), hidden.grad, {name: parameter.grad for name, parameter in parameters.items()}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_native_and_fp64(name):
    args, native, engine = _pair(layer_number=1, **CASES[name])
    hidden = _input(args, tokens=4 if name == "qwen3" else 12)
    upstream = 0.3 * _input(args, hidden.shape[0], seed=2)
    output, input_grad, grads = _run(engine, hidden, upstream)
    truths = [_run(native, hidden, upstream)]
    if args.rope_scaling is None:  # the einsum knows none
        truths.append(_reference(args, native, hidden, upstream))
    for expected, expected_input_grad, expected_grads in truths:
        assert expected.abs().max() > 0.3
        assert_close(output, expected, FORWARD, "output")
        assert_close(input_grad, expected_input_grad, GRADIENT, "input gradient")
        expected_grads = as_te(expected_grads, native.geometry)
        assert list(grads) == list(expected_grads)
        for key, values in expected_grads.items():
            assert_close(grads[key], values, GRADIENT, key)


def test_shapes_of_qwen3():
    _, native, engine = _pair(**QWEN3, use_bias_in_attn_linear=False)
    shapes = {name: list(parameter.shape) for name, parameter in engine.named_parameters()}
    assert shapes == {"qkv.weight": [4096, 1024], "proj.weight": [1024, 2048]}


@pytest.mark.parametrize("name", ("wide_non_divisible", "mha", "qkv bias only"))
def test_initial_weights_are_the_native_ones(name):
    _, native, engine = _pair(**CASES[name])
    for key, values in as_te(dict(native.named_parameters()), native.geometry).items():
        parameter = engine.get_parameter(key)
        assert torch.equal(parameter, values), key
        dim = {"qkv.weight": 0, "qkv.bias": 0, "proj.weight": 1}.get(key)
        assert getattr(parameter, "model_parallel", False) == (dim is not None)
        assert dim is None or (parameter.partition_dim, parameter.partition_groups) == (dim, None)


def test_layers_have_windows_scales_and_bases_of_their_own():
    """layer_types and by-type rotary_emb_base reach Transformer Engine layer by layer."""
    settings = dict(
        WIDE_NON_DIVISIBLE,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window_width=3,
        rotary_emb_base={"full_attention": 1000, "sliding_attention": 10},
    )
    outputs = []
    for layer_number in (0, 1):
        args, native, engine = _pair(**settings, layer_number=layer_number)
        hidden = _input(args)
        outputs.append(engine(hidden)[0])
        assert_close(outputs[-1], native(hidden)[0], FORWARD)
    assert (outputs[0] - outputs[1]).abs().max() > 0.1


CACHES = {
    "wide": dict(WIDE_NON_DIVISIBLE, rotary_pct=0.5),
    "mqa": MQA,
    "mha": dict(MHA, pos_emb="none"),
    "window": dict(WIDE_NON_DIVISIBLE, sliding_window_width=4),
    "window mha": dict(MHA, sliding_window_width=1),
}


@pytest.mark.parametrize("name", CACHES)
def test_pieces_through_the_cache_equal_the_whole_text(name):
    args, native, engine = _pair(**CACHES[name])
    hidden = _input(args, tokens=17)
    with torch.no_grad():
        expected = native(hidden)[0]
    caches = KVCache(args, [0], batch_size=2, max_tokens=20)
    bytes_of_all = 20 * 2 * 2 * native.geometry.num_kv_heads * native.geometry.head_dim * 4
    assert caches.nbytes == bytes_of_all == layer_cache_bytes(args, 0, 1, 2, 20)
    for sizes in ((9, 1, 1, 1, 5), (1,) * 17, (17,)):  # the second and third use the memory again
        with torch.no_grad():
            pieces = [engine(piece, caches[0])[0] for piece in hidden.split(sizes)]
        assert_close(torch.cat(pieces), expected, FORWARD, f"pieces of {sizes}")
        assert caches.length == 17
        caches.reset()
        assert caches.length == 0
    assert caches.nbytes == bytes_of_all


def test_what_does_not_fit_the_cache_is_named():
    args, _, engine = _pair(**MQA)
    cache = KVCache(args, [0], batch_size=2, max_tokens=8)[0]
    with torch.no_grad():
        engine(_input(args, tokens=6), cache)
        with pytest.raises(ValueError, match="max_tokens=8 tokens and was given 9"):
            engine(_input(args, tokens=3), cache)
        with pytest.raises(ValueError, match="batch of 2 and was given 1"):
            engine(_input(args, tokens=1)[:, :1], cache)
    assert cache.length == 6


def test_positions_beyond_seq_length_are_refused():
    args, _, engine = _pair(**MQA)
    with pytest.raises(ConfigError, match="seq_length=32: rotary positions reach 33"):
        engine(_input(args, tokens=33))


def test_half_precision():
    args, native, engine = _pair(**WIDE_NON_DIVISIBLE, precision="bfloat16")
    hidden = _input(args).bfloat16()
    output, bias = engine(hidden)
    assert output.dtype == bias.dtype == torch.bfloat16
    truth = native.double()
    expected = layer_reference(
        {name: p.detach() for name, p in truth.named_parameters()},
        hidden.double(),
        native.geometry,
        native.function.softmax_scale,
    )
    assert_close(output + bias, expected.float(), FORWARD)


def test_dropout_acts_in_training_only():
    args, native, engine = _pair(**WIDE_NON_DIVISIBLE, attention_dropout=0.4)
    hidden = _input(args)
    engine.eval()
    assert_close(engine(hidden)[0], native.eval()(hidden)[0], FORWARD)
    engine.train()
    assert (engine(hidden)[0] - engine(hidden)[0]).abs().max() > 0.05


def test_generation_runs_through_the_cache():
    """From one seed both models are the same function, so their logits step by step are too."""
    from megatron.costs import num_parameters
    from megatron.model.gpt2_model import build_model
    from megatron.text_generation.runner import InferenceRunner

    tokens = torch.randint(128, (2, 11), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(11).expand(2, -1)
    settings = dict(**WIDE_NON_DIVISIBLE, **SPREAD, layer_types=["sliding_attention", "full_attention"])
    steps = []
    for te_mha in (False, True):
        args = tiny_args(**settings, sliding_window_width=3, prefill_chunk_size=4, te_mha=te_mha)
        model = build_model(args)
        assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(args)
        runner = InferenceRunner(args, model)
        runner.start(batch_size=2, max_tokens=11)
        pieces = zip(tokens.split((9, 1, 1), dim=1), positions.split((9, 1, 1), dim=1), strict=True)
        steps.append([runner.next_token_logits(*piece) for piece in pieces])
    for engine, native in zip(*steps, strict=True):
        assert_close(engine, native, FORWARD)


def test_the_table_of_angles_is_exact_at_long_positions():
    from megatron.model.transformer_engine.attention import rotary_angles
    from megatron.neox_arguments.layer_attention import RotarySettings

    table = rotary_angles(RotarySettings(ndims=6, base=50.0, positions=3000))
    frequencies = torch.tensor([50.0 ** (-2 * i / 6) for i in range(3)], dtype=torch.float64)
    expected = 2999 * torch.cat([frequencies, frequencies])
    assert table.dtype == torch.float32 and table.shape == (3000, 1, 1, 6)
    assert (table[-1, 0, 0].double() - expected).abs().max() < 1e-3  # half a unit in the last place is 1e-4
