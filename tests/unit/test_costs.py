"""Counts against the built model; FLOPs and cache bytes against reference numbers and the cache itself."""

import pytest
import torch

from megatron import costs
from megatron.model.attention.cache import KVCache
from megatron.model.gpt2_model import build_model
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL

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


@pytest.mark.parametrize("geometry", ALL)
def test_matrices_by_counting_the_flops_of_a_forward_pass(geometry):
    """torch's own counter on the eager kernel: forward is a third of forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    args = tiny_args(**ALL[geometry], **LLAMA, attention_config=[[["global"], 2]])
    model = build_model(args)
    tokens = torch.zeros(2, args.seq_length, dtype=torch.int64)
    positions = torch.arange(args.seq_length).expand(2, -1)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model((tokens, positions))
    assert counter.get_total_flops() * 3 == costs.flops_per_token(args) * tokens.numel()


REFERENCE = {
    "Qwen3-0.6B": (28, 1024, 16, 8, 128, 3072, 151936, 4096, 6.394, 114688),
    "Qwen3-0.6B long": (28, 1024, 16, 8, 128, 3072, 151936, 32768, 26.124, 114688),
    "Qwen3-4B": (36, 2560, 32, 8, 128, 9728, 151936, 4096, 31.381, 147456),
    "Qwen3-32B": (64, 5120, 64, 8, 128, 25600, 151936, 4096, 217.671, 262144),
    "Mistral-Nemo": (40, 5120, 32, 8, 128, 14336, 131072, 4096, 77.511, 163840),
    "Gemma-7B": (28, 3072, 16, 16, 256, 24576, 256000, 4096, 56.862, 458752),
    "Gemma-3-27B": (62, 5376, 32, 16, 128, 21504, 262208, 4096, 174.530, 507904),
    "Llama-3.1-8B": (32, 4096, 32, 8, 128, 14336, 128256, 4096, 51.470, 131072),
}
"""layers, hidden, heads, kv heads, head_dim, MLP width, vocabulary, sequence; GFLOP per token, bf16 cache bytes."""


@pytest.mark.parametrize("name", REFERENCE)
def test_known_models(name):
    layers, hidden, heads, kv_heads, head_dim, ffn, vocab, seq_length, gflops, cache_bytes = REFERENCE[name]
    args = tiny_args(
        **LLAMA, num_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, ffn_hidden_size=ffn, padded_vocab_size=vocab, precision="bfloat16",
    )  # fmt: skip
    assert costs.flops_per_token(args, seq_length) / 1e9 == pytest.approx(gflops, abs=6e-4)
    assert costs.kv_cache_bytes_per_token(args) == cache_bytes


@pytest.mark.parametrize("geometry", ALL)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_cache_bytes_are_those_of_the_cache(geometry, qk_norm):
    args = tiny_args(**ALL[geometry], **LLAMA, use_qk_layernorm=qk_norm)
    cache = KVCache(args, range(args.num_layers), batch_size=3, max_tokens=7)
    assert costs.kv_cache_bytes_per_token(args) * 3 * 7 == cache.nbytes


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
