"""Gemma 4's dense text model, in and out: logits as transformers', tensors and configs unchanged; what is refused."""

import json
import re

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import Gemma4Config, Gemma4ForCausalLM, Gemma4ForConditionalGeneration, Gemma4TextConfig

from megatron import costs
from megatron.convert.families import FAMILIES
from megatron.convert.importing import import_hf
from megatron.convert.rules import write_out
from megatron.convert.verify import verify
from megatron.errors import ConversionError
from tests.helpers.configs import tiny_args
from tests.helpers.convert_folders import assert_same_tensors, raw_config, run_export
from tests.helpers.convert_models import (
    PADDED,
    as_ours,
    check_family,
    differing_settings,
    function_keys,
    hf_config,
    hf_model,
    hf_tensors,
    our_args,
    our_logits,
    text,
    their_logits,
)
from tests.helpers.tolerances import FORWARD, assert_close
from tools.head_dim import from_hf

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default", "rope_theta": 300.0}
SHARE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0}
ROPE = {SLIDING: PLAIN, FULL: SHARE}
LAYERS = [SLIDING, SLIDING, FULL, SLIDING, FULL]
WIDE = dict(
    hidden_size=80,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=12,
    global_head_dim=40,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
)
"""80 % 6 != 0; a query width of 72 in the local layers and of 240 in the global ones, of which 5 pairs in 20 turn."""

CASES = {
    "wide": dict(WIDE, final_logit_softcapping=9.0),
    "published-pattern": dict(WIDE, num_hidden_layers=6, layer_types=None, sliding_window=512),
    "keys-and-values-apart-untied": dict(WIDE, attention_k_eq_v=False, tie_word_embeddings=False),
    "mqa-bias": dict(WIDE, num_global_key_value_heads=1, attention_bias=True, sliding_window=4),
    "as-many-keys": dict(WIDE, num_key_value_heads=6, num_global_key_value_heads=6, attention_bias=True),
    "narrow-linear": dict(
        WIDE,
        hidden_size=160,
        global_head_dim=20,
        rope_parameters={SLIDING: {**PLAIN, "rope_type": "linear", "factor": 3.0}, FULL: {**SHARE, "factor": 8.0}},
    ),
    "one-width": dict(
        WIDE, head_dim=24, global_head_dim=24, num_key_value_heads=2, rope_parameters={SLIDING: PLAIN, FULL: PLAIN}
    ),
    "global-only": dict(WIDE, layer_types=[FULL] * 3, num_hidden_layers=3, head_dim=40, num_key_value_heads=2),
}


def config_of(**changes) -> Gemma4TextConfig:
    """A config object; `changes` win over five layers of both types."""
    given = dict(
        num_hidden_layers=5, layer_types=LAYERS, sliding_window=7, rope_parameters=ROPE, hidden_size_per_layer_input=0
    )
    return hf_config("gemma4_text", **{**given, **changes})


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_in_and_out(changes):
    check_family(config_of(**changes))


def test_global_layers_alone_need_no_rotary_numbers_of_others():
    config = config_of(**CASES["global-only"], rope_parameters={FULL: SHARE})
    args = our_args(FAMILIES["gemma4_text"], config)
    tensors = hf_tensors(hf_model(config))
    logits = our_logits(args, as_ours(FAMILIES["gemma4_text"], args, tensors), text())
    assert_close(logits, their_logits(hf_model(config), text()), FORWARD)


def test_published_model_has_as_many_parameters():
    """Gemma-4-31B: transformers' own count of the class built on the meta device, of text tokens."""
    config = Gemma4TextConfig(
        hidden_size=5376,
        num_hidden_layers=60,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        intermediate_size=21504,
        sliding_window=1024,
        attention_k_eq_v=True,
        final_logit_softcapping=30.0,
        hidden_size_per_layer_input=0,
        use_bidirectional_attention="vision",
    )
    args = tiny_args(**{"padded_vocab_size": config.vocab_size, **FAMILIES["gemma4_text"].settings(config)})
    assert args.head_dim == [[[256] * 5 + [512], "all"]] and args.num_kv_heads == [[[16] * 5 + [4], "all"]]
    with torch.device("meta"):
        hf = Gemma4ForCausalLM(config)
    assert costs.num_parameters(args) == sum(parameter.numel() for parameter in hf.parameters()) == PARAMETERS_31B
    lines = write_out(FAMILIES["gemma4_text"].rules(args), args, config.vocab_size)
    theirs = {name: shape for line in lines for name, shape in zip(line.theirs, line.shapes, strict=True)}
    assert theirs == {name: tuple(x.shape) for name, x in hf.state_dict().items() if name != "lm_head.weight"}


PARAMETERS_31B = 30697345280

REFUSED_IN = {
    "hidden_size_per_layer_input=16": dict(hidden_size_per_layer_input=16),
    "hidden_size_per_layer_input=256": dict(hidden_size_per_layer_input=...),
    "num_kv_shared_layers=2": dict(num_kv_shared_layers=2),
    "use_double_wide_mlp=True": dict(use_double_wide_mlp=True),
    "enable_moe_block=True": dict(enable_moe_block=True, top_k_experts=1, moe_intermediate_size=8),
    "num_experts=4: mixture of experts is not built": dict(num_experts=4),
    "use_bidirectional_attention=all": dict(use_bidirectional_attention="all"),
    "per_layer_config has intermediate_size": dict(per_layer_config={"1": {"intermediate_size": 20}}),
    "none for sliding_attention, of which there are layers": dict(rope_parameters={FULL: SHARE}),
    "does not use rope_theta, rope_type beside": dict(rope_parameters=PLAIN),
    "partial_rotary_factor=0.5: a Gemma4ForCausalLM": dict(
        rope_parameters={SLIDING: {**PLAIN, "partial_rotary_factor": 0.5}, FULL: SHARE}
    ),
    "rope_type=dynamic by layer type": dict(
        rope_parameters={SLIDING: PLAIN, FULL: {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0}}
    ),
    "text_config: this model has parts beside": dict(model_type="gemma3", text_config={"head_dim": 16}),
}
"""What a config.json says, and what is said of it."""


@pytest.mark.parametrize("message", REFUSED_IN)
def test_what_cannot_be_held_is_refused_by_name(message, tmp_path):
    raw = {**config_of(**WIDE).to_dict(), **REFUSED_IN[message]}
    with open(tmp_path / "config.json", "w") as file:
        json.dump({key: value for key, value in raw.items() if value is not ...}, file)
    save_file({}, tmp_path / "model.safetensors")
    for refusing in (lambda: from_hf.yaml_text(str(tmp_path)), lambda: import_hf(str(tmp_path), str(tmp_path / "out"))):
        with pytest.raises(ConversionError, match=re.escape(message)):
            refusing()
    assert not (tmp_path / "out").exists()


def test_all_that_cannot_be_held_is_said_at_once():
    config = config_of(**WIDE, num_kv_shared_layers=2, hidden_size_per_layer_input=8)
    with pytest.raises(ConversionError) as caught:
        FAMILIES["gemma4_text"].settings(config)
    assert all(name in str(caught.value) for name in ("num_kv_shared_layers=2", "hidden_size_per_layer_input=8"))


REFUSED_OUT = {
    "softmax_scale=None": dict(softmax_scale=None),
    "v_norm=False": dict(v_norm=False),
    "layer_scalar=False": dict(layer_scalar=False),
    "zero_centered_gamma=True": dict(zero_centered_gamma=True),
    "layer_types ends with sliding_attention": dict(layer_types=[FULL] * 4 + [SLIDING], head_dim=12, num_kv_heads=3),
    "the same heads in all layers of type sliding_attention": dict(head_dim=[12, 20, 40, 12, 40]),
    "the same heads in all layers of type full_attention": dict(num_kv_heads=[3, 3, 2, 3, 1]),
    "in layers of type full_attention only": dict(shared_key_value=True),
    "heads of one width in a layer": dict(
        head_dim=[[12, 5], {"layer": 0, "groups": [[12, 4, 2], [20, 2, 1]]}], num_kv_heads=3
    ),
    "attn_logit_softcap=5.0": dict(attn_logit_softcap=5.0),
}


@pytest.mark.parametrize("message", REFUSED_OUT)
def test_what_the_class_cannot_say_is_not_exported(message):
    family = FAMILIES["gemma4_text"]
    args = our_args(family, config_of(**WIDE))
    assert family.refusals(args) == []
    (problem,) = family.refusals(args.update(**REFUSED_OUT[message]))
    assert message in problem


def test_the_yaml_of_a_config_json_is_the_model(tmp_path):
    config = config_of(**WIDE)
    config.save_pretrained(tmp_path)
    settings = yaml.safe_load(from_hf.yaml_text(str(tmp_path)))
    args = our_args(FAMILIES["gemma4_text"], config)
    assert differing_settings(tiny_args(**{**settings, "padded_vocab_size": PADDED}), args) == {}


def test_proportional_rotation_in_other_families():
    """Whole heads have it as in Gemma 4; where a part of a head is cut off, the same key means that part."""
    check_family(hf_config("qwen3", head_dim=24, rope_parameters={**SHARE, "factor": 2.0}))
    for model_type in ("phi", "gpt_neox"):
        config = hf_config(model_type, num_key_value_heads=4)
        args = our_args(FAMILIES[model_type], config, rotary_pct=1.0)
        assert FAMILIES[model_type].refusals(args) == []
        scaling = {key: SHARE[key] for key in ("rope_type", "partial_rotary_factor")}
        (problem,) = FAMILIES[model_type].refusals(args.update(rope_scaling=scaling))
        assert "rope_scaling=" in problem and "cannot have type proportional" in problem


def test_of_a_model_with_other_parts_the_language_model_is_taken(tmp_path):
    """As it is published: with an image model. What comes out is the language model by itself."""
    text_config = config_of(**CASES["wide"])
    image = dict(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    config = Gemma4Config(text_config=text_config.to_dict(), vision_config=image, audio_config=None)
    whole = Gemma4ForConditionalGeneration(config).float().eval()
    language = hf_model(text_config)
    whole.model.language_model.load_state_dict(language.model.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    language.save_pretrained(tmp_path / "language")
    notes = []
    ours = import_hf(str(tmp_path / "whole"), str(tmp_path / "ours"), progress=False, say=notes.append)
    assert any("only the language model is taken" in note and "model.embed_vision" in note for note in notes)
    assert raw_config(tmp_path / "ours" / "huggingface")["model_type"] == "gemma4_text"
    assert_same_tensors(tmp_path / "language", run_export(tmp_path / "ours", tmp_path / "back"))
    written = Gemma4TextConfig.from_dict(raw_config(tmp_path / "back"))
    assert function_keys(written) == function_keys(text_config)
    assert verify(str(tmp_path / "whole"), ours, lambda config: text()).agrees
    settings = yaml.safe_load(from_hf.yaml_text(str(tmp_path / "whole")))
    assert settings["head_dim"] == [[12, 2], [40, 1], [12, 1], [40, 1]]
