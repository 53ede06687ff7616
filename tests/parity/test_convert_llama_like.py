"""Llama, Mistral, Qwen 2 and 3, SmolLM3, Granite, in and out: logits as transformers', tensors and configs unchanged.

tests/parity/test_convert_faults.py has the faults of other frameworks.
"""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.convert.choose import choose_family
from megatron.convert.families import FAMILIES
from megatron.convert.families.config_file import read_config
from megatron.errors import ConversionError
from megatron.model.gpt2_model import GPT2ModelSequential
from tests.helpers.configs import tiny_args
from tests.helpers.convert_models import (
    PADDED,
    VOCAB,
    as_ours,
    as_theirs,
    check_family,
    hf_config,
    our_args,
    our_logits,
    text,
    their_logits,
    written_config,
)
from tests.helpers.geometries import ALL
from tests.helpers.tolerances import FORWARD, assert_close

WIDE = dict(hidden_size=78, num_attention_heads=6, head_dim=20)
WIDE_NON_DIVISIBLE = dict(hidden_size=80, num_attention_heads=6, head_dim=24)
NARROW = dict(hidden_size=160, head_dim=24)
MQA = dict(hidden_size=40, num_attention_heads=5, num_key_value_heads=1, head_dim=12)
MHA = dict(hidden_size=57, num_attention_heads=3, num_key_value_heads=3, head_dim=16)
BIASED = dict(attention_bias=True, mlp_bias=True)
WINDOW = dict(sliding_window=7, use_sliding_window=True)
BASE = 5000.0
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MODEL_TYPES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "granite")


FACTORS = {name: [start + i / 8 for i in range(8)] for name, start in dict(short_factor=1.0, long_factor=2.0).items()}


def _rope(rope_type, **numbers):
    return dict(rope_parameters={"rope_type": rope_type, "rope_theta": BASE, **numbers})


LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8)
YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=8)

CASES = {
    "llama-absent": ("llama", dict(rope_parameters=None)),
    "llama-equal": ("llama", dict(head_dim=16, attention_dropout=0.125, **_rope("linear", factor=3.0))),
    "llama-wide-tied-llama3": ("llama", dict(WIDE, **LLAMA3, tie_word_embeddings=True)),
    "llama-narrow-biased-mha": ("llama", dict(NARROW, **BIASED, num_key_value_heads=4)),
    "llama-mqa-yarn": ("llama", dict(MQA, **YARN, attention_bias=True)),
    "llama-mha-yarn-untruncated": (
        "llama",
        dict(MHA, **_rope("yarn", factor=None, beta_fast=16, mscale=0.7, mscale_all_dim=0.4, truncate=False)),
    ),
    # 23 tokens, and the scaling starts at 8.
    "llama-dynamic": ("llama", dict(**_rope("dynamic", factor=4.0), max_position_embeddings=8, mlp_bias=True)),
    "llama-longrope": ("llama", _rope("longrope", **FACTORS, factor=3.0, original_max_position_embeddings=8)),
    "llama-gelu": ("llama", dict(WIDE, hidden_act="gelu", rms_norm_eps=1e-2)),
    "llama-gelu-tanh": ("llama", dict(NARROW, hidden_act="gelu_pytorch_tanh")),
    "llama-relu": ("llama", dict(hidden_act="relu")),
    "mistral-absent": ("mistral", dict(sliding_window=None, num_key_value_heads=4)),
    "mistral-7b": ("mistral", dict(head_dim=16, sliding_window=7)),
    "mistral-nemo": ("mistral", dict(NARROW, sliding_window=None, **_rope("default"))),
    "mistral-wide-non-divisible": ("mistral", dict(WIDE_NON_DIVISIBLE, sliding_window=7, tie_word_embeddings=True)),
    "mistral-mqa-window-of-1": ("mistral", dict(MQA, sliding_window=2)),
    "ministral-equal": ("ministral", dict(head_dim=16, sliding_window=7, num_hidden_layers=3, layer_types=MIXED)),
    "ministral-wide-without-windows": (
        "ministral",
        dict(WIDE, layer_types=["full_attention"] * 2, num_key_value_heads=6),
    ),
    "qwen2-absent-tied": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2-wide-non-divisible-yarn": ("qwen2", dict(WIDE_NON_DIVISIBLE, **YARN)),
    "qwen2-narrow-mha-windows": ("qwen2", dict(NARROW, **WINDOW, num_key_value_heads=4, max_window_layers=1)),
    "qwen2-all-windows": ("qwen2", dict(MQA, **WINDOW, max_window_layers=0)),
    "qwen3-absent": ("qwen3", {}),
    "qwen3-wide-non-divisible": ("qwen3", dict(WIDE_NON_DIVISIBLE, rms_norm_eps=1e-2)),
    "qwen3-narrow-biased-tied": ("qwen3", dict(NARROW, attention_bias=True, tie_word_embeddings=True)),
    "qwen3-mha-windows": (
        "qwen3",
        dict(MHA, **WINDOW, num_hidden_layers=3, layer_types=MIXED),
    ),
    "smollm3-absent": ("smollm3", dict(num_hidden_layers=4)),
    "smollm3-wide-non-divisible-biased": (
        "smollm3",
        dict(WIDE_NON_DIVISIBLE, **BIASED, num_hidden_layers=3, no_rope_layers=[0, 1, 0], tie_word_embeddings=False),
    ),
    "smollm3-windows-yarn": (
        "smollm3",
        dict(NARROW, **WINDOW, **YARN, num_hidden_layers=3, no_rope_layers=[1, 0, 1], num_key_value_heads=4),
    ),
    "smollm3-all-rotated": ("smollm3", dict(MQA, no_rope_layers=[1, 1])),
    "granite-absent": ("granite", dict(attention_multiplier=0.015625, embedding_multiplier=12)),
    "granite-default-scale": ("granite", dict(attention_multiplier=0.25, num_key_value_heads=4)),
    "granite-wide-non-divisible-biased": (
        "granite",
        dict(WIDE_NON_DIVISIBLE, **BIASED, embedding_multiplier=1.7, tie_word_embeddings=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_tensors_and_configs(case):
    model_type, changes = CASES[case]
    converted = check_family(hf_config(model_type, **changes))
    assert not converted.args.head_geometry().matches_hidden or "head_dim" not in changes or changes["head_dim"] == 16


def test_every_family_here_has_cases():
    for model_type in MODEL_TYPES:
        wide = [changes for name, changes in CASES.values() if name == model_type]
        assert any(changes.get("head_dim", 16) != 16 for changes in wide)
        # transformers cannot build a Ministral without
        assert any("head_dim" not in changes for changes in wide) or model_type == "ministral"


EXPORTS = {
    **{f"plain {name}": (geometry, {}) for name, geometry in ALL.items()},
    **{
        f"{kind} {name}": (ALL[name], settings)
        for kind, settings in {
            "normed heads": dict(qk_norm_type="per_head"),
            "qkv bias, a window": dict(add_qkv_bias=True, sliding_window_width=5),
            "some windows": dict(layer_types=["sliding_attention", "full_attention"], sliding_window_width=5),
            "own scale": dict(softmax_scale=0.31, embedding_multiplier=3.0),
            "all biases": dict(use_bias_in_attn_linear=True, use_bias_in_mlp=True, no_rope_layers=[1, 0]),
        }.items()
        for name in ("wide_non_divisible", "mha", "quotient")
    },
}
CHOSEN = {
    "some": "ministral",
    "plain": "mistral",
    "normed": "qwen3",
    "qkv": "qwen2",
    "own": "granite",
    "all": "smollm3",
}


@pytest.mark.parametrize("case", EXPORTS)
def test_a_model_of_ours_is_exported(case):
    """Weights of our own making, in the family that is chosen: transformers computes the same."""
    geometry, settings = EXPORTS[case]
    plain = dict(norm="rmsnorm", activation="swiglu", use_bias_in_attn_linear=False, use_bias_in_mlp=False)
    args = tiny_args(**{**plain, **settings}, **geometry, ffn_hidden_size=46, padded_vocab_size=PADDED)
    family = choose_family(args)
    divides = geometry["hidden_size"] % geometry["num_attention_heads"] == 0
    assert family.model_type == ("llama" if case.startswith("plain") and divides else CHOSEN[case.split()[0]])

    ours = _random_weights(args)
    theirs = as_theirs(family, args, ours)
    config = written_config(family, args)
    config._attn_implementation = "eager"
    hf = AutoModelForCausalLM.from_config(config).float().eval()
    hf.load_state_dict(theirs, strict=True)
    expected = their_logits(hf, text())
    assert expected.abs().max() > 1
    assert_close(our_logits(args, ours, text()), expected, FORWARD, "logits")

    again = our_args(family, config)
    assert as_ours(family, again, theirs).keys() == ours.keys()
    for number in range(args.num_layers):
        assert again.layer_attention(number) == args.layer_attention(number)
        assert again.head_geometry(number) == args.head_geometry(number)


def _random_weights(args):
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, tensor in GPT2ModelSequential(args).state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() == 1:
            weights[name] = noise * 0.4 + (1.0 if name.endswith("scale") else 0.0)
        else:
            weights[name] = noise * 1.5 * tensor.shape[-1] ** -0.5
        if "word_embeddings" in name or "final_linear" in name:
            weights[name][VOCAB:] = 0  # an export cuts off these rows
    return weights


CHANGES = {
    "norm": ["layernorm", "scalenorm", "non_parametric_layernorm"],
    "pos_emb": ["learned", "sinusoidal", "rpe", "alibi", "none"],
    "rotary_pct": [0.5],
    "rotary_emb_base": [777, {"full_attention": 777.0}],
    "rope_scaling": [LLAMA3["rope_parameters"] | {"rope_theta": None}, dict(type="linear", factor=2)],
    "gpt_j_residual": [True],
    "use_qk_layernorm": [True],
    "qk_norm_type": ["joint", "per_head", "full_width"],
    "attn_logit_softcap": [50.0],
    "final_logit_softcap": [30.0],
    "zero_centered_gamma": [True],
    "norm_placement": ["sandwich", "post"],
    "activation": ["gelu", "relu", "geglu", "geglu_tanh", "reglu", "bilinear", "glu"],
    "use_bias_in_mlp": [True],
    "use_bias_in_attn_linear": [True],
    "add_qkv_bias": [True, False],
    "softmax_scale": [0.31],
    "embedding_multiplier": [3.0],
    "sliding_window_width": [5],
    "no_rope_layers": [[0, 1]],
    "rms_norm_epsilon": [0.01],
    "layer_types": [["sliding_attention", "full_attention"]],
}
BESIDE = {
    "layer_types": dict(sliding_window_width=5),
    "use_bias_in_attn_linear": dict(add_qkv_bias=False),
    "add_qkv_bias": dict(use_bias_in_attn_linear=False),
    "pos_emb": dict(no_rope_layers=None),
    "use_qk_layernorm": dict(qk_norm_type=None),
}
"""What must be set with a setting for it to be possible, or to act."""


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_setting_is_held_or_refused_by_name(model_type):
    """An exported config that is imported again says what was exported, or the setting's name is in the refusal."""
    family, held, refused = FAMILIES[model_type], set(), set()
    config = hf_config(model_type, head_dim=24, attention_multiplier=0.5, sliding_window=None)
    for name, values in CHANGES.items():
        for value in values:
            args = our_args(family, config, **BESIDE.get(name, {}), **{name: value})
            problems = family.refusals(args)
            if problems:
                assert any(problem.startswith(f"{name}=") for problem in problems), (name, value, problems)
                refused.add(name)
                continue
            again = our_args(family, written_config(family, args))
            if name in ("rope_scaling", "rotary_emb_base"):  # other spellings
                for number in range(2):
                    assert again.layer_attention(number) == args.layer_attention(number), (name, value)
            else:
                assert getattr(again, name) == getattr(args, name), (name, value)
            held.add(name)
    everywhere = {"rms_norm_epsilon", "rotary_emb_base", "rope_scaling", "activation"}
    assert everywhere <= held
    assert {"norm", "pos_emb", "rotary_pct", "gpt_j_residual", "norm_placement", "use_qk_layernorm"} <= refused


def test_rotary_numbers_that_differ_by_layer_type_are_refused():
    args = tiny_args(
        norm="rmsnorm",
        activation="swiglu",
        add_qkv_bias=True,
        use_bias_in_attn_linear=False,
        use_bias_in_mlp=False,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window_width=5,
        rotary_emb_base={"full_attention": 1e6, "sliding_attention": 1e4},
    )
    (problem,) = FAMILIES["qwen2"].refusals(args)
    assert problem.startswith("rotary_emb_base=") and "Qwen2ForCausalLM" in problem


def test_an_explicit_default_scale_is_no_obstacle():
    granite = FAMILIES["granite"]
    assert granite.settings(hf_config("granite", attention_multiplier=0.25))["softmax_scale"] is None
    assert granite.settings(hf_config("granite", attention_multiplier=0.26))["softmax_scale"] == 0.26
    common = dict(norm="rmsnorm", activation="swiglu", use_bias_in_attn_linear=False, use_bias_in_mlp=False)
    assert choose_family(tiny_args(**common, head_dim=24, softmax_scale=24**-0.5)).model_type == "llama"
    assert choose_family(tiny_args(**common, head_dim=24, softmax_scale=16**-0.5)).model_type == "granite"
    assert choose_family(tiny_args(**common, embedding_multiplier=1.0, no_rope_layers=[1, 1])).model_type == "llama"


TINY = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, vocab_size=VOCAB)
STYLES = {
    "plain": ("llama", dict(rope_theta=500000.0, rope_scaling=None), _rope("default", rope_theta=500000.0)),
    "theta of the class": ("smollm3", {}, _rope("default", rope_theta=2000000.0)),
    "type": (
        "llama",
        dict(rope_theta=BASE, rope_scaling={"type": "linear", "factor": 2.0}),
        _rope("linear", factor=2.0),
    ),
    "llama3": (
        "llama",
        dict(
            rope_theta=BASE,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        ),
        LLAMA3,
    ),
    "yarn": (
        "qwen2",
        dict(
            rope_theta=BASE,
            rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
            torch_dtype="bfloat16",
        ),
        dict(YARN, dtype="bfloat16"),
    ),
    "windows": (
        "qwen3",
        dict(rope_theta=BASE, **WINDOW, max_window_layers=1),
        dict(_rope("default"), **WINDOW, layer_types=["full_attention", "sliding_attention"]),
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_config_files_of_transformers_4_and_5(style):
    model_type, four, five = STYLES[style]
    settings = [
        FAMILIES[model_type].settings(read_config({"model_type": model_type, **TINY, **keys})) for keys in (four, five)
    ]
    assert settings[0] == settings[1]
    assert settings[1]["rotary_emb_base"] == five["rope_parameters"]["rope_theta"]
    assert (settings[1]["rope_scaling"] is None) == (five["rope_parameters"]["rope_type"] == "default")


def test_dynamic_scaling_starts_from_their_length():
    """Whatever original_max_position_embeddings says: their class ignores it for this type."""
    numbers = dict(factor=4.0, original_max_position_embeddings=16)
    settings = FAMILIES["llama"].settings(hf_config("llama", max_position_embeddings=8, **_rope("dynamic", **numbers)))
    assert settings["rope_scaling"]["original_max_position_embeddings"] == 8
    assert settings["max_position_embeddings"] == settings["seq_length"] == 32


def test_a_list_of_rotated_layers_may_be_too_long():
    """Theirs reads as many flags as it has layers."""
    settings = FAMILIES["smollm3"].settings(hf_config("smollm3", no_rope_layers=[0, 1, 0, 0]))
    assert settings["no_rope_layers"] == [0, 1]


REFUSED_CONFIGS = {
    "residual_multiplier": ("granite", dict(residual_multiplier=0.22)),
    "logits_scaling": ("granite", dict(logits_scaling=8.0)),
    "partial_rotary_factor": ("llama", _rope("default", partial_rotary_factor=0.5)),
    "hidden_act": ("llama", dict(hidden_act="tanh")),
    "num_local_experts": ("mixtral", {}),
    "layer_types": ("mistral", dict(layer_types=["sliding_attention", "full_attention"])),
    "sliding_window=None": ("qwen2", dict(layer_types=["sliding_attention", "full_attention"])),
    "use_sliding_window=False": ("smollm3", dict(sliding_window=7, layer_types=["sliding_attention"] * 2)),
    "chunked_attention": ("qwen3", dict(layer_types=["chunked_attention", "full_attention"])),
    "no_rope_layers": ("smollm3", dict(no_rope_layers=[1], layer_types=["full_attention"] * 2)),
}


@pytest.mark.parametrize("key", REFUSED_CONFIGS)
def test_what_no_model_here_is(key):
    model_type, changes = REFUSED_CONFIGS[key]
    with pytest.raises(ConversionError, match=key):
        FAMILIES[model_type].settings(hf_config(model_type, **changes))


def test_both_multipliers_of_granite_are_named():
    config = hf_config("granite", residual_multiplier=0.22, logits_scaling=8.0)
    with pytest.raises(ConversionError, match="(?s)residual_multiplier=0.22.*logits_scaling=8.0"):
        FAMILIES["granite"].settings(config)


def test_no_model_of_ours_is_a_mixtral():
    with pytest.raises(ConversionError, match="num_local_experts"):
        choose_family(tiny_args(norm="rmsnorm", activation="swiglu"), "mixtral")


def test_the_window_counts_the_query_itself():
    """Three tokens of window are two before the query; the last logits do not depend on older ones."""
    config = hf_config("mistral", sliding_window=3, num_hidden_layers=1)
    converted = check_family(config)
    one, other = text(), text().clone()
    other[:, -4] = (other[:, -4] + 1) % VOCAB
    seen = other.clone()
    seen[:, -3] = (seen[:, -3] + 1) % VOCAB
    logits = SimpleNamespace(
        **{
            name: our_logits(converted.args, converted.weights, tokens)[:, -1]
            for name, tokens in dict(one=one, other=other, seen=seen).items()
        }
    )
    assert torch.equal(logits.one, logits.other)
    assert not torch.allclose(logits.one, logits.seen, atol=1e-3)


def test_a_ministral_without_windows_has_a_number_for_them():
    """transformers makes the mask of every layer type, in use or not."""
    family = FAMILIES["ministral"]
    written = family.config(our_args(family, hf_config("ministral", **WIDE, layer_types=["full_attention"] * 2)), VOCAB)
    assert type(written["sliding_window"]) is int and "sliding_attention" not in written["layer_types"]
