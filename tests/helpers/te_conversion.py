"""Checkpoints for tests of tools/ckpts/convert_te.py, and the tool run in this process."""

import torch

from megatron.checkpointing import folders
from megatron.checkpointing.reader import CheckpointReader
from megatron.neox_arguments import NeoXArgs
from tests.helpers.configs import tiny_values
from tests.helpers.geometries import GQA_TP4, MHA, MHA_TP4, MIXED, MQA, NARROW, QUOTIENT, WIDE_NON_DIVISIBLE
from tests.helpers.resharding import random_layers, read_all, write_checkpoint
from tools.ckpts import convert_te, reshard

SWIGLU = dict(activation="swiglu", ffn_hidden_size=44)
TANH = dict(bias_gelu_fusion=True)  # TE's gelu
RMS = dict(norm="rmsnorm", rms_norm_epsilon=1e-5)
QKV_BIAS = dict(use_bias_in_attn_linear=False, add_qkv_bias=True)
BUT_MHA = ("--layernorm-mlp", "--norms", "--linears")
CASES = {
    "mha": dict(**MHA_TP4, **TANH),
    "gqa gated rms": dict(**GQA_TP4, **SWIGLU, **RMS, use_bias_in_attn_linear=False, use_bias_in_mlp=True),
    "narrow zero-centred": dict(**NARROW, **SWIGLU, zero_centered_gamma=True, use_bias_in_mlp=False),
    "wide sandwich": dict(
        **WIDE_NON_DIVISIBLE, **RMS, norm_placement="sandwich", activation="reglu", ffn_hidden_size=36, **QKV_BIAS
    ),
    "quotient gpt_j": dict(**QUOTIENT, **TANH, gpt_j_residual=True),
    "mqa tied": dict(**MQA, **RMS, activation="relu", no_weight_tying=False),
    "three heads": dict(**MHA, **SWIGLU, use_bias_in_attn_linear=False),
    "widths by layer": dict(
        **{**GQA_TP4, "head_dim": [10, 16], "num_kv_heads": [[4, 1], [2, 1]]}, **SWIGLU, **RMS, use_bias_in_mlp=False
    ),
    "groups of heads": dict(**MIXED["mha"], **RMS, **SWIGLU, qk_norm_type="per_head"),
    "qk norms": dict(**GQA_TP4, **RMS, activation="geglu_tanh", ffn_hidden_size=28, qk_norm_type="per_head"),
}
TP2 = [name for name in CASES if name not in ("mqa tied", "three heads")]
SWITCHES = ("te_mha", "te_layernorm_mlp", "te_columnparallel", "te_rowparallel")


KEEP_MHA = ("qk norms", "groups of heads")


def parts_of(name):
    return BUT_MHA if name in KEEP_MHA else ()


def settings_of(name):
    length = dict(seq_length=16, max_position_embeddings=16, pipe_parallel_size=1, attention_config=[[["flash"], 2]])
    return {**tiny_values(**CASES[name]), **length, "tokenizer_type": "HFTokenizer"}


def in_one_process(settings):
    return NeoXArgs.from_dict({**settings, "pipe_parallel_size": 0})


def native_checkpoint(name, folder):
    settings = settings_of(name)
    layers = random_layers(in_one_process(settings))
    write_checkpoint(folder, layers, settings)
    return layers


def convert(source, out, to, *more):
    """The tool, in this process; the reader of what it wrote."""
    assert convert_te.main([str(source), str(out), "--to", to, *map(str, more)]) == 0
    return CheckpointReader(folders.find_checkpoint(str(out)))


def reshard_to(ranks, source, out, stages=1):
    command = [str(source), str(out), f"--model-parallel-size={ranks}", f"--pipe-parallel-size={stages}"]
    assert reshard.main(command) == 0
    return CheckpointReader(folders.find_checkpoint(str(out)))


def weights_in(reader):
    return {key: tensor for key, tensor in read_all(reader).items() if not key[2].endswith("_extra_state")}


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
