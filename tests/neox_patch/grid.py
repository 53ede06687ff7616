"""The configurations that are tried in every state of GPT-NeoX."""

import os

from tests.helpers.geometries import MHA, MHA_TP4, MQA, NARROW, WIDE_NON_DIVISIBLE
from tests.neox_patch.checkouts import MODEL, case, tokens

RANKS = (1, 2)
VOCABULARY, LENGTH = 128, 24
PROMPTS, NEW_TOKENS = [[5, 7, 11, 13, 17], [23]], 6

PLAIN_BLOCK = dict(
    norm="layernorm",
    activation="gelu",
    intermediate_size=128,
    use_bias_in_mlp=True,
    use_bias_in_attn_linear=True,
)
FLASH = dict(attention_config=[[["flash"], "all"]])
MHA_64 = dict(hidden_size=64, num_attention_heads=4)
GQA_64 = dict(**MHA_64, num_kv_heads=2)

ABSENT = {
    "gpt_j, rotary 0.25": dict(**MHA_64, **PLAIN_BLOCK, rotary_pct=0.25, gpt_j_residual=True),
    "llama GQA": dict(GQA_64),
    "llama MHA, pipeline": dict(**MHA_64, pipe_parallel_size=1),
    "GQA with biases, pipeline": dict(**GQA_64, **PLAIN_BLOCK, pipe_parallel_size=1),
    "learned, tied": dict(**MHA_64, **PLAIN_BLOCK, pos_emb="learned", no_weight_tying=False),
    "alibi": dict(**MHA_64, **PLAIN_BLOCK, pos_emb="alibi"),
    "rpe": dict(**MHA_64, **PLAIN_BLOCK, pos_emb="rpe"),
    "QK norm": dict(**MHA_64, **PLAIN_BLOCK, use_qk_layernorm=True),
    "QK norm, GQA": dict(**GQA_64, **PLAIN_BLOCK, use_qk_layernorm=True),
    "flash, GQA": dict(**GQA_64, **FLASH),
    "scaled by layer": dict(
        **MHA_64, **PLAIN_BLOCK, apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True
    ),
}
"""Without any new argument: everything must be as in the plain checkout, to the last bit."""

WIDE = dict(hidden_size=64, num_attention_heads=4, num_kv_heads=2, head_dim=24)
WIDE_MHA = dict(hidden_size=40, num_attention_heads=4, num_kv_heads=4, head_dim=14)
PER_HEAD = dict(qk_norm_type="per_head")

WIDTHS = {
    "wide GQA": dict(WIDE),
    "narrow GQA": dict(NARROW),
    "non-divisible GQA": dict(WIDE_NON_DIVISIBLE),
    "wide MHA": dict(MHA_TP4),
    "MHA, num_kv_heads given": dict(WIDE_MHA),
    "narrow MHA, 3 heads": dict(MHA),
    "MQA": dict(MQA),
    "biases": dict(WIDE, use_bias_in_attn_linear=True),
    "softmax_scale": dict(WIDE, softmax_scale=0.3),
    "pipeline": dict(WIDE_NON_DIVISIBLE, pipe_parallel_size=1),
    "per_head, GQA": dict(WIDE_NON_DIVISIBLE, **PER_HEAD),
    "per_head, MHA": dict(MHA_TP4, **PER_HEAD),
    "per_head, layernorm": dict(WIDE, **PLAIN_BLOCK, **PER_HEAD),
    "joint, GQA": dict(NARROW, **PLAIN_BLOCK, use_qk_layernorm=True),
    "joint, RMSNorm": dict(WIDE, use_qk_layernorm=True),
    "joint, layernorm": dict(MHA_TP4, **PLAIN_BLOCK, qk_norm_type="joint"),
    "gpt_j, rotary 0.5, MHA": dict(MHA_TP4, **PLAIN_BLOCK, rotary_pct=0.5, gpt_j_residual=True),
    "rotary 0.25, narrow": dict(NARROW, rotary_pct=0.25),
    "alibi": dict(MHA_TP4, **PLAIN_BLOCK, pos_emb="alibi"),
    "rpe": dict(MHA_TP4, **PLAIN_BLOCK, pos_emb="rpe"),
    "learned, tied": dict(WIDE, **PLAIN_BLOCK, pos_emb="learned", no_weight_tying=False),
    "flash, GQA": dict(WIDE, **FLASH, softmax_scale=0.3),
    "flash, MHA": dict(hidden_size=72, num_attention_heads=4, head_dim=24, **FLASH),
    "flash, per_head": dict(WIDE_NON_DIVISIBLE, **FLASH, **PER_HEAD),
    "flash, joint, GQA": dict(NARROW, **PLAIN_BLOCK, **FLASH, use_qk_layernorm=True),
    "flash, alibi": dict(WIDE, **PLAIN_BLOCK, **FLASH, pos_emb="alibi"),
}
"""With the new arguments."""

WRONG = {
    "heads do not divide hidden": dict(hidden_size=65, num_attention_heads=4),
    "kv heads do not divide heads": dict(**MHA_64, num_kv_heads=3),
    "no such argument": dict(**MHA_64, head_width=16),
    "a string for a number": dict(hidden_size="64", num_attention_heads=4),
}
"""Refused by GPT-NeoX; the error must stay of its type."""
REFUSED = {
    "head_dim=0": dict(GQA_64, head_dim=0),
    "head_dim=True": dict(GQA_64, head_dim=True),
    "head_dim='24'": dict(GQA_64, head_dim="24"),
    "rotary_pct=0.5": dict(GQA_64, head_dim=10, rotary_pct=0.5),
    "softmax_scale=-0.1": dict(GQA_64, head_dim=24, softmax_scale=-0.1),
    "use_mup": dict(GQA_64, head_dim=24, use_mup=True),
}
"""{what the patched checkout's ConfigError names: arguments}"""
NOT_UNTIL_2025 = ("joint, RMSNorm",)
"""Before, GPT-NeoX's RMSNorm could not take two dimensions."""
CACHED_AS_RECOMPUTED = [name for name, values in WIDTHS.items() if values.get("pos_emb") != "rpe"]
"""With rpe GPT-NeoX's cached generation takes each new token for the first of the text."""


def arguments(overrides):
    """All arguments of a configuration, for GPT-NeoX and for this project."""
    values = {**MODEL, "seq_length": LENGTH, "max_position_embeddings": LENGTH, **overrides}
    values["padded_vocab_size"] = VOCABULARY
    return values


def splits(overrides, tp):
    """Whether a configuration can be run on `tp` ranks."""
    heads = overrides["num_attention_heads"]
    return heads % tp == 0 and (overrides.get("num_kv_heads") or heads) % tp == 0


def runs(overrides_by_name, tp):
    """Those configurations that `tp` ranks can run."""
    return {name: values for name, values in overrides_by_name.items() if splits(values, tp)}


def in_transformers(values):
    """Whether Llama's, Mistral's or Qwen3's classes have such a model."""
    plain = not any(values.get(key) for key in ("use_qk_layernorm", "gpt_j_residual")) and "pos_emb" not in values
    return plain and values.get("norm", "rmsnorm") == "rmsnorm" and values.get("rotary_pct", 1) == 1


def ids():
    """int64 [2, LENGTH + 1]."""
    return tokens(VOCABULARY, length=LENGTH)


def absent_cases(tp):
    """ABSENT as cases to run, from GPT-NeoX's own initialisation; and the same with head_dim spelled out."""
    return [_case(f"absent: {name}", values) for name, values in runs(ABSENT, tp).items()]


def wrong_cases(names=WRONG):
    """Configurations of which nothing but the arguments is tried."""
    return [case(f"wrong: {name}", arguments(values), ids(), do=["config"]) for name, values in names.items()]


def width_cases(tp, weights):
    """WIDTHS as cases to run, from files."""
    return [
        _case(f"width: {name}", values, weights=os.path.join(weights[name][1][tp], "global_step7"))
        for name, values in runs(WIDTHS, tp).items()
    ]


def _case(name, values, **more):
    do = ["state", "backward"] if values.get("pipe_parallel_size") else ["state", "backward", "generate"]
    return case(name, arguments(values), ids(), do=do, prompts=PROMPTS, new_tokens=NEW_TOKENS, **more)
