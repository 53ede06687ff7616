"""Faults that other frameworks had with head_dim in conversion, configs, rotary positions and scales.

Each test is a kind of fault, each case one that was met; the ids are those of the list that the cases were collected
in. Numbers of published models are their own, else the geometry is the case's in small.
"""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.convert.choose import choose_family
from megatron.convert.exporting import export_hf
from megatron.convert.families import FAMILIES
from megatron.convert.families.config_file import config_problems, read_config
from megatron.convert.importing import import_hf
from megatron.convert.rules import write_out
from megatron.errors import ConfigError, ConversionError
from megatron.model.gpt2_model import GPT2ModelSequential
from megatron.model.rotary import rotary_frequencies, rotate
from megatron.text_generation.runner import InferenceRunner
from tests.helpers.configs import tiny_args
from tests.helpers.convert_models import (
    PADDED,
    TOKENS,
    VOCAB,
    check_family,
    function_keys,
    hf_config,
    hf_model,
    hf_tensors,
    our_args,
    text,
)

QWEN3 = dict(vocab_size=151936, num_key_value_heads=8)
PUBLISHED = {
    "BL-001 BL-003 Qwen3-0.6B": (
        "qwen3",
        dict(QWEN3, num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, intermediate_size=3072),
        (2048, 1024, 596_049_920),
    ),
    "BL-003 Qwen3-1.7B": (
        "qwen3",
        dict(QWEN3, num_hidden_layers=28, hidden_size=2048, num_attention_heads=16, intermediate_size=6144),
        (2048, 1024, 1_720_574_976),
    ),
    "BL-003 BL-114 Qwen3-4B": (
        "qwen3",
        dict(QWEN3, num_hidden_layers=36, hidden_size=2560, num_attention_heads=32, intermediate_size=9728),
        (4096, 1024, 4_022_468_096),
    ),
    "BL-003 Qwen3-8B": (
        "qwen3",
        dict(QWEN3, num_hidden_layers=36, hidden_size=4096, num_attention_heads=32, intermediate_size=12288),
        (4096, 1024, 8_190_735_360),
    ),
    "BL-003 Qwen3-14B": (
        "qwen3",
        dict(QWEN3, num_hidden_layers=40, hidden_size=5120, num_attention_heads=40, intermediate_size=17408),
        (5120, 1024, 14_768_307_200),
    ),
    "BL-003 BL-078 BL-085 Qwen3-32B": (
        "qwen3",
        dict(QWEN3, num_hidden_layers=64, hidden_size=5120, num_attention_heads=64, intermediate_size=25600),
        (8192, 1024, 32_762_123_264),
    ),
    "BL-032 Mistral-7B": ("mistral", dict(sliding_window=None, rms_norm_eps=1e-5), (4096, 1024, 7_241_732_096)),
    "BL-048 BL-075 Mistral-Nemo": (
        "mistral",
        dict(hidden_size=5120, num_hidden_layers=40, head_dim=128, vocab_size=131072, sliding_window=None),
        (4096, 1024, 12_247_782_400),
    ),
    "BL-072 OLMo-2-32B": (
        "olmo2",
        dict(
            hidden_size=5120,
            num_hidden_layers=64,
            num_attention_heads=40,
            num_key_value_heads=8,
            intermediate_size=27648,
            vocab_size=100352,
            head_dim=128,
        ),
        (5120, 1024, 32_234_279_936),
    ),
    "BL-112 Gemma-7B": (
        "gemma",
        dict(
            hidden_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=16,
            intermediate_size=24576,
            vocab_size=256000,
        ),
        (4096, 4096, 8_537_680_896),
    ),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_tensors_of_published_models(model):
    """[n·d, h], [m·d, h], [h, n·d], and all parameters together; ours are as many."""
    model_type, keys, (q_width, kv_width, count) = PUBLISHED[model]
    raw = {"model_type": model_type, "tie_word_embeddings": count < 5e9 or model_type == "gemma", **keys}
    config, family = read_config(raw), FAMILIES[model_type]
    args = our_args(family, config, padded_vocab_size=config.vocab_size, seq_length=32)
    lines = write_out(family.rules(args), args, config.vocab_size)
    theirs = {name: shape for line in lines for name, shape in zip(line.theirs, line.shapes, strict=True)}
    prefix, hidden = "model.layers.0.self_attn.", config.hidden_size
    assert [theirs[f"{prefix}{x}_proj.weight"] for x in "qkvo"] == [
        (q_width, hidden),
        (kv_width, hidden),
        (kv_width, hidden),
        (hidden, q_width),
    ]
    if model_type == "olmo2":
        assert theirs[f"{prefix}q_norm.weight"] == (q_width,) and theirs[f"{prefix}k_norm.weight"] == (kv_width,)
    assert sum(map(math.prod, theirs.values())) == count
    fused = next(line for line in lines if line.ours.endswith("query_key_value.weight"))
    whole = fused.operation.merge([torch.empty(shape, device="meta") for shape in fused.shapes], fused.widths)
    assert whole.shape == (q_width + 2 * kv_width, hidden)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
ROUND_TRIPS = {
    "BL-004 grouped queries, a large epsilon": ("llama", dict(rms_norm_eps=1e-2, num_attention_heads=8)),
    "BL-010 BL-077 wide, 80 % 6": (
        "mistral",
        dict(hidden_size=80, num_attention_heads=6, head_dim=24, sliding_window=None),
    ),
    "BL-079 narrow, 68 % 6": (
        "mistral",
        dict(hidden_size=68, num_attention_heads=6, head_dim=8, sliding_window=None),
    ),
    "BL-048 BL-075 Nemo in small": ("mistral", dict(hidden_size=80, head_dim=16, sliding_window=None)),
    "BL-081 BL-087 Llama 3 with head_dim": ("llama", dict(head_dim=22, rope_parameters=LLAMA3)),
    "BL-085 BL-114 Qwen3-32B in small": ("qwen3", dict(hidden_size=80, num_attention_heads=8, head_dim=16)),
    "BL-114 Qwen2": ("qwen2", dict(hidden_size=56, head_dim=24, tie_word_embeddings=True)),
}


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_through_files_at_two_ranks(case, tmp_path):
    """Imported for two tensor-parallel ranks and exported: every tensor and key is what it was, and it loads."""
    model_type, changes = ROUND_TRIPS[case]
    config = hf_config(model_type, **changes)
    hf = hf_model(config)
    source, imported, exported = (str(tmp_path / name) for name in ("source", "imported", "exported"))
    hf.save_pretrained(source)
    import_hf(source, imported, model_parallel_size=2, progress=False)
    export_hf(imported, exported, progress=False)
    back, loading = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(loading.values()), loading
    theirs, again = hf_tensors(hf), hf_tensors(back)
    assert again.keys() == theirs.keys() and all(torch.equal(again[name], theirs[name]) for name in theirs)
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    width = changes.get("head_dim") or config.hidden_size // config.num_attention_heads
    assert type(written["head_dim"]) is int and written["head_dim"] == width
    # BL-083: what the source said, to the key.
    assert function_keys(back.config) == {**function_keys(config), "head_dim": written["head_dim"]}


def test_greedy_text_with_the_cache():
    """BL-048 BL-061: after an import, 20 tokens chosen as transformers chooses them."""
    config = hf_config("mistral", hidden_size=80, head_dim=24, sliding_window=7, max_position_embeddings=64)
    converted, hf, prompt = check_family(config), hf_model(config), text()[:, :6]
    with torch.no_grad():
        mask = torch.ones_like(prompt)
        expected = hf.generate(prompt, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
    model = GPT2ModelSequential(converted.args)
    model.load_state_dict(converted.weights)
    runner = InferenceRunner(converted.args, model)
    runner.start(batch_size=2, max_tokens=26)
    tokens, fed = prompt, 0
    while tokens.shape[1] < 26:
        positions = torch.arange(fed, tokens.shape[1]).expand(2, -1)
        logits = runner.next_token_logits(tokens[:, fed:], positions)
        fed = tokens.shape[1]
        tokens = torch.cat([tokens, logits[:, :VOCAB].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(tokens, expected)


SMALL = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
HEAD_DIMS = {
    "BL-013 absent": ("llama", dict(SMALL), 16),
    "BL-028 null, Mistral": ("mistral", dict(SMALL, head_dim=None), 16),
    "BL-028 null, Llama": ("llama", dict(SMALL, head_dim=None), 16),
    "BL-028 null, Qwen2": ("qwen2", dict(SMALL, head_dim=None), 16),
    "BL-062 absent, Qwen3": ("qwen3", dict(SMALL), 128),
    "BL-062 null, Qwen3": ("qwen3", dict(SMALL, head_dim=None), 128),
    "BL-062 BL-133 absent, Gemma": ("gemma", dict(SMALL, hidden_size=8), 256),
    "BL-062 absent, Gemma 2": ("gemma2", dict(SMALL), 256),
    "BL-015 BL-065 a Llama that transformers refuses": (
        "llama",
        dict(hidden_size=56, num_attention_heads=3, num_key_value_heads=1, head_dim=16),
        16,
    ),
}


@pytest.mark.parametrize("case", HEAD_DIMS)
def test_head_dim_is_the_class_s(case):
    model_type, keys, width = HEAD_DIMS[case]
    config = read_config({"model_type": model_type, "num_hidden_layers": 2, **keys})
    args = our_args(FAMILIES[model_type], config, seq_length=32)
    assert args.head_geometry().head_dim == width
    assert args.head_geometry().num_attention_heads == keys["num_attention_heads"]
    exported = choose_family(args)
    assert exported.config(args, VOCAB)["head_dim"] == width
    assert exported.model_type == (
        "mistral" if keys["hidden_size"] == 56 else model_type if width > 16 else exported.model_type
    )


@pytest.mark.parametrize("value", (0, -1, "128", 128.0, True))
def test_head_dim_of_the_wrong_kind(value):
    """[config]: named, with its value."""
    with pytest.raises(ConversionError, match=f"head_dim={value!r} must be a positive whole number"):
        read_config({"model_type": "llama", "head_dim": value, **SMALL})


IMPOSSIBLE = {
    "BL-008 experts": (dict(model_type="mixtral", head_dim=32, num_local_experts=8), ["num_local_experts=8"]),
    "BL-008 experts under another name": (dict(model_type="llama", num_experts=4), ["num_experts=4"]),
    "BL-049 parts": (dict(model_type="gemma3", text_config=dict(head_dim=32)), ["text_config", "model_type=gemma3"]),
    "BL-083 MLA": (
        dict(model_type="deepseek_v3", kv_lora_rank=512, n_routed_experts=256, v_head_dim=128),
        ["model_type=deepseek_v3", "kv_lora_rank=512", "n_routed_experts=256", "v_head_dim=128"],
    ),
    "BL-129 widths by layer": (
        dict(model_type="gemma3_text", head_dim=256, global_head_dim=512),
        ["global_head_dim=512"],
    ),
    "BL-129 a list of head counts": (dict(model_type="llama", num_attention_heads=[12, 16]), ["num_attention_heads"]),
    "BL-037 two rotary widths": (
        dict(model_type="phi", head_dim=128, partial_rotary_factor=0.5, rotary_dim=32),
        ["rotary_dim=32 and partial_rotary_factor=0.5, which rotates 64"],
    ),
    "quantised": (dict(model_type="llama", quantization_config=dict(bits=4)), ["quantization_config"]),
    "no kind": ({}, ["model_type is not in config.json"]),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_be_imported_is_named(case):
    keys, named = IMPOSSIBLE[case]
    raw = {**SMALL, **keys}
    problems = config_problems(raw)
    assert len(problems) == len(named), problems
    for name in named:
        assert any(problem.startswith(name) for problem in problems), (name, problems)
    with pytest.raises(ConversionError, match=named[-1].split(" ")[0]):
        read_config(raw)


def test_two_rotary_widths_that_agree_are_no_problem():
    keys = dict(model_type="phi", head_dim=128, partial_rotary_factor=0.5, rotary_dim=64)
    assert config_problems({**SMALL, **keys}) == []


OLD = dict(norm="layernorm", activation="gelu", bias_gelu_fusion=False, gpt_j_residual=True)


def test_a_class_without_head_dim_is_refused():
    """BL-011: GPTNeoXForCausalLM would ignore an explicit width that is not the quotient."""
    assert choose_family(tiny_args(**OLD), "gpt_neox").model_type == "gpt_neox"
    with pytest.raises(ConversionError, match="head_dim=24"):
        choose_family(tiny_args(**OLD, head_dim=24), "gpt_neox")


ODD = {
    "BL-018 head_dim": dict(hidden_size=64, num_attention_heads=8, head_dim=65),
    "BL-018 quotient": dict(hidden_size=520, num_attention_heads=8),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_widths_end_at_the_config(case):
    """With the number: by transformers' class, or by ours."""
    with pytest.raises((ConfigError, ConversionError), match="65"):
        our_args(FAMILIES["llama"], read_config({"model_type": "llama", "num_hidden_layers": 2, **ODD[case]}))


PARTIAL = {
    "BL-020 half of 8": ("phi", dict(num_attention_heads=8, partial_rotary_factor=0.5), 4),
    "BL-020 a quarter of 8": ("gpt_neox", dict(num_attention_heads=8, rotary_pct=0.25), 2),
    "BL-052 BL-131 64 of 256": ("phi", dict(head_dim=256, partial_rotary_factor=0.25), 64),
    "BL-062 the class's half": ("phi", dict(head_dim=128), 64),
    "all of it": ("qwen3", dict(head_dim=24, num_key_value_heads=2), 24),
}


@pytest.mark.parametrize("case", PARTIAL)
def test_rotated_dimensions(case):
    """As many frequencies as pairs, their exponents over the rotated dimensions, the rest of a head untouched; every
    layer has the same (BL-038, BL-039)."""
    model_type, keys, rotated = PARTIAL[case]
    raw = {"model_type": model_type, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, **keys}
    args = our_args(FAMILIES[model_type], read_config(raw), seq_length=32)
    assert len({args.layer_attention(number).rotary for number in range(3)}) == 1
    inv_freq, factor = rotary_frequencies(args.layer_attention(2).rotary)
    assert len(inv_freq) == rotated // 2 and factor == 1.0
    base = float(args.rotary_emb_base)
    if rotated > 2:
        assert inv_freq[1].item() == pytest.approx(base ** (-2 / rotated), rel=1e-6)
    width = args.head_geometry().head_dim
    x = torch.randn(2, 1, 1, width, generator=torch.Generator().manual_seed(0))
    angles = torch.tensor([[0.0], [1.0]]).view(2, 1, 1, 1) * inv_freq
    turned = rotate(x, angles.cos(), angles.sin())
    assert torch.equal(turned[..., rotated:], x[..., rotated:])
    assert torch.equal(turned[0], x[0]) and not torch.equal(turned[1, ..., :rotated], x[1, ..., :rotated])


SCALES = {
    "BL-026 hidden 3584, heads 16": ("gemma", dict(hidden_size=56, head_dim=64), 64**-0.5),
    "BL-067 Gemma-2-27B, a scalar that is the quotient": (
        "gemma2",
        dict(hidden_size=72, head_dim=16, query_pre_attn_scalar=18),
        18**-0.5,
    ),
    "BL-068 Gemma-3-27B": ("gemma3_text", dict(hidden_size=84, head_dim=16, query_pre_attn_scalar=21), 21**-0.5),
    "BL-069 Gemma-2-2B": ("gemma2", dict(hidden_size=72, head_dim=64, query_pre_attn_scalar=64), 1 / 8),
    "BL-067 Granite": ("granite", dict(head_dim=24, attention_multiplier=0.015625), 0.015625),
    "BL-070 not a power of two": ("llama", dict(head_dim=84), 84**-0.5),
}


@pytest.mark.parametrize("case", SCALES)
def test_the_scale_is_the_declared_one(case):
    """Else head_dim^-0.5, and never that of the quotient; transformers' logits agree."""
    model_type, keys, scale = SCALES[case]
    converted = check_family(hf_config(model_type, **keys), zero_centered=model_type.startswith("gemma"))
    assert converted.args.attention_scale() == pytest.approx(scale, rel=1e-12)
    assert not converted.args.head_geometry().matches_hidden


def test_a_scale_is_never_dropped():
    """BL-067: families that cannot say it refuse it by name."""
    common = dict(norm="rmsnorm", activation="swiglu", use_bias_in_attn_linear=False, use_bias_in_mlp=False)
    args = tiny_args(**common, softmax_scale=0.31, padded_vocab_size=PADDED, seq_length=TOKENS)
    for name in ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "olmo2", "phi", "gpt_neox"):
        with pytest.raises(ConversionError, match=r"--architecture granite can hold it(?s:.*)softmax_scale=0\.31"):
            choose_family(args, name)
