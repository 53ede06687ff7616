"""The KV cache: sizes from the geometry, and decoding in any chunks gives what one pass gives."""

import pytest
import torch

from megatron.model.attention import KVCache, LayerKVCache, key_heads_per_partition
from megatron.model.gpt2_model import GPT2ModelSequential
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, GQA_TP4, MHA, MQA, WIDE_NON_DIVISIBLE
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


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ("global", "flash"))
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


def test_cache_follows_params_dtype():
    assert KVCache(tiny_args(**MQA, precision="bfloat16"), [0], 1, 5).nbytes == 5 * 2 * 12 * 2


def _layer_cache(max_tokens=4):
    geometry = tiny_args(**MHA).head_geometry()
    return LayerKVCache(geometry, 2, max_tokens, torch.float32, torch.device("cpu"), 3)


def test_append_returns_everything_so_far_and_reset_forgets():
    cache = _layer_cache()
    first, second = torch.randn(3, 2, 3, 16), torch.randn(1, 2, 3, 16)
    cache.append(first, -first)
    k, v = cache.append(second, -second)
    assert torch.equal(k, torch.cat([first, second])) and torch.equal(v, -k) and cache.length == 4
    cache.reset()
    k, _ = cache.append(second, second)
    assert cache.length == 1 and torch.equal(k, second)


def test_overflow_and_wrong_shapes_are_errors_and_store_nothing():
    cache = _layer_cache()
    cache.append(*torch.zeros(2, 3, 2, 3, 16))
    with pytest.raises(ValueError, match="max_tokens=4 tokens and was given 5"):
        cache.append(*torch.zeros(2, 2, 2, 3, 16))
    with pytest.raises(ValueError, match=r"\(2, 3, 16\).*\(1, 3, 16\)"):
        cache.append(*torch.zeros(2, 1, 1, 3, 16))
    assert cache.length == 3


def test_an_empty_cache_has_no_length():
    assert KVCache(tiny_args(**MHA), [], 1, 4).length == 0
