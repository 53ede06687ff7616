"""What the patch places for the converters of a checkout, by itself."""

import ast
from types import SimpleNamespace

import pytest
import torch

from megatron.errors import ConversionError
from megatron.geometry import HeadGeometry
from tests.helpers.attention_reference import split_reference
from tests.helpers.geometries import ALL, NARROW, QUOTIENT, TP2, WIDE_NON_DIVISIBLE
from tests.helpers.neox_patch_arguments import load_placed
from tests.helpers.neox_patch_hf import fused_by_hand, hf_model, qkv
from tools.neox_patch.change import FILES

LLAMA = dict(pos_emb="rotary", norm="rmsnorm", use_bias_in_attn_linear=False)


@pytest.fixture
def placed(monkeypatch):
    """The placed modules, as `megatron.head_dim` has them."""
    return SimpleNamespace(**{name: load_placed(monkeypatch, name) for name in ("hf_heads", "hf_export", "hf_import")})


@pytest.mark.parametrize("name", ALL)
def test_split_and_merge(placed, name):
    geometry = HeadGeometry.from_config(**ALL[name])
    for tp in (1, 2) if name in TP2 else (1,):
        for columns in (None, 0):
            parts = qkv(geometry, columns)
            shards = fused_by_hand(parts, geometry, tp)
            merged = placed.hf_heads.merge_qkv(*parts, geometry, tp)
            assert all(torch.equal(*pair) for pair in zip(merged, shards, strict=True))
            found = placed.hf_heads.split_qkv(shards, geometry)
            assert all(torch.equal(*pair) for pair in zip(found, parts, strict=True))
    mixed = placed.hf_heads.merge_qkv(*parts, geometry, 1)[0]  # biases: as a row of activations
    n, m, d = geometry.num_attention_heads, geometry.num_kv_heads, geometry.head_dim
    for found, part in zip(split_reference(mixed[None, None], n, m, d), parts, strict=True):
        assert torch.equal(found.flatten(), part)


def test_split_and_merge_refuse_other_shapes(placed):
    geometry = HeadGeometry.from_config(**NARROW)
    q, k, v = qkv(geometry)
    with pytest.raises(ConversionError, match="96 rows on a rank.*head_dim=24.*make 192"):
        placed.hf_heads.split_qkv([q], geometry)
    with pytest.raises(ConversionError, match="q, k and v have 96, 96 and 48 rows.*make 96, 48 and 48"):
        placed.hf_heads.merge_qkv(q, q, v, geometry, 1)
    with pytest.raises(ConversionError, match="num_kv_heads=2 does not divide by model_parallel_size=4"):
        placed.hf_heads.merge_qkv(q, k, v, geometry, 4)


@pytest.mark.parametrize("name", ["hf_heads", "hf_export", "hf_import"])
def test_placed_files_are_for_python_3_8(name):
    ast.parse((FILES / f"megatron/head_dim/{name}.py").read_text(), feature_version=(3, 8))


REFUSED = {
    "neox": ("neox", dict(NARROW), ["head_dim=24", "llama, mistral or qwen3"]),
    "neox norms": ("neox", dict(QUOTIENT, use_qk_layernorm=True), ["qk_norm_type=joint"]),
    "scale": ("mistral", dict(NARROW, softmax_scale=0.5), ["softmax_scale=0.5"]),
    "scale as text": ("mistral", dict(NARROW, softmax_scale="1e-1"), ["softmax_scale=1e-1"]),
    "llama": ("llama", dict(WIDE_NON_DIVISIBLE), ["hidden_size=80", "num_attention_heads=6", "mistral"]),
    "no head_dim": ("qwen3", dict(hidden_size=80, num_attention_heads=6, qk_norm_type="per_head"), ["set head_dim"]),
    "joint": ("qwen3", dict(NARROW, qk_norm_type="joint"), ["qk_norm_type=joint", "per_head"]),
    "layernorm": ("qwen3", dict(NARROW, qk_norm_type="per_head", norm="layernorm"), ["norm=layernorm"]),
    "window": ("qwen3", dict(NARROW, qk_norm_type="per_head", sliding_window_width=9), ["sliding_window_width=9"]),
    "all at once": (
        "llama",
        dict(NARROW, qk_norm_type="per_head", rotary_pct=0.5, pos_emb="none", gpt_j_residual=True, softmax_scale=1.0),
        ["qk_norm_type=per_head", "rotary_pct=0.5", "pos_emb=none", "gpt_j_residual=True", "softmax_scale=1.0"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_class_cannot_say_is_refused(placed, name):
    architecture, settings, parts = REFUSED[name]
    dashed = {key.replace("_", "-"): value for key, value in {**LLAMA, **settings}.items()}
    with pytest.raises(ConversionError) as refusal:
        placed.hf_export.attention_settings(dashed, architecture)
    assert len(refusal.value.problems) == (5 if name == "all at once" else 1), refusal.value
    assert all(part in str(refusal.value) for part in parts), refusal.value


def test_what_a_class_can_say(placed):
    settings = placed.hf_export.attention_settings
    assert settings({**LLAMA, **QUOTIENT}, "neox") == {}
    assert settings({**LLAMA, **QUOTIENT, "head-dim": 16}, "neox") == {}, "as without it"
    assert settings({"hidden-size": 80, "num-attention-heads": 6}, "neox") == {}, "not looked at, as before"
    assert settings({**LLAMA, **QUOTIENT}, "llama") == {"head_dim": 16}
    assert settings({**LLAMA, **NARROW, "softmax_scale": 24**-0.5}, "mistral") == {"head_dim": 24}
    norms = {**LLAMA, **WIDE_NON_DIVISIBLE, "qk_norm_type": "per_head"}
    assert settings(norms, "qwen3") == {"head_dim": 24, "attention_bias": False}
    del norms["use_bias_in_attn_linear"]
    assert settings(norms, "qwen3") == {"head_dim": 24, "attention_bias": True}


@pytest.mark.parametrize(
    "options, tied, parts",
    [
        (dict(hidden_act="gelu_pytorch_tanh"), False, ["hidden_act=gelu_pytorch_tanh"]),
        ({}, True, ["--tied"]),
        (dict(vocab_size=11, intermediate_size=23), False, ["vocab_size=11", "intermediate_size=23"]),
        (dict(extra="model.layers.0.pre_feedforward_layernorm.weight"), False, ["pre_feedforward_layernorm.weight"]),
    ],
)
def test_import_of_what_cannot_be_held_is_refused(placed, options, tied, parts):
    model = hf_model(HeadGeometry.from_config(**NARROW), **options)
    if "extra" in options:
        model._weights[options["extra"]] = torch.zeros(1)
    with pytest.raises(ConversionError) as refusal:
        placed.hf_import.weights_to_import(model, 2, tied)
    assert len(refusal.value.problems) == len(parts), refusal.value
    assert all(part in str(refusal.value) for part in parts), refusal.value


def test_import_warns_and_minds_windows(placed, capsys):
    geometry = HeadGeometry.from_config(**NARROW)
    model = hf_model(geometry, model_type="granite", rope_parameters=dict(rope_type="llama3", rope_theta=7.0))
    placed.hf_import.weights_to_import(model, 1, False)
    printed = capsys.readouterr().out
    assert "model_type=granite" in printed and "rope_type=llama3" in printed
    assert placed.hf_import.neox_settings(model.config, model.state_dict(), 1)["rotary_emb_base"] == 7
    for more, expected in (({}, 8), (dict(use_sliding_window=False), None), (dict(use_sliding_window=True), 8)):
        model = hf_model(geometry, sliding_window=9, **more)
        settings = placed.hf_import.neox_settings(model.config, model.state_dict(), 1)
        assert settings.get("sliding_window_width") == expected
    with pytest.raises(ConversionError, match="rope_theta=0.5"):
        placed.hf_import.neox_settings(hf_model(geometry, rope_theta=0.5).config, model.state_dict(), 1)
