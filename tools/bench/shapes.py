"""The shapes that are measured, in our keys, and the same as configs of transformers."""

from typing import Any, Dict

QWEN3_65M: Dict[str, Any] = dict(
    num_layers=8, hidden_size=512, num_attention_heads=8, num_kv_heads=4, head_dim=128, ffn_hidden_size=1536,
    padded_vocab_size=32768, no_weight_tying=True, seq_length=512, max_position_embeddings=512,
)  # fmt: skip
"""65.0 M parameters, 48.2 M of them in matrix products; the shape of the training, memory and decoding benchmarks."""

QWEN3_STYLE: Dict[str, Any] = dict(
    norm="rmsnorm", rms_norm_epsilon=1e-6, qk_norm_type="per_head", pos_emb="rotary", rotary_pct=1.0,
    rotary_emb_base=1000000.0, activation="swiglu", use_bias_in_attn_linear=False, use_bias_in_mlp=False,
    hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
"""What makes a shape Qwen3's."""

TRAINING: Dict[str, Any] = dict(
    train_micro_batch_size_per_gpu=4, optimizer={"type": "adam", "params": {"lr": 1e-4}}, train_iters=100,
    zero_optimization={"stage": 0}, precision="bfloat16", distributed_backend="gloo", use_cpu_initialization=True,
    global_num_gpus=1,
)  # fmt: skip
"""How they are trained: batch 4, Adam, no ZeRO."""

FAST: Dict[str, Any] = dict(compile=True, fused_loss_chunk=512)
"""The settings that make our steps fast."""


def settings(shape: Dict[str, Any] = QWEN3_65M, **overrides: Any) -> Dict[str, Any]:
    """Arguments for NeoXArgs.from_dict: a shape in Qwen3's style, trained on one CPU."""
    return {**QWEN3_STYLE, **TRAINING, **shape, **overrides}


def hf_config(ours: Dict[str, Any]) -> Dict[str, Any]:
    """Keywords for transformers' Qwen3Config of the same model."""
    rope = {"rope_type": "default", "rope_theta": ours["rotary_emb_base"]}
    return dict(
        num_hidden_layers=ours["num_layers"], hidden_size=ours["hidden_size"], head_dim=ours["head_dim"],
        num_attention_heads=ours["num_attention_heads"], num_key_value_heads=ours["num_kv_heads"],
        intermediate_size=ours["ffn_hidden_size"], vocab_size=ours["padded_vocab_size"],
        tie_word_embeddings=not ours["no_weight_tying"], max_position_embeddings=ours["max_position_embeddings"],
        rms_norm_eps=ours["rms_norm_epsilon"], rope_parameters=rope,
        hidden_act="silu", attention_bias=False, attention_dropout=0.0, use_sliding_window=False,
    )  # fmt: skip
