"""Gemma 1 to 3, OLMo 2, Phi and GPT-NeoX, in and out: logits as transformers', tensors and configs unchanged."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron.convert.exporting import export_hf
from megatron.convert.families import FAMILIES
from megatron.convert.families.gemma import query_pre_attn_scalar
from megatron.convert.importing import import_hf
from megatron.convert.rules import write_out
from megatron.errors import ConversionError
from tests.golden import cases
from tests.helpers import convert_models
from tests.helpers.configs import tiny_args
from tests.helpers.convert_models import VOCAB, check_family, hf_config, hf_model, text, their_logits
from tests.helpers.tolerances import FORWARD, assert_close

WIDE = dict(hidden_size=80, num_attention_heads=6, head_dim=24)
"""80 % 6 != 0"""
WIDE_DIVISIBLE = dict(hidden_size=78, num_attention_heads=6, head_dim=20)
NARROW = dict(hidden_size=160, head_dim=24)
SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 5000.0}
BY_TYPE = {"full_attention": SCALED, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
CAPS = dict(attn_logit_softcapping=1.5, final_logit_softcapping=4.0, sliding_window=7)
PARTIAL = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}

CASES = {
    "gemma-class-default": ("gemma", {}),
    "gemma-legacy-gelu-mha": ("gemma", dict(hidden_act="gelu", num_key_value_heads=4, head_dim=16)),
    "gemma-wide-mqa-untied-bias": (
        "gemma",
        dict(WIDE, num_key_value_heads=1, tie_word_embeddings=False, attention_bias=True),
    ),
    "gemma2-wide": ("gemma2", dict(**WIDE_DIVISIBLE, **CAPS, query_pre_attn_scalar=5, num_hidden_layers=3)),
    "gemma2-narrow-uncapped": (
        "gemma2",
        dict(NARROW, attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False),
    ),
    "gemma2-equal-no-window": ("gemma2", dict(head_dim=16, layer_types=["full_attention"] * 2, rope_parameters=YARN)),
    "gemma3-wide-mqa": (
        "gemma3_text",
        dict(**WIDE_DIVISIBLE, num_key_value_heads=1, sliding_window=7, num_hidden_layers=7, rope_parameters=BY_TYPE),
    ),
    "gemma3-narrow-all-windows": (
        "gemma3_text",
        dict(NARROW, sliding_window=5, query_pre_attn_scalar=13, final_logit_softcapping=4.0, attention_bias=True),
    ),
    "olmo2-absent": ("olmo2", dict(rope_parameters=SCALED, tie_word_embeddings=True)),
    "olmo2-wide-mqa-bias": ("olmo2", dict(WIDE, num_key_value_heads=1, attention_bias=True)),
    "olmo2-narrow-mha": ("olmo2", dict(NARROW, num_key_value_heads=4)),
    "phi-absent": ("phi", {}),
    "phi-wide-mqa-tied": ("phi", dict(WIDE, num_key_value_heads=1, tie_word_embeddings=True, hidden_act="relu")),
    "phi-norms-mha": ("phi", dict(qk_layernorm=True, num_key_value_heads=4, rope_parameters=PARTIAL)),
    "neox-pythia": ("gpt_neox", dict(layer_norm_eps=1e-2)),
    "neox-20b": ("gpt_neox", dict(hidden_act="gelu_fast", rope_parameters=dict(PARTIAL, partial_rotary_factor=0.5))),
    "neox-sequential-tied": ("gpt_neox", dict(use_parallel_residual=False, tie_word_embeddings=True)),
    "neox-no-bias-mish": (
        "gpt_neox",
        dict(attention_bias=False, hidden_act="mish", rope_parameters=dict(YARN, partial_rotary_factor=1.0)),
    ),
}


def _config(model_type, **changes):
    """Without num_key_value_heads for a class that has none."""
    config = hf_config(model_type, **changes)
    if model_type == "gpt_neox":
        del config.num_key_value_heads
    return config


def _file_tensors(hf):
    """By the names in files: transformers 5 calls GPT-NeoX's embed_out otherwise in memory."""
    tensors = {name: parameter.detach() for name, parameter in hf.named_parameters()}
    if hf.config.model_type == "gpt_neox" and "lm_head.weight" in tensors:
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    return tensors


def _held(config, zero_centered=False):
    hf = hf_model(config, zero_centered)
    if config.model_type == "phi" and config.tie_word_embeddings:
        hf.lm_head.bias.data.zero_()
    return hf


@pytest.mark.parametrize("model_type, changes", CASES.values(), ids=CASES)
def test_in_and_out(model_type, changes, monkeypatch):
    monkeypatch.setattr(convert_models, "hf_tensors", _file_tensors)
    monkeypatch.setattr(convert_models, "hf_model", _held)
    check_family(_config(model_type, **changes), zero_centered=model_type.startswith("gemma"))


@pytest.mark.parametrize("model_type", ("gpt_neox", "phi", "olmo2", "gemma", "gemma2", "gemma3_text"))
def test_names_and_shapes_are_those_of_saved_files(model_type, tmp_path):
    """Independently of the helper: what save_pretrained writes."""
    config = _config(model_type)
    hf_model(config).save_pretrained(tmp_path)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    args = convert_models.our_args(FAMILIES[model_type], config)
    lines = write_out(FAMILIES[model_type].rules(args), args, VOCAB)
    assert {name: shape for line in lines for name, shape in zip(line.theirs, line.shapes, strict=True)} == saved


PUBLISHED = {
    "Gemma-2B": ("gemma", 2506172416, (2048, 18, 8, 1, 16384, 256000), {}),
    "Gemma-7B": ("gemma", 8537680896, (3072, 28, 16, 16, 24576, 256000), {}),
    "Gemma-2-27B": ("gemma2", 27227128320, (4608, 46, 32, 16, 36864, 256000), dict(head_dim=128)),
    "Gemma-3-1B": ("gemma3_text", 999885952, (1152, 26, 4, 1, 6912, 262144), {}),
    "Gemma-3-27B": ("gemma3_text", 27009346304, (5376, 62, 32, 16, 21504, 262208), dict(head_dim=128)),
    "OLMo-2-7B": ("olmo2", 7298617344, (4096, 32, 32, 32, 11008, 100352), {}),
    "OLMo-2-32B": ("olmo2", 32234279936, (5120, 64, 40, 8, 27648, 100352), {}),
    "Phi-2": ("phi", 2779683840, (2560, 32, 32, 32, 10240, 51200), dict(partial_rotary_factor=0.4)),
    "Pythia-1b": ("gpt_neox", 1011781632, (2048, 16, 8, None, 8192, 50304), {}),
    "GPT-NeoX-20B": ("gpt_neox", 20554567680, (6144, 44, 64, None, 24576, 50432), {}),
}
"""Parameters of published models, and hidden size, layers, heads, key heads, MLP width, vocabulary; head_dim where it
is not the class's default."""
SIZES = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size".split()


@pytest.mark.parametrize("model_type, parameters, sizes, more", PUBLISHED.values(), ids=PUBLISHED)
def test_published_models_have_as_many_parameters(model_type, parameters, sizes, more):
    given = {key: size for key, size in zip(SIZES, sizes, strict=True) if size is not None}
    config, family = CONFIG_MAPPING[model_type](**given, **more), FAMILIES[model_type]
    args = tiny_args(**{"padded_vocab_size": config.vocab_size, **family.settings(config)})
    lines = write_out(family.rules(args), args, config.vocab_size)
    assert sum(math.prod(shape) for line in lines for shape in line.shapes) == parameters
    assert family.refusals(args) == []


def test_attention_scales_are_carried_exactly():
    """144, 168, 224 and 256 are Gemma 2's and 3's."""
    for scalar in range(1, 2000):
        args = SimpleNamespace(attention_scale=lambda scalar=scalar: scalar**-0.5)
        assert query_pre_attn_scalar(args) == scalar
    config = hf_config("gemma2", query_pre_attn_scalar=224)
    assert FAMILIES["gemma2"].settings(config)["softmax_scale"] == 224**-0.5
    assert FAMILIES["gemma2"].settings(hf_config("gemma2"))["softmax_scale"] is None  # head_dim's


V4 = {
    "gemma": (
        dict(hidden_act="gelu", hidden_activation=None, rope_theta=500.0),
        dict(rope_parameters={"rope_theta": 500.0}),
        500.0,
    ),
    "gemma2": (
        dict(rope_theta=500.0, hidden_act="gelu_pytorch_tanh", cache_implementation="hybrid"),
        dict(rope_parameters={"rope_theta": 500.0, "rope_type": "default"}),
        500.0,
    ),
    "gemma3_text": (
        dict(
            rope_theta=500.0,
            rope_local_base_freq=300.0,
            rope_scaling={"factor": 8.0, "rope_type": "linear"},
            sliding_window_pattern=2,
        ),
        dict(
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            layer_types=["sliding_attention", "full_attention"],
        ),
        {"full_attention": 500.0, "sliding_attention": 300.0},
    ),
    "olmo2": (dict(rope_theta=500.0, rope_scaling=None), dict(rope_parameters={"rope_theta": 500.0}), 500.0),
    "phi": (
        dict(rope_theta=500.0, partial_rotary_factor=0.25),
        dict(rope_parameters=dict(PARTIAL, rope_theta=500.0)),
        500.0,
    ),
    "gpt_neox": (
        dict(rotary_emb_base=500, rope_theta=500, rotary_pct=0.25),
        dict(rope_parameters=dict(PARTIAL, rope_theta=500.0)),
        500,
    ),
}
"""Keys of config.json as transformers 4 wrote it, as 5 does, and the rotary base."""


@pytest.mark.parametrize("model_type", V4)
def test_configs_of_transformers_4_and_5(model_type):
    older, newer, base = V4[model_type]
    left = ("rope_parameters", "layer_types")
    plain = {key: value for key, value in _config(model_type).to_dict().items() if key not in left}
    settings = [
        FAMILIES[model_type].settings(CONFIG_MAPPING[model_type].from_dict({**plain, **x})) for x in (older, newer)
    ]
    assert settings[0] == settings[1] and settings[0]["rotary_emb_base"] == base


def test_a_bias_of_phis_tied_output_layer_is_zero_or_refused():
    config = _config("phi", tie_word_embeddings=True)
    hf, family = _held(config), FAMILIES["phi"]
    theirs = _file_tensors(hf)
    args = convert_models.our_args(family, config)
    convert_models.as_ours(family, args, theirs)
    theirs["lm_head.bias"][3] = 0.25
    with pytest.raises(ConversionError, match="lm_head.bias is not zero .*0.25"):
        convert_models.as_ours(family, args, theirs)


@pytest.mark.parametrize("tp", (1, 2))
def test_gpt_neox_own_checkpoint_is_the_same_model_in_transformers(tp, tmp_path):
    """Its files, exported and loaded by transformers: the logits that GPT-NeoX computed.

    At two ranks the copies of dense and linear2 biases differ, and it is their sum that acts.
    """
    case = "case1_pythia_mha"
    cases.write_checkpoint(case, tp, tmp_path)
    config = str(cases.DATA / case / "config.yml")
    out = export_hf(str(tmp_path), str(tmp_path / "hf"), config_files=[config], vocab_size=512, progress=False)
    hf, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert type(hf).__name__ == "GPTNeoXForCausalLM" and not any(report.values()), report
    tokens, _ = cases.tokens_and_labels(case)
    assert_close(their_logits(hf, tokens)[:, ::4], cases.expected(case, tp)[0], FORWARD, "logits")


BUFFERS = {
    "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 32, 32, dtype=torch.bool),
    "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
    "gpt_neox.layers.1.attention.rotary_emb.inv_freq": torch.ones(2),
}
"""In files of older versions of transformers."""


@pytest.mark.parametrize(
    "case", ("neox-pythia", "phi-norms-mha", "phi-wide-mqa-tied", "gemma3-wide-mqa", "olmo2-absent")
)
def test_through_folders_on_two_ranks(case, tmp_path):
    """Files in, layer files of two ranks, files out: bit-equal, of the same class, loaded without complaint."""
    model_type, changes = CASES[case]
    hf = _held(_config(model_type, **changes), model_type.startswith("gemma"))
    hf.save_pretrained(tmp_path / "hf")
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    if model_type == "gpt_neox":
        save_file({**saved, **BUFFERS}, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    layout = dict(model_parallel_size=2, pipe_parallel_size=1, progress=False)
    checkpoint = import_hf(str(tmp_path / "hf"), str(tmp_path / "neox"), **layout)
    out = export_hf(checkpoint, str(tmp_path / "back"), progress=False)
    back = load_file(os.path.join(out, "model.safetensors"))
    assert back.keys() == saved.keys() and all(torch.equal(back[name], saved[name]) for name in saved)
    again, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert type(again) is type(hf) and not any(report.values()), report
    assert_close(their_logits(again, text()), their_logits(hf, text()), FORWARD, "logits")
