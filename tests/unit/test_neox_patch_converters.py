"""The patch's converters: what it places, and its edits of scripts that are written otherwise too."""

import functools
import json
import sys
import types
from types import SimpleNamespace

import pytest
import torch
import yaml

from megatron.errors import ConfigError, ConversionError
from megatron.geometry import HeadGeometry, MLPGeometry
from tests.helpers import neox_patch_edits as edits
from tests.helpers.geometries import GQA_TP4, MHA_TP4, NARROW, QUOTIENT, WIDE_NON_DIVISIBLE
from tests.helpers.neox_patch_arguments import load_placed
from tests.helpers.neox_patch_converters import EXPORT, EXPORT_OTHERWISE, IMPORT, IMPORT_OTHERWISE, RAW
from tests.helpers.neox_patch_hf import FFN, Stand, fused_by_hand, hf_model, layer_files
from tools.neox_patch.changes import converters, converters_import, converters_weights
from tools.neox_patch.source import AnchorNotFound, Source

CHANGES = [*converters.CHANGES, *converters_weights.CHANGES, *converters_import.CHANGES]
LLAMA = dict(pos_emb="rotary", norm="rmsnorm", use_bias_in_attn_linear=False)


@functools.cache
def patched(path, text):
    """The text with all changes of its file."""
    return edits.patched([change for change in CHANGES if change.path == path], text)


def refusals(path, text):
    """What the changes of a file do not find."""
    source, found = Source(path, text), []
    for change in CHANGES:
        if change.path == path:
            try:
                change.edit(source)
            except AnchorNotFound as error:
                found.append(str(error))
    return found


def load_export(text, files, config, monkeypatch):
    """The patched script's `main`, with classes that stand in for transformers'."""
    module = types.ModuleType("export")
    kinds = {"LlamaConfig": "llama", "MistralConfig": "mistral", "GPTNeoXConfig": "gpt_neox"}
    vars(module).update({name: lambda kind=kind, **given: Stand(kind, **given) for name, kind in kinds.items()})
    tokenizer = types.ModuleType("megatron.tokenizer")
    tokenizer.build_tokenizer = None
    monkeypatch.setitem(sys.modules, "megatron.tokenizer", tokenizer)
    monkeypatch.setattr(
        sys.modules["megatron.head_dim.hf_export"], "qwen3_config", lambda **given: Stand("qwen3", **given)
    )
    vars(module).update(FILES=files, CONFIG=config)
    exec(text, vars(module))
    return module.main


SPELLINGS = {"as GPT-NeoX": EXPORT, "otherwise": EXPORT_OTHERWISE}
MODELS = [
    ("llama", NARROW, 1, {}),
    ("llama", MHA_TP4, 2, dict(use_bias_in_attn_linear=True)),
    ("llama", QUOTIENT, 1, {}),
    ("mistral", WIDE_NON_DIVISIBLE, 2, dict(sliding_window_width=8)),
    ("qwen3", GQA_TP4, 2, dict(qk_norm_type="per_head", use_bias_in_attn_linear=True)),
    ("qwen3", MHA_TP4, 1, dict(qk_norm_type="per_head")),
]


@pytest.fixture
def placed(monkeypatch):
    """The placed modules, as `megatron.head_dim` has them."""
    return SimpleNamespace(**{name: load_placed(monkeypatch, name) for name in ("hf_heads", "hf_export", "hf_import")})


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_export(placed, spelling, monkeypatch):
    text = patched(converters.PATH, SPELLINGS[spelling])
    for architecture, widths, tp, more in MODELS:
        geometry = HeadGeometry.from_config(**widths)
        config = {**LLAMA, **widths, **more, "ranks": tp, "model-parallel-size": tp}
        biases = config["use_bias_in_attn_linear"]
        files, expected = layer_files(geometry, tp, architecture == "qwen3", biases)
        main = load_export(text, {"in": files}, config, monkeypatch)
        hf_config, weights, precision = main(["--architecture", architecture, "--precision", "fp16"])
        assert precision == "fp16"
        assert set(weights) == set(expected)
        assert all(torch.equal(weights[name], expected[name]) for name in expected), (spelling, architecture, widths)
        assert (hf_config.head_dim, hf_config.intermediate_size) == (geometry.head_dim, FFN)
        assert getattr(hf_config, "attention_bias", biases) == biases
        if architecture == "mistral":
            assert hf_config.sliding_window == 9, "a token sees itself and 8 before it"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_export_refuses_and_leaves_nothing_out(placed, spelling, monkeypatch, tmp_path):
    text = patched(converters.PATH, SPELLINGS[spelling])
    config = {**LLAMA, **NARROW, "ranks": 1, "model-parallel-size": 1}
    files, _ = layer_files(HeadGeometry.from_config(**NARROW), 1, norms=False, biases=True)
    main = load_export(text, {"in": files}, config, monkeypatch)
    with pytest.raises(ConversionError, match=r"layer 2 has attention.dense.bias, attention.query_key_value.bias"):
        main(["--architecture", "mistral"])
    with pytest.raises(ConversionError, match="head_dim=24"):
        main(["--architecture", "neox"])
    with pytest.raises((AssertionError, SystemExit)):
        main(["--architecture", "qwen2"])
    fit, theirs = placed.hf_export.fit_to_checkpoint, Stand("mistral", **{**QUOTIENT, "head_dim": 16})
    for other in (QUOTIENT, dict(hidden_size=64, num_attention_heads=8, head_dim=8)):
        layers = [{"geometry": HeadGeometry.from_config(**other, rotary_pct=1.0).stamp()}]
        (tmp_path / "head_geometry.json").write_text(json.dumps({"layers": layers}))
        if other is QUOTIENT:
            fit(theirs, config, str(tmp_path), {})
    with pytest.raises(ConversionError, match="head_dim: 16 and 8") as refusal:
        fit(theirs, config, str(tmp_path), {})
    assert len(refusal.value.problems) == 3, "both numbers of heads, too"


def test_without_head_dim_export_is_as_before(placed, monkeypatch):
    """The small module splits groups of queries rightly, as GPT-NeoX does since 2025."""
    geometry = HeadGeometry.from_config(**QUOTIENT, num_kv_heads=2)
    config = {**LLAMA, **QUOTIENT, "num_kv_heads": 2, "ranks": 2, "model-parallel-size": 2}
    files, _ = layer_files(geometry, 2, norms=False, biases=False)
    ends = [
        load_export(text, {"in": files}, config, monkeypatch)(["--architecture", "mistral"])
        for text in (EXPORT, patched(converters.PATH, EXPORT))
    ]
    assert list(ends[0][1]) == list(ends[1][1])
    assert all(torch.equal(ends[0][1][name], ends[1][1][name]) for name in ends[0][1])
    assert ends[0][0].sliding_window == ends[1][0].sliding_window == 4096
    neox = [
        load_export(text, {"in": files}, config, monkeypatch)([]) for text in (EXPORT, patched(converters.PATH, EXPORT))
    ]
    assert vars(neox[0][0]) == vars(neox[1][0]) and list(neox[0][1]) == list(neox[1][1]) == ["norm.weight"]


def test_export_of_layer_files_in_2024(placed, monkeypatch):
    """They have no "module", for which that year's converter looks."""
    files, _ = layer_files(HeadGeometry.from_config(**NARROW), 1, norms=False, biases=False)
    config = {**LLAMA, **NARROW, "ranks": 1}
    with pytest.raises(KeyError):
        load_export(EXPORT_OTHERWISE, {"in": files}, config, monkeypatch)(["--architecture", "mistral"])
    text = patched(converters.PATH, EXPORT_OTHERWISE)
    assert load_export(text, {"in": files}, config, monkeypatch)(["--architecture", "mistral"])


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('MODEL_KEYS["mistral"] =', "OTHERS =", 'MODEL_KEYS["mistral"] = ... in the module'),
        ("def create_config", "def make_config", "def create_config"),
        ("MistralConfig(", "MixtralConfig(", "if that tells MistralConfig from LlamaConfig"),
        ("GPTNeoXConfig(**args)", "GPTNeoXConfig(hidden_size=8)", "GPTNeoXConfig(**args) in create_config"),
        ("zip(hf_keys, [q, k, v])", "zip(hf_keys, parts)", "zip(names, [q, k, v])"),
        ("# by name", "print(stacked.shape)", "a statement of its own that uses stacked: 'print(stacked.shape)'"),
        ("# in a row", "q = q + 1; k = 2 * k", "as two lines"),
        ("ARCH = ARCH[get", "names = ARCH[get", "ARCH = ARCH[mlp_naming] in def convert"),
        ('if "GQA_QKV_KEYS" in ARCH:', "if architecture:", 'if "GQA_QKV_KEYS" in ARCH'),
        ("args = parser.parse_args", "args = parse", "parse_args(...) in def main"),
        ("def load_partitions", "def load", "def load_partitions"),
    ],
)
def test_export_that_is_built_otherwise_is_refused(old, new, message):
    assert old in EXPORT
    found = refusals(converters.PATH, EXPORT.replace(old, new))
    assert any(message in error and error.startswith(converters.PATH) for error in found), found


def test_a_statement_of_ones_own_stays():
    text = patched(converters.PATH, EXPORT_OTHERWISE)
    for own in ("count = len(names) # my own", "print(count, 'parts') # mine, too", "print('config', theirs)"):
        assert text.count(own) == 1
    assert "fused" not in text and "# after it\n        elif architecture" in text


def run_import(text, model, argv, monkeypatch):
    """The patched script, run as a program; what it converted."""
    transformers = types.ModuleType("transformers")
    transformers.AutoModelForCausalLM = lambda: model
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    before = list(sys.path)
    scope = {"__name__": "__main__", "__file__": "/checkout/tools/ckpts/script.py", "ARGV": argv}
    exec(text, scope)
    assert sys.path == [*before, "/checkout"]
    sys.path[:] = before
    return scope["result"]


@pytest.mark.parametrize("text", [IMPORT, IMPORT_OTHERWISE], ids=["as GPT-NeoX", "otherwise"])
def test_import(placed, text, monkeypatch, tmp_path):
    text = patched(converters_import.PATH, text)
    cases = [
        (NARROW, 1, dict(biases=True)),
        (MHA_TP4, 2, dict(norms=True)),
        (QUOTIENT, 1, dict(head_dim=None)),
        (WIDE_NON_DIVISIBLE, 2, dict(tie_word_embeddings=True)),
    ]
    for widths, tp, options in cases:
        geometry = HeadGeometry.from_config(**widths)
        model = hf_model(geometry, **options)
        tied = ["--tied"] if options.get("tie_word_embeddings") else []
        states = run_import(text, model, ["--tp", str(tp), "--model_path", str(tmp_path), *tied], monkeypatch)
        theirs = model.state_dict()
        for part in ("weight", "bias") if options.get("biases") else ("weight",):
            parts = [theirs[f"model.layers.0.self_attn.{name}_proj.{part}"] for name in "qkv"]
            for state, shard in zip(states, fused_by_hand(parts, geometry, tp), strict=True):
                assert torch.equal(state[f"sequential.2.attention.query_key_value.{part}"], shard)
        for state in states:
            assert ("head" in state) == (not tied)
            assert ("sequential.2.attention.dense.bias" in state) == bool(options.get("biases"))
            if options.get("biases"):
                assert torch.equal(state["sequential.2.attention.dense.bias"], torch.zeros(geometry.hidden_size))
            for part in "qk" if options.get("norms") else "":
                norm = state[f"sequential.2.attention.{part}_layernorm.scale"]
                assert torch.equal(norm, theirs[f"model.layers.0.self_attn.{part}_norm.weight"])
        check_settings(yaml.safe_load((tmp_path / "neox_settings.yml").read_text()), geometry, tp, options)


def check_settings(settings, geometry, tp, options):
    names = ("hidden_size", "num_attention_heads", "num_kv_heads", "head_dim")
    assert HeadGeometry.from_config(*(settings[name] for name in names)) == geometry
    assert type(settings["head_dim"]) is int and type(settings["rotary_emb_base"]) is int
    mlp = MLPGeometry.from_config(geometry.hidden_size, True, intermediate_size=settings["intermediate_size"])
    assert mlp.ffn_hidden_size == FFN
    assert settings.get("qk_norm_type") == ("per_head" if options.get("norms") else None)
    assert settings["use_bias_in_attn_linear"] == bool(options.get("biases"))
    assert settings["no_weight_tying"] == (not options.get("tie_word_embeddings"))
    assert settings["make_vocab_size_divisible_by"] * tp == 10 and settings["rms_norm_epsilon"] == 1e-6


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("query_key_value", "qkv", "for that sets ...attention.query_key_value.weight"),
        ("torch.chunk(k, tp_ranks)", "k.chunk(tp_ranks)", "torch.chunk of q, k and v"),
        ("# for each rank", "print(k.shape)", "a statement of its own that uses k: 'print(k.shape)'"),
        ("state_dict = model.state_dict()", "state_dict = torch.load('x')", "state_dict = model.state_dict()"),
        ('"--model_path"', '"--out"', "the argument --model_path"),
        ('weights["lm_head.weight"]', "head", 'for over chunks of weights["lm_head.weight"]'),
        ("head_dim =", "width =", "head_dim = ... in def convert_model"),
    ],
)
def test_import_that_is_built_otherwise_is_refused(old, new, message):
    assert old in IMPORT
    found = refusals(converters_import.PATH, IMPORT.replace(old, new))
    assert any(message in error for error in found), found


def test_raw_files(placed):
    text = patched(converters_import.RAW_PATH, RAW)
    scope = {"__file__": "/checkout/tools/ckpts/raw.py"}
    before = list(sys.path)
    exec(text, scope)
    sys.path[:] = before
    for name in ("convert_model_pipeline", "convert_model_sequential"):
        assert scope[name]("", dict(dim=64, n_heads=4)) == 16
        assert scope[name]("", dict(dim=64, n_heads=4, n_kv_heads=2, head_dim=24)) == 24
        with pytest.raises(ConfigError, match="set head_dim"):
            scope[name]("", dict(dim=64, n_heads=6))
