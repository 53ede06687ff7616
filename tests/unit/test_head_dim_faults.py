"""Faults of other frameworks around head_dim, each as its kind: what is accepted, refused and counted."""

import pytest
import torch

from megatron import costs
from megatron.errors import ConfigError
from megatron.model.attention.cache import KVCache
from megatron.model.gpt2_model import build_model
from megatron.neox_arguments import NeoXArgs
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL
from tools.head_dim import published

PLAIN = dict(norm="rmsnorm", pos_emb="rotary", activation="swiglu", use_bias_in_attn_linear=False)


def of(name, **changes):
    """A model with the widths of a published one."""
    model = published.named(name)
    return tiny_args(**{
        **PLAIN, "num_layers": model.num_layers, "hidden_size": model.hidden_size, "head_dim": model.head_dim,
        "num_attention_heads": model.num_attention_heads, "num_kv_heads": model.num_kv_heads, "ffn_hidden_size": 64,
        "precision": "bfloat16", "seq_length": 8192, "max_position_embeddings": 8192, **changes,
    })  # fmt: skip


@pytest.mark.parametrize(
    "name, true, by_quotient",
    [
        ("Mistral-Small-3-24B", 163840, 204800),  # an estimator that divides says 25 % more
        ("gpt-oss-20b", 49152, 34560),  # 30 % less
        ("Gemma-3-12B", 393216, 368640),
        ("Qwen3-0.6B", 114688, 57344),
        ("Llama-3.1-8B", 131072, 131072),
    ],
)
def test_cache_bytes_follow_head_dim(name, true, by_quotient):
    args = of(name)
    assert costs.kv_cache_bytes_per_token(args) == true
    assert costs.kv_cache_bytes_per_token(args.update(head_dim=None, pos_emb="none")) == by_quotient  # 45 is odd


@pytest.mark.parametrize("hidden, heads, kv_heads, width", [(1024, 16, 8, 128), (5120, 64, 8, 128), (64, 4, 2, 32)])
def test_cached_tensors_have_head_dim(hidden, heads, kv_heads, width):
    """Qwen3-0.6B, Qwen3-32B, and a small one whose quotient is half."""
    args = tiny_args(**PLAIN, num_layers=1, hidden_size=hidden, num_attention_heads=heads, num_kv_heads=kv_heads,
                     head_dim=width, ffn_hidden_size=8)  # fmt: skip
    cache = KVCache(args, [0], batch_size=2, max_tokens=3)
    given = torch.randn(2, 3, 2, kv_heads, width)
    for kept, part in zip(cache[0].append(*given), given, strict=True):
        assert torch.equal(kept, part)
    assert cache.nbytes == costs.kv_cache_bytes(args, 2, 3) == given.nbytes


@pytest.mark.parametrize("width", [5, 8, 13])
def test_the_query_width_is_free(width):
    """Below hidden_size, 1.6 times it as in Qwen3-4B, and far above: the layer has these widths and learns."""
    args = tiny_args(hidden_size=80, num_attention_heads=16, num_kv_heads=4, head_dim=width, pos_emb="none")
    model = build_model(args)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model((tokens, torch.arange(4)[None])).sum().backward()
    layer = dict(model.local_layers())[2].attention
    assert tuple(layer.query_key_value.weight.shape) == (24 * width, 80)
    assert tuple(layer.dense.weight.shape) == (80, 16 * width)
    assert layer.query_key_value.weight.grad.abs().sum() > 0


def test_cache_bytes_bend_at_the_window():
    """gpt-oss-120b: every other layer keeps 128 tokens, so that half of the layers stop growing there."""
    alternate = dict(sliding_window_width=127, layer_types=[[["sliding_attention", "full_attention"], "all"]])
    args = of("gpt-oss-120b", **alternate)
    assert costs.kv_cache_bytes(args, 1, 128) == 128 * 73728
    assert costs.kv_cache_bytes(args, 1, 129) - costs.kv_cache_bytes(args, 1, 128) == 36864
    assert costs.kv_cache_bytes(args, 1, 4096) == 128 * 73728 + (4096 - 128) * 36864


def test_a_key_and_value_of_every_kv_head_count():
    """head_dim 256 on hidden_size 3584 with 16 key/value heads: 8192 numbers a token and layer, not 2 x 3584."""
    args = tiny_args(**PLAIN, num_layers=1, hidden_size=3584, num_attention_heads=16, head_dim=256, ffn_hidden_size=8)
    assert costs.kv_cache_bytes_per_token(args) == 8192 * 4  # fp32


@pytest.mark.parametrize("width", [20, 80, 96])
def test_quantised_caches_count_their_scales(width):
    args = tiny_args(**PLAIN, hidden_size=64, num_attention_heads=4, num_kv_heads=2, head_dim=width)
    tokens = 7
    for kind, bytes_per_head in (("int8", width + 4), ("fp8_e4m3", width)):
        quantised = args.update(kv_cache_dtype=kind)
        assert costs.kv_cache_bytes(quantised, 3, tokens) == tokens * 3 * args.num_layers * 2 * 2 * bytes_per_head


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(hidden_size=520, num_attention_heads=8, head_dim=65), "head_dim=65"),
        (dict(hidden_size=520, num_attention_heads=8), "head_dim=65"),
        (dict(hidden_size=64, num_attention_heads=4, head_dim=26, rotary_pct=0.5), "rotates 13 dimensions"),
    ],
)
def test_an_odd_rotary_width_is_refused_with_the_config(settings, said):
    with pytest.raises(ConfigError, match=said):
        tiny_args(pos_emb="rotary", **settings)


def test_a_derived_width_does_not_become_an_explicit_one():
    """What is saved and loaded again still has no head_dim, so that another hidden_size gives another quotient."""
    args = tiny_args(hidden_size=64, num_attention_heads=4)
    assert args.head_geometry().head_dim == 16
    again = NeoXArgs.from_dict(args.non_default())
    assert again.head_dim is None
    assert again.update(hidden_size=128).head_geometry().head_dim == 32
    assert args.update(head_dim=16).update(hidden_size=128).head_geometry().head_dim == 16


@pytest.mark.parametrize("kind", ["gmlp", "amlp", "mamba", "rwkv", "local", "sparse_fixed", "bslongformer", "bigbird"])
def test_no_kind_of_layer_ignores_head_dim(kind):
    with pytest.raises(ConfigError, match=kind):
        tiny_args(**ALL["wide_non_divisible"], attention_config=[[[kind], 2]])


def test_experts_do_not_ignore_it_either():
    with pytest.raises(ConfigError, match="moe_num_experts=4"):
        tiny_args(**ALL["wide_non_divisible"], moe_num_experts=4)


@pytest.mark.parametrize(
    "width, named",
    [(0, "0"), (-8, "-8"), (True, "True"), (128.0, "128.0"), ("128", "128"), ([128], "1 layer"), ([128, "64"], "'64'")],
)
def test_what_is_no_width_is_refused_by_name_and_value(width, named):
    with pytest.raises(ConfigError) as error:
        tiny_args(hidden_size=64, num_attention_heads=4, head_dim=width)
    assert "head_dim" in str(error.value) and named in str(error.value)


def test_heads_are_not_changed_to_fit_hidden_size():
    """Qwen3.6-27B: 5120 does not divide by 24."""
    args = tiny_args(**PLAIN, hidden_size=5120, num_attention_heads=24, num_kv_heads=4, head_dim=256, ffn_hidden_size=8)
    geometry = args.head_geometry()
    assert (geometry.num_attention_heads, geometry.query_hidden_size) == (24, 6144)
    with pytest.raises(ConfigError, match="hidden_size=5120 does not divide by num_attention_heads=24; set head_dim"):
        args.update(head_dim=None)


def test_kv_heads_and_ranks_that_do_not_match_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="num_kv_heads=4 does not divide by model_parallel_size=6"):
        tiny_args(**PLAIN, hidden_size=80, num_attention_heads=12, num_kv_heads=4, head_dim=24, model_parallel_size=6)
