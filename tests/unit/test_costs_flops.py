"""Floating-point operations: torch's counter on the built model, sums over masks, published figures."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron import costs
from megatron.logging.training_logger import TrainingLogger
from megatron.model.gpt2_model import build_model, cross_entropy
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL

LLAMA = dict(
    pos_emb="rotary", norm="rmsnorm", activation="swiglu", use_bias_in_attn_linear=False, use_bias_in_mlp=False,
    no_weight_tying=True,
)  # fmt: skip
KEYS_ARE_VALUES = dict(LLAMA, shared_key_value=True, v_norm=True, layer_scalar=True)
GPT2 = dict(pos_emb="learned", norm="layernorm", activation="gelu", no_weight_tying=False)


@pytest.mark.parametrize("settings", [LLAMA, GPT2, KEYS_ARE_VALUES], ids=["llama", "gpt2", "keys are values"])
@pytest.mark.parametrize("geometry", ALL)
def test_a_training_step_counted_by_torch(geometry, settings):
    """Forward and backward on the kernel that computes every score, part by part and in all."""
    args = tiny_args(**ALL[geometry], **settings, attention_config=[[["global"], 2]])
    model = build_model(args)
    tokens = torch.zeros(2, args.seq_length, dtype=torch.int64)
    positions = torch.arange(args.seq_length).expand(2, -1)
    with FlopCounterMode(display=False) as forward:
        logits = model((tokens, positions))
    with FlopCounterMode(display=False) as backward:
        cross_entropy(args)(logits, (tokens, torch.ones(2, args.seq_length))).backward()
    parts = costs.forward_flops(args)
    assert forward.get_total_flops() == sum(parts.values()) * tokens.numel()
    assert forward.get_total_flops() + backward.get_total_flops() == costs.flops_per_token(args) * tokens.numel()


def test_parts_are_the_products_of_their_shapes():
    """2 x rows x columns for each product, with every width written out."""
    args = tiny_args(
        **LLAMA, num_layers=3, hidden_size=80, num_attention_heads=6, num_kv_heads=2, head_dim=24, ffn_hidden_size=52,
        padded_vocab_size=96,
    )  # fmt: skip
    assert costs.forward_flops(args, 17) == {
        "qkv": 3 * 2 * 80 * (144 + 2 * 48),
        "scores": 3 * 2 * 144 * 17,
        "values": 3 * 2 * 144 * 17,
        "output": 3 * 2 * 144 * 80,
        "mlp": 3 * 2 * 80 * 3 * 52,
        "head": 2 * 80 * 96,
    }


@pytest.mark.parametrize("window", [None, 0, 1, 5, 16, 17, 40])
@pytest.mark.parametrize("tokens", [1, 2, 17, 18])
def test_keys_of_a_query_are_those_of_the_mask(tokens, window):
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    mask = (distance >= 0) & (distance <= (tokens if window is None else window))
    assert costs.keys_per_query(tokens, causal=True, window=window) == pytest.approx(mask.sum().item() / tokens)
    widest = mask.sum(1).max().item()
    assert costs.keys_per_query(tokens, causal=False, window=window) == widest


def test_a_window_counts_in_its_layers_only():
    args = tiny_args(
        **LLAMA, num_layers=4, hidden_size=80, num_attention_heads=6, num_kv_heads=2, head_dim=24,
        sliding_window_width=9, layer_types=[[["sliding_attention", "full_attention"], 2]],
    )  # fmt: skip
    assert costs.forward_flops(args, 64)["scores"] == 2 * 144 * 2 * (64 + 10)
    assert costs.forward_flops(args, 64, windows=False)["scores"] == 2 * 144 * 4 * 64
    assert costs.forward_flops(args, 64, causal=True, windows=False)["values"] == 2 * 144 * 4 * 65 / 2
    matrices = sum(costs.forward_flops(args, 1)[part] for part in ("qkv", "output", "mlp", "head"))
    assert costs.decode_flops(args, 63) == matrices + 4 * 144 * (2 * 64 + 2 * 10)
    assert costs.decode_flops(args, 8) == matrices + 4 * 144 * 4 * 9


def test_generating_token_by_token_costs_the_causal_half():
    """The sum over all tokens of a text equals the exact count of its causal forward pass."""
    args = tiny_args(**ALL["wide_non_divisible"], **LLAMA)
    one_by_one = sum(costs.decode_flops(args, past) for past in range(21))
    assert one_by_one == pytest.approx(21 * sum(costs.forward_flops(args, 21, causal=True).values()))


PUBLISHED = {
    "Qwen3-0.6B": (28, 1024, 16, 8, 128, 3072, 151936, 4096, 6.394),
    "Qwen3-0.6B long": (28, 1024, 16, 8, 128, 3072, 151936, 32768, 26.124),
    "Qwen3-4B": (36, 2560, 32, 8, 128, 9728, 151936, 4096, 31.381),
    "Qwen3-32B": (64, 5120, 64, 8, 128, 25600, 151936, 4096, 217.671),
    "Mistral-Nemo": (40, 5120, 32, 8, 128, 14336, 131072, 4096, 77.511),
    "Gemma-7B": (28, 3072, 16, 16, 256, 24576, 256000, 4096, 56.862),
    "Gemma-3-27B, all layers full": (62, 5376, 32, 16, 128, 21504, 262208, 4096, 174.530),
    "Llama-3.1-8B": (32, 4096, 32, 8, 128, 14336, 128256, 4096, 51.470),
}
"""layers, hidden, heads, kv heads, head_dim, MLP width, vocabulary, sequence; GFLOP per token and training step."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    layers, hidden, heads, kv_heads, head_dim, ffn, vocab, seq_length, gflops = PUBLISHED[name]
    args = tiny_args(
        **LLAMA, num_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, ffn_hidden_size=ffn, padded_vocab_size=vocab,
    )  # fmt: skip
    assert costs.flops_per_token(args, seq_length) / 1e9 == pytest.approx(gflops, abs=6e-4)


@pytest.mark.parametrize(
    "widths, attention",
    [
        # query width / hidden, and the share of attention in what a training step costs, by hand
        (dict(hidden_size=4096, num_attention_heads=64, num_kv_heads=4, head_dim=128), 8192),  # Qwen3-235B-A22B
        (dict(hidden_size=2880, num_attention_heads=64, num_kv_heads=8, head_dim=64), 4096),  # gpt-oss-20b
        (dict(hidden_size=3584, num_attention_heads=16, num_kv_heads=8, head_dim=256), 4096),  # Gemma-2-9B
        (dict(hidden_size=5120, num_attention_heads=32, num_kv_heads=8, head_dim=128), 4096),  # Mistral-Small-24B
    ],
)
def test_scores_take_the_query_width_and_not_hidden_size(widths, attention):
    args = tiny_args(**LLAMA, **widths, ffn_hidden_size=64, num_layers=1)
    parts = costs.forward_flops(args, 1000)
    assert parts["scores"] + parts["values"] == 4 * attention * 1000
    assert parts["output"] == 2 * attention * widths["hidden_size"]


def test_the_log_divides_by_the_devices_and_counts_the_whole_batch(tmp_path, monkeypatch):
    """TFLOP/s per device of a step of known length: all sequences of all replicas and accumulated steps."""
    args = tiny_args(
        **ALL["wide_non_divisible"], **LLAMA, log_dir=str(tmp_path), model_parallel_size=2, global_num_gpus=8,
        train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=5, peak_theoretical_tflops=0.5,
        checkpoint_activations=True, train_iters=1, log_interval=1,
    )  # fmt: skip
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    logger = TrainingLogger(args, costs.flops_per_token(args), interactive=False)
    logger.log_step(1, dict(loss=1.0, lr=1e-3, seconds=0.25))
    logger.close()
    record = json.loads((tmp_path / "train_log.jsonl").read_text().splitlines()[0])
    tokens = 3 * 5 * (8 // 2) * args.seq_length
    expected = tokens * costs.flops_per_token(args) / 0.25 / 8 / 1e12
    assert record["tflops"] == pytest.approx(expected)
    assert record["mfu"] == pytest.approx(expected / 0.5)
