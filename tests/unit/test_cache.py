"""The KV cache: sizes from the geometry, and decoding in any chunks gives what one pass gives, windows included."""

import pytest
import torch

from megatron import costs
from megatron.model.attention import KVCache, LayerKVCache, ParallelSelfAttention, key_heads_per_partition
from megatron.model.attention.core import KERNELS
from megatron.model.gpt2_model import GPT2ModelSequential
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, GQA_TP4, MHA, MQA, NARROW, WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import FORWARD, assert_close

SEQ = 13
VARIANTS = {
    "rotary": dict(pos_emb="rotary", rotary_pct=0.5),
    "rotary_flash": dict(pos_emb="rotary", attention_config=["flash"] * 2),
    "mixed_kinds": dict(pos_emb="rotary", attention_config=["flash", "global"]),
    "alibi": dict(pos_emb="alibi"),
    "rpe": dict(pos_emb="rpe"),
    "learned": dict(pos_emb="learned"),
    "sinusoidal": dict(pos_emb="sinusoidal"),
    "none": dict(pos_emb="none"),
    "window": dict(pos_emb="rotary", sliding_window_width=4),
    "window_flash": dict(pos_emb="rotary", sliding_window_width=4, attention_config=["flash"] * 2),
    "qk_norm": dict(pos_emb="rotary", use_qk_layernorm=True, norm="rmsnorm"),
    "qk_norm_flash": dict(pos_emb="rotary", use_qk_layernorm=True, attention_config=["flash"] * 2),
    "gpt_j": dict(pos_emb="rotary", gpt_j_residual=True),
}


WINDOWS = (1, 4, SEQ - 2, SEQ + 7)
WINDOW_MODELS = {
    "rotary": dict(**WIDE_NON_DIVISIBLE, pos_emb="rotary", rotary_pct=0.5),
    "mqa_joint_norm": dict(**MQA, pos_emb="rotary", use_qk_layernorm=True, norm="rmsnorm"),
    "gqa_per_head_norm": dict(**GQA_TP4, pos_emb="rotary", qk_norm_type="per_head", norm="rmsnorm"),
    "mha_learned": dict(**MHA, pos_emb="learned"),
    "sliding_then_full": dict(**NARROW, pos_emb="rotary", layer_types=["sliding_attention", "full_attention"]),
}
BIAS_MODELS = {
    "alibi": dict(**WIDE_NON_DIVISIBLE, pos_emb="alibi"),
    "alibi_full_then_sliding": dict(**MQA, pos_emb="alibi", layer_types=["full_attention", "sliding_attention"]),
    "rpe": dict(**WIDE_NON_DIVISIBLE, pos_emb="rpe", rpe_num_buckets=8, rpe_max_distance=12),
}
"""Whose kernels must take a score bias, as only global does."""


def _model(**settings):
    args = tiny_args(**settings)
    model = GPT2ModelSequential(args).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return args, model


def _decode(args, model, tokens, chunks):
    """Logits of all positions, feeding the tokens in chunks."""
    layers = dict(model.local_layers())
    cache = KVCache(args, range(args.num_layers), tokens.shape[0], tokens.shape[1])
    logits, start = [], 0
    for size in chunks:
        positions = torch.arange(start, start + size).expand(tokens.shape[0], -1)
        hidden = layers[1](layers[0]((tokens[:, start : start + size], positions)))
        for number in range(args.num_layers):
            hidden = layers[2 + number](hidden, cache[number])
        for index in sorted(layers)[2 + args.num_layers :]:
            hidden = layers[index](hidden)
        logits.append(hidden)
        start += size
        assert cache.length == start
    return torch.cat(logits, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunks", [(SEQ,), (6, 1, 1, 1, 1, 1, 1, 1), (1,) * SEQ, (4, 5, 1, 3)])
def test_decoding_in_chunks_equals_one_pass(variant, chunks):
    args, model = _model(**WIDE_NON_DIVISIBLE, **VARIANTS[variant])
    tokens = torch.randint(0, 128, (2, SEQ), generator=torch.Generator().manual_seed(5))
    whole = model((tokens, torch.arange(SEQ).expand(2, -1)))
    assert_close(_decode(args, model, tokens, chunks), whole, FORWARD)


def _check_windows(settings):
    """Every window and every chunk size, with a rest that is decoded token by token."""
    tokens = torch.randint(0, 128, (2, SEQ), generator=torch.Generator().manual_seed(5))
    for window in WINDOWS:
        args, model = _model(**settings, sliding_window_width=window)
        whole = model((tokens, torch.arange(SEQ).expand(2, -1)))
        for size in range(1, SEQ + 1):
            pieces = [size] * ((SEQ - 2) // size)
            pieces += [1] * (SEQ - sum(pieces))
            assert_close(_decode(args, model, tokens, pieces), whole, FORWARD, f"window {window}, chunks {pieces}")


@torch.no_grad()
@pytest.mark.parametrize("name", WINDOW_MODELS)
@pytest.mark.parametrize("kind", KERNELS)
def test_every_window_and_chunk_size_on_every_kernel(name, kind):
    _check_windows(dict(**WINDOW_MODELS[name], attention_config=[kind] * 2))


@torch.no_grad()
@pytest.mark.parametrize("name", BIAS_MODELS)
def test_every_window_and_chunk_size_under_a_score_bias(name):
    _check_windows(dict(**BIAS_MODELS[name], attention_config=["global"] * 2))


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", KERNELS)
def test_decoding_over_all_geometries(name, kind):
    args, model = _model(**ALL[name], attention_config=[kind] * 2)
    tokens = torch.randint(0, 128, (2, SEQ), generator=torch.Generator().manual_seed(5))
    whole = model((tokens, torch.arange(SEQ).expand(2, -1)))
    assert_close(_decode(args, model, tokens, (7, 1, 2, 3)), whole, FORWARD)


@pytest.mark.parametrize("name", ALL)
def test_size_follows_from_the_geometry(name):
    args = tiny_args(**ALL[name])
    cache = KVCache(args, range(2), batch_size=3, max_tokens=10)
    numbers = ALL[name]
    m = numbers.get("num_kv_heads") or numbers["num_attention_heads"]
    d = numbers.get("head_dim") or numbers["hidden_size"] // numbers["num_attention_heads"]
    assert cache.nbytes == 2 * 10 * 3 * (m * d + m * d) * 4  # layers, tokens, batch, k and v, fp32
    assert cache[1].nbytes * 2 == cache.nbytes


def test_joint_qk_norm_caches_keys_of_all_query_heads():
    args = tiny_args(**GQA_TP4, use_qk_layernorm=True)
    assert key_heads_per_partition(args, 0) == 12
    assert key_heads_per_partition(tiny_args(**GQA_TP4), 1) == 4
    assert KVCache(args, [0], 1, 5).nbytes == 5 * (12 + 4) * 10 * 4


def _bytes_by_hand(settings, batch_size, tokens, number_bytes, scale_bytes):
    """Token by token and head by head, of a two-layer model."""
    n, total = settings["num_attention_heads"], 0
    m = settings.get("num_kv_heads") or n
    d = settings.get("head_dim") or settings["hidden_size"] // n
    window = settings.get("sliding_window_width")
    for kind in settings.get("layer_types") or ["sliding_attention"] * 2:
        kept = tokens if window is None or kind == "full_attention" else min(tokens, window + 1)
        heads = m + (n if settings.get("use_qk_layernorm") else m)
        total += kept * batch_size * heads * (d * number_bytes + scale_bytes)
    return total


@pytest.mark.parametrize("name", ALL)
def test_bytes_in_every_format_and_under_windows(name):
    """Allocated = costs.kv_cache_bytes = the formula, whether or not the text is longer than the window."""
    formats = [("fp32", None, 4, 0), ("bfloat16", None, 2, 0), ("bfloat16", "fp8_e4m3", 1, 0), ("fp16", "int8", 1, 4)]
    layers = dict(sliding_window_width=4, layer_types=["full_attention", "sliding_attention"])
    for options in ({}, dict(sliding_window_width=9), layers, dict(**layers, use_qk_layernorm=True)):
        for precision, kv_cache_dtype, number_bytes, scale_bytes in formats:
            settings = {**ALL[name], **options}
            args = tiny_args(**settings, precision=precision, kv_cache_dtype=kv_cache_dtype)
            for tokens in (3, 5, 12):
                expected = _bytes_by_hand(settings, 3, tokens, number_bytes, scale_bytes)
                assert KVCache(args, range(2), 3, tokens).nbytes == expected
                assert costs.kv_cache_bytes(args, 3, tokens) == expected
            assert costs.kv_cache_bytes_per_token(args) == _bytes_by_hand(settings, 1, 1, number_bytes, scale_bytes)


def _layer_cache(max_tokens=4, window=None, kv_cache_dtype=None):
    geometry = tiny_args(**MHA).head_geometry()
    return LayerKVCache(geometry, 2, max_tokens, torch.float32, torch.device("cpu"), 3, window, kv_cache_dtype)


def test_append_returns_everything_so_far_and_reset_forgets():
    cache = _layer_cache()
    first, second = torch.randn(3, 2, 3, 16), torch.randn(1, 2, 3, 16)
    cache.append(first, -first)
    k, v = cache.append(second, -second)
    assert torch.equal(k, torch.cat([first, second])) and torch.equal(v, -k) and cache.length == 4
    cache.reset()
    k, _ = cache.append(second, second)
    assert cache.length == 1 and torch.equal(k, second)


def _check_append(cache, history, size):
    """One append of `size` new tokens against the list of all tokens so far."""
    start = cache.length
    new = history[start : start + size]
    returned = cache.append(new, -new)
    end = start + size
    seen = history[:end] if cache.window is None else history[max(0, start - cache.window) : end]
    assert cache.length == end
    for got, expected in zip(returned, (seen, -seen), strict=True):
        assert torch.equal(got.roll(-cache.oldest, dims=0), expected), (start, size)
    assert cache.oldest == 0 or (size == 1 and len(seen) == cache.window + 1)


@pytest.mark.parametrize("kv_cache_dtype", [None, "fp8_e4m3", "int8"])
def test_a_window_returns_what_its_queries_see_whatever_came_before(kv_cache_dtype):
    """Random pieces, many times around the ring; the cache's own format has no effect on numbers it can hold."""
    generator = torch.Generator().manual_seed(7)
    history = torch.randint(-15, 16, (90, 2, 3, 16), generator=generator).float()
    history[..., 0] = 127.0 if kv_cache_dtype == "int8" else 448.0
    for window in (None, 1, 2, 5, 30, 200):
        cache = _layer_cache(90, window, kv_cache_dtype)
        room = cache.nbytes
        for _ in range(3):
            while cache.length < 90:
                longest = 3 if torch.rand(1, generator=generator) < 0.7 else 20
                size = int(torch.randint(1, longest, (1,), generator=generator))
                _check_append(cache, history, min(size, 90 - cache.length))
            cache.reset()
        assert cache.nbytes == room and cache.length == cache.oldest == 0


def test_a_step_in_a_full_window_copies_nothing():
    cache = _layer_cache(90, window=4)
    token = torch.zeros(1, 2, 3, 16)
    for _ in range(5):
        k, v = cache.append(token, token)
    for _ in range(12):
        key_view, value_view = cache.append(token, token)
        assert (key_view.data_ptr(), value_view.data_ptr()) == (k.data_ptr(), v.data_ptr())
        assert key_view.shape == k.shape == (5, 2, 3, 16)


@torch.no_grad()
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_rounded_numbers_do_not_depend_on_the_pieces(kv_cache_dtype):
    """In fp64, where no other rounding can tip a number over to the next step of the format."""
    args = tiny_args(**WIDE_NON_DIVISIBLE, sliding_window_width=4, attention_config=["global"] * 2)
    attention = ParallelSelfAttention(args).double()
    hidden = torch.randn(SEQ, 2, 80, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact, _ = attention(hidden)
    outputs = []
    for sizes in ((SEQ,), (4, 5, 1, 3), (1,) * SEQ):
        cache = LayerKVCache(
            args.head_geometry(), 2, SEQ, torch.float64, torch.device("cpu"), 2, 4, kv_cache_dtype=kv_cache_dtype
        )
        outputs.append(torch.cat([attention(piece, cache)[0] for piece in hidden.split(sizes)]))
    assert_close(outputs[1], outputs[0], FORWARD)
    assert_close(outputs[2], outputs[0], FORWARD)
    assert not torch.allclose(outputs[0], exact, rtol=0, atol=1e-6), "nothing was rounded"


def test_overflow_and_wrong_shapes_are_errors_and_store_nothing():
    cache = _layer_cache()
    cache.append(*torch.zeros(2, 3, 2, 3, 16))
    with pytest.raises(ValueError, match="max_tokens=4 tokens and was given 5"):
        cache.append(*torch.zeros(2, 2, 2, 3, 16))
    with pytest.raises(ValueError, match=r"\(2, 3, 16\).*\(1, 3, 16\)"):
        cache.append(*torch.zeros(2, 1, 1, 3, 16))
    with pytest.raises(ValueError, match="1 tokens of keys and 2 of values"):
        cache.append(torch.zeros(1, 2, 3, 16), torch.zeros(2, 2, 3, 16))
    assert cache.length == 3


def test_a_window_makes_no_room_for_a_longer_text():
    cache = _layer_cache(max_tokens=6, window=2)
    cache.append(*torch.zeros(2, 5, 2, 3, 16))
    with pytest.raises(ValueError, match="max_tokens=6 tokens and was given 7"):
        cache.append(*torch.zeros(2, 2, 2, 3, 16))
    with pytest.raises(ValueError, match=r"\(2, 3, 16\).*\(2, 6, 16\)"):
        cache.append(torch.zeros(1, 2, 6, 16), torch.zeros(1, 2, 3, 16))
    cache.append(*torch.zeros(2, 1, 2, 3, 16))
    with pytest.raises(ValueError, match="max_tokens=6 tokens and was given 7"):
        cache.append(*torch.zeros(2, 1, 2, 3, 16))
    assert cache.length == 6


def test_an_empty_cache_has_no_length():
    assert KVCache(tiny_args(**MHA), [], 1, 4).length == 0
