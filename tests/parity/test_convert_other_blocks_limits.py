"""What Gemma 1 to 3, OLMo 2, Phi and GPT-NeoX cannot hold, and what of their configs no model here does: by name."""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron.convert.families import FAMILIES
from megatron.errors import ConversionError
from tests.golden import cases
from tests.helpers.configs import tiny_args
from tests.helpers.convert_models import hf_config

HOLDS = {
    "gpt_neox": dict(num_attention_heads=4),
    "phi": dict(gpt_j_residual=True, gpt_j_tied=True, num_kv_heads=2),
    "gemma": {},
    "gemma2": dict(norm_placement="sandwich"),
    "gemma3_text": dict(norm_placement="sandwich", qk_norm_type="per_head"),
    "olmo2": dict(norm_placement="post", qk_norm_type="full_width", zero_centered_gamma=False),
}
_GEMMA = dict(zero_centered_gamma=True, embedding_multiplier=8.0)
_GATED = dict(norm="rmsnorm", activation="swiglu", use_bias_in_mlp=False, use_bias_in_attn_linear=False)


def _fitting(model_type, **changes):
    """A model of hidden size 64 that the family can hold, with changes."""
    values = dict(hidden_size=64, num_attention_heads=4)
    if model_type not in ("gpt_neox", "phi"):
        values.update(_GATED, **({} if model_type == "olmo2" else _GEMMA))
    return tiny_args(**{**values, **HOLDS[model_type], **changes})


WINDOW = dict(sliding_window_width=6)
EVERYWHERE = [
    ("pos_emb", dict(pos_emb="learned")),
    ("pos_emb", dict(pos_emb="alibi")),
    ("norm=", dict(norm="scalenorm", qk_norm_type=None, zero_centered_gamma=False)),
    ("activation=", dict(activation="softsign")),
]
REFUSED = [
    ("gpt_neox", "head_dim=20", dict(head_dim=20)),
    ("gpt_neox", "head_dim=24", dict(hidden_size=80, num_attention_heads=6, head_dim=24)),
    ("gpt_neox", "num_kv_heads=2", dict(num_kv_heads=2)),
    ("gpt_neox", "activation=swiglu", dict(activation="swiglu")),
    ("gpt_neox", "gpt_j_tied=True", dict(gpt_j_residual=True, gpt_j_tied=True)),
    ("gpt_neox", "use_bias_in_mlp=False", dict(use_bias_in_mlp=False)),
    ("gpt_neox", "use_qk_layernorm=True", dict(use_qk_layernorm=True)),
    ("gpt_neox", "softmax_scale=0.3", dict(softmax_scale=0.3)),
    ("gpt_neox", "sliding_window_width=6", WINDOW),
    ("gpt_neox", "add_qkv_bias=True", dict(add_qkv_bias=True, use_bias_in_attn_linear=False)),
    ("phi", "gpt_j_tied=False", dict(gpt_j_tied=False)),
    ("phi", "use_bias_in_attn_linear=False", dict(use_bias_in_attn_linear=False)),
    ("phi", "qk_norm_type=joint", dict(qk_norm_type="joint")),
    ("phi", "head_dim=20 with qk_norm_type", dict(qk_norm_type="per_head", head_dim=20)),
    ("gemma", "embedding_multiplier=None", dict(embedding_multiplier=None)),
    ("gemma", "embedding_multiplier=8.1", dict(embedding_multiplier=8.1)),
    ("gemma", "zero_centered_gamma=False", dict(zero_centered_gamma=False)),
    ("gemma", "norm_placement=sandwich", dict(norm_placement="sandwich")),
    ("gemma", "attn_logit_softcap=5.0", dict(attn_logit_softcap=5.0)),
    ("gemma", "rotary_pct=0.5", dict(rotary_pct=0.5)),
    ("gemma", "activation=gelu", dict(activation="gelu")),
    ("gemma2", "softmax_scale=0.3", dict(softmax_scale=0.3)),
    (
        "gemma2",
        "hidden_size=80",
        dict(hidden_size=80, num_attention_heads=6, head_dim=24, embedding_multiplier=80**0.5),
    ),
    ("gemma2", "qk_norm_type=per_head", dict(qk_norm_type="per_head")),
    ("gemma3_text", "attn_logit_softcap=5.0", dict(attn_logit_softcap=5.0)),
    ("gemma3_text", "qk_norm_type=None", dict(qk_norm_type=None)),
    ("olmo2", "norm_placement=pre", dict(norm_placement="pre")),
    ("olmo2", "qk_norm_type=per_head", dict(qk_norm_type="per_head")),
    ("olmo2", "sliding_window_width=6", WINDOW),
    ("olmo2", "use_bias_in_mlp=True", dict(use_bias_in_mlp=True)),
]


@pytest.mark.parametrize("model_type", HOLDS)
def test_what_no_family_here_holds_is_named(model_type):
    assert FAMILIES[model_type].refusals(_fitting(model_type)) == []
    for named, changes in EVERYWHERE:
        reasons = FAMILIES[model_type].refusals(_fitting(model_type, **changes))
        assert any(reason.startswith(named) for reason in reasons), (changes, reasons)


@pytest.mark.parametrize("model_type, named, changes", REFUSED, ids=lambda value: str(value)[:30])
def test_what_a_family_cannot_hold_is_named(model_type, named, changes):
    """This, and nothing else than what depends on it."""
    reasons = FAMILIES[model_type].refusals(_fitting(model_type, **changes))
    assert any(reason.startswith(named) for reason in reasons), reasons
    assert len(reasons) <= len(changes) + ("sliding_window_width" in changes)  # which makes layer_types


PARTIAL = {"rope_theta": 5000.0, "partial_rotary_factor": 0.25}
UNREADABLE = [
    ("gemma", "use_bidirectional_attention", dict(use_bidirectional_attention=True)),
    ("gemma", "hidden_activation=gelu", dict(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu")),
    ("gemma", "hidden_act=gelu_new", dict(hidden_act="gelu_new")),
    ("gemma2", "use_bidirectional_attention", dict(use_bidirectional_attention=True)),
    (
        "gemma2",
        "partial_rotary_factor=0.25",
        dict(rope_parameters=PARTIAL),
    ),
    ("gemma3_text", "attn_logit_softcapping=5.0", dict(attn_logit_softcapping=5.0)),
    (
        "gemma3_text",
        "rope_parameters=.*rope_theta",
        dict(rope_parameters={"rope_theta": 5000.0}),
    ),
    ("gemma3_text", "full_attention: rope_type=dynamic", dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0})),
    ("olmo2", "hidden_act=gelu_new", dict(hidden_act="gelu_new")),
    ("phi", "hidden_act=gelu_10", dict(hidden_act="gelu_10")),
    ("gpt_neox", "head_dim=20", dict(head_dim=20)),
    ("gpt_neox", "num_key_value_heads=2", dict(num_key_value_heads=2)),
    ("gpt_neox", "rope_theta=500.0", dict(rope_theta=500.0)),
]


@pytest.mark.parametrize("model_type, named, changes", UNREADABLE, ids=lambda value: str(value)[:40])
def test_configs_that_say_what_is_not_built_are_refused(model_type, named, changes):
    """Or what transformers reads and does not do."""
    plain = hf_config(model_type).to_dict()
    if model_type == "gpt_neox":
        del plain["num_key_value_heads"]
    if "rope_scaling" in changes or "rope_theta" in changes:
        del plain["rope_parameters"]
    config = CONFIG_MAPPING[model_type].from_dict({**plain, **changes})
    with pytest.raises(ConversionError, match=named):
        FAMILIES[model_type].settings(config)


def test_gpt_neox_joint_norm_has_no_place_in_transformers():
    args = cases.arguments("case3_mha_qk_layernorm")
    assert all(family.refusals(args) for family in FAMILIES.values())
    assert any("use_qk_layernorm=True" in reason for reason in FAMILIES["gpt_neox"].refusals(args))
