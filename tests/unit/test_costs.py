"""Parameters against the built model, cache bytes against reference numbers and the cache itself."""

import pytest

from megatron import costs
from megatron.model.attention.cache import KVCache
from megatron.model.gpt2_model import build_model
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, PER_LAYER

LLAMA = dict(
    pos_emb="rotary", norm="rmsnorm", activation="swiglu", use_bias_in_attn_linear=False, use_bias_in_mlp=False,
    no_weight_tying=True,
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "gpt2": dict(pos_emb="learned", norm="layernorm", activation="gelu", no_weight_tying=False),
    "neox": dict(pos_emb="rotary", gpt_j_residual=True, no_weight_tying=True),
    "gptj": dict(pos_emb="rotary", gpt_j_residual=True, gpt_j_tied=True, no_weight_tying=True),
    "phi": dict(gpt_j_residual=True, gpt_j_tied=True, no_weight_tying=True, use_bias_in_output_layer=True),
    "t5_bias": dict(pos_emb="rpe", norm="scalenorm", no_weight_tying=True, use_bias_in_mlp=False),
    "qk_norm": dict(**LLAMA, use_qk_layernorm=True, ffn_hidden_size=52),
    "qk_layernorm": dict(pos_emb="alibi", norm="layernorm", use_qk_layernorm=True, use_bias_in_attn_linear=False),
    "olmo": dict(pos_emb="sinusoidal", norm="non_parametric_layernorm", activation="geglu", use_qk_layernorm=True),
}


@pytest.mark.parametrize("geometry", ALL)
def test_parameters_are_those_of_the_built_model(geometry):
    for name, settings in MODELS.items():
        args = tiny_args(**ALL[geometry], **settings)
        built = sum(parameter.numel() for parameter in build_model(args).parameters())
        assert costs.num_parameters(args) == built, name


REFERENCE = {
    "Qwen3-0.6B": (28, 1024, 16, 8, 128, 114688),
    "Qwen3-4B": (36, 2560, 32, 8, 128, 147456),
    "Qwen3-32B": (64, 5120, 64, 8, 128, 262144),
    "Mistral-Nemo": (40, 5120, 32, 8, 128, 163840),
    "Gemma-7B": (28, 3072, 16, 16, 256, 458752),
    "Gemma-3-27B": (62, 5376, 32, 16, 128, 507904),
    "Llama-3.1-8B": (32, 4096, 32, 8, 128, 131072),
}
"""layers, hidden, heads, kv heads, head_dim; bytes of a token in a bf16 cache."""


@pytest.mark.parametrize("name", REFERENCE)
def test_cache_of_known_models(name):
    layers, hidden, heads, kv_heads, head_dim, cache_bytes = REFERENCE[name]
    args = tiny_args(
        **LLAMA, num_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, precision="bfloat16",
    )  # fmt: skip
    assert costs.kv_cache_bytes_per_token(args) == cache_bytes


@pytest.mark.parametrize("geometry", ALL)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_cache_bytes_are_those_of_the_cache(geometry, qk_norm):
    args = tiny_args(**ALL[geometry], **LLAMA, use_qk_layernorm=qk_norm)
    cache = KVCache(args, range(args.num_layers), batch_size=3, max_tokens=7)
    assert costs.kv_cache_bytes_per_token(args) * 3 * 7 == cache.nbytes


def test_table_of_widths_by_layer():
    args = tiny_args(**LLAMA, **PER_LAYER["kv_by_layer"])
    rows = dict(
        (cells[1].strip(), cells[2].strip()) for cells in map(lambda line: line.split("|"), lines_of(args)) if cells[1:]
    )
    assert rows["layer 0"] == (
        "head_dim 14, 4 kv heads, query width 168, QKV 280, rotary 14 of 14, scale 0.267261"
    )  # 12 x 14, and 2 x 4 x 14 more
    assert rows["layer 2"].startswith("head_dim 6, 2 kv heads, query width 72, QKV 96, rotary 6 of 6")
    assert "head_dim" not in rows and rows["parameters"] == f"{costs.num_parameters(args):,}"


def lines_of(args):
    return costs.geometry_table(args).splitlines()


def test_table_has_the_numbers():
    args = tiny_args(
        **LLAMA, hidden_size=1024, num_attention_heads=16, num_kv_heads=8, head_dim=128, rotary_pct=0.5,
    )  # fmt: skip
    table = costs.geometry_table(args)
    rows = {
        cells[1].strip(): cells[2].strip() for cells in (line.split("|") for line in table.splitlines()) if cells[1:]
    }
    assert rows["QKV projection"] == "1024 -> 4096"
    assert rows["output projection"] == "2048 -> 1024"
    assert rows["query width"] == "2048 (2 x hidden_size)"
    assert rows["key/value width"] == "1024"
    assert rows["rotary dimensions"] == "64 of 128"
    assert rows["softmax scale"] == "0.0883883"
    assert rows["KV cache per token"] == "16,384 bytes (fp32)"
    assert rows["parameters"] == f"{costs.num_parameters(args):,}"
    assert len({len(line) for line in table.splitlines()}) == 1  # a rectangle
