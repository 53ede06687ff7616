"""Checkpoints of random weights at TP 1 over the variants that are split in different ways, without an engine."""

import hashlib
import json
import os

import torch

from megatron.checkpointing.reader import layer_file
from megatron.model.gpt2_model import build_model
from tests.helpers.configs import tiny_values
from tests.helpers.geometries import GQA_TP4, MHA_TP4, MIXED, PER_LAYER, QUOTIENT

SWIGLU = dict(activation="swiglu", ffn_hidden_size=44, use_bias_in_mlp=True)
RMS = dict(norm="rmsnorm")

VARIANTS = {
    "mha": dict(**MHA_TP4),
    "mha gpt_j": dict(**QUOTIENT, gpt_j_residual=True, pos_emb="learned"),
    "gqa gated rms": dict(**GQA_TP4, **SWIGLU, **RMS, use_bias_in_attn_linear=False),
    "gqa qk rms tied": dict(**GQA_TP4, **RMS, use_qk_layernorm=True, no_weight_tying=False),
    "gqa per_head": dict(
        **GQA_TP4, **RMS, qk_norm_type="per_head", zero_centered_gamma=True, use_bias_in_output_layer=True
    ),
    "gqa full_width": dict(**GQA_TP4, qk_norm_type="full_width", use_bias_in_attn_linear=False, add_qkv_bias=True),
    "mha gated qk layernorm": dict(**MHA_TP4, **SWIGLU, use_qk_layernorm=True),
    "gqa rpe": dict(**GQA_TP4, pos_emb="rpe"),
    "mha alibi scalenorm": dict(**MHA_TP4, pos_emb="alibi", norm="scalenorm", use_qk_layernorm=True),
    "mha sinusoidal gpt_j gated": dict(**MHA_TP4, **SWIGLU, pos_emb="sinusoidal", gpt_j_residual=True),
    "gqa shared kv": dict(hidden_size=56, num_attention_heads=8, num_kv_heads=2, head_dim=12, **SWIGLU, **RMS),
    "mqa shared kv, uneven": dict(
        hidden_size=40, num_attention_heads=4, num_kv_heads=1, head_dim=10, rotary_pct=0.4, qk_norm_type="full_width"
    ),
    "kv heads by layer, full_width": dict(**PER_LAYER["kv_by_layer"], **SWIGLU, qk_norm_type="full_width"),
    "mha widths by layer, per_head": dict(**PER_LAYER["alternating"], **RMS, qk_norm_type="per_head"),
    "mqa progressive gpt_j": dict(**PER_LAYER["progressive"], gpt_j_residual=True, pos_emb="learned"),
    "mqa progressive rpe": dict(**PER_LAYER["progressive"], pos_emb="rpe"),
    "gqa groups, full_width": dict(**MIXED["gqa"], **SWIGLU, **RMS, qk_norm_type="full_width"),
    "mha groups, per_head": dict(**MIXED["mha"], **RMS, qk_norm_type="per_head"),
    "mha groups gpt_j alibi": dict(**MIXED["mha"], gpt_j_residual=True, pos_emb="alibi"),
    "mha keys are values": dict(**MHA_TP4, **RMS, shared_key_value=True, v_norm=True, layer_scalar=True),
    "gqa groups, keys are values": dict(**MIXED["gqa"], shared_key_value=True, v_norm=True, layer_scalar=True),
    "gqa frequencies": dict(**GQA_TP4, rotary_save_freqs_buffer=True, gpt_j_residual=True),
}
DEPENDS_ON_RANKS = ("mha gated qk layernorm",)
"""GPT-NeoX's joint layer norm over a rank's heads: another function at each number of ranks."""

SPLIT_AS_OTHERS = ("mqa progressive gpt_j", "mqa progressive rpe", "mha groups gpt_j alibi")
"""Variants of which every parameter is split as in another one: for what needs processes they are not run."""


def settings_of(variant, **more):
    """YAML settings of a variant."""
    length = dict(seq_length=16, max_position_embeddings=16)
    return {**tiny_values(**VARIANTS[variant]), **length, "tokenizer_type": "HFTokenizer", **more}


def noise(name, like):
    """Normal numbers that depend on the name only; buffers with a meaning keep their values."""
    if name.endswith(("inv_freq", "slopes")):
        return like.clone()
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)) * 0.2
    return (like.float() + values).to(like.dtype)


def random_layers(args):
    """{index: {name: tensor}} of a whole model; for use without process groups."""
    layers = {}
    for name, tensor in build_model(args).state_dict().items():
        _, index, rest = name.split(".", 2)
        layers.setdefault(int(index), {})[rest] = noise(name, tensor.detach())
    return layers


def write_checkpoint(save, layers, settings, vocab=128, tp=1, rank_state=None):
    """Layer files of TP rank 0, an mp_rank file and a config, as GPT-NeoX writes them; returns the step's folder."""
    folder = os.path.join(str(save), "global_step5")
    os.makedirs(os.path.join(folder, "configs"))
    for index, state in layers.items():
        torch.save(state, os.path.join(folder, layer_file(index, 0)))
    recorded = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    args = {key: settings[key] for key in recorded}
    args.update(make_vocab_size_divisible_by=128, padded_vocab_size=vocab, tokenizer_type="HFTokenizer")
    args["model_parallel_size"] = tp
    state = {"module": None, "optimizer": {"state": {}}, "iteration": 5, "args": args, "global_steps": 5}
    torch.save({**state, **(rank_state or {})}, os.path.join(folder, "mp_rank_00_model_states.pt"))
    kept = {key: value for key, value in settings.items() if key != "padded_vocab_size"}
    with open(os.path.join(folder, "configs", "tiny.yml"), "w") as file:
        file.write(json.dumps({**kept, "vocab_file": "/nowhere.json"}, indent=1))
    with open(os.path.join(str(save), "latest"), "w") as file:
        file.write("global_step5")
    return folder


def read_all(reader):
    """{(rank, index, name): tensor}"""
    return {
        (rank, index, name): tensor
        for rank in range(reader.model_parallel_size)
        for index in reader.layer_indices(rank)
        for name, tensor in reader.layer_state(index, rank).items()
    }
