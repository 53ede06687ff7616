"""Rotary positions against their definition, and against transformers' tables."""

import gc
import math

import pytest
import torch

from megatron.errors import ConfigError
from megatron.model.attention import ParallelSelfAttention
from megatron.model.rotary import _SHARED, RotaryEmbedding, rotary_frequencies, rotary_inv_freq
from megatron.neox_arguments.layer_attention import RotarySettings
from megatron.neox_arguments.rope_scaling import parse_rope_scaling
from tests.helpers.attention_reference import rotary_reference
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, MQA, NARROW, WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import FORWARD, assert_close


@pytest.mark.parametrize("head_dim, rotary_ndims", [(24, 24), (24, 12), (10, 4), (12, 2), (16, 16)])
@pytest.mark.parametrize("offset", (0, 5))
@pytest.mark.parametrize("base", (10000, 500000))
def test_equals_the_definition(head_dim, rotary_ndims, offset, base):
    x = torch.randn(7, 2, 3, head_dim, dtype=torch.float64)
    rotary = RotaryEmbedding(RotarySettings(rotary_ndims, base, 16))
    got = rotary(x.float(), offset)
    assert_close(got, rotary_reference(x, rotary_ndims, base, offset), FORWARD)
    assert torch.equal(got[..., rotary_ndims:], x.float()[..., rotary_ndims:])


def test_frequencies_run_over_the_rotated_dimensions():
    """Not over head_dim: with a partial rotation the two differ in every frequency but the first."""
    frequencies = rotary_inv_freq(12, 10000.0)
    assert frequencies.dtype == torch.float32 and frequencies.shape == (6,)
    for i, frequency in enumerate(frequencies.tolist()):
        assert frequency == pytest.approx(10000 ** (-i / 6), rel=1e-6)


def test_equals_transformers():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=80, num_attention_heads=5, head_dim=24, max_position_embeddings=64)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(64)[None])
    q, k = torch.randn(64, 2, 5, 24), torch.randn(64, 2, 5, 24)
    wanted = apply_rotary_pos_emb(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), cos, sin)
    rotary = RotaryEmbedding(RotarySettings(24, 10000, 64))
    for mine, theirs in zip((rotary(q), rotary(k)), wanted, strict=True):
        assert_close(mine, theirs.permute(2, 0, 1, 3), FORWARD)


def test_tables_are_fp32_whatever_the_precision():
    """At position 8191 a frequency rounded to bfloat16 would be off by many radians."""
    rotary = RotaryEmbedding(RotarySettings(64, 10000, 8192), buffer_dtype=torch.bfloat16).bfloat16()
    one = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    one[..., :32] = 1.0
    got = rotary(one, offset=8191)[0, 0, 0].double()
    for i in range(32):
        angle = 8191 * 10000 ** (-i / 32)
        assert got[i].item() == pytest.approx(math.cos(angle), abs=1e-2)
        assert got[i + 32].item() == pytest.approx(math.sin(angle), abs=1e-2)


def test_positions_beyond_seq_length_are_refused_by_name():
    rotary = RotaryEmbedding(RotarySettings(8, 10000, 16))
    rotary(torch.zeros(16, 1, 1, 8))
    for tokens, offset in ((17, 0), (1, 16), (4, 13)):
        with pytest.raises(ConfigError, match="seq_length=16.*reach 17"):
            rotary(torch.zeros(tokens, 1, 1, 8), offset)


def test_tables_made_in_inference_serve_training():
    rotary = RotaryEmbedding(RotarySettings(8, 10000, 16))
    with torch.inference_mode():
        rotary(torch.zeros(4, 1, 1, 8))
    x = torch.randn(4, 1, 1, 8, requires_grad=True)
    rotary(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x)  # a rotation keeps the length


@pytest.mark.parametrize("name", ALL)
def test_the_layer_rotates_the_width_of_its_geometry(name):
    args = tiny_args(**ALL[name], rotary_pct=0.4 if name == "gqa_tp4" else 0.5, rotary_emb_base=5000)
    attention = ParallelSelfAttention(args)
    geometry = args.head_geometry()
    assert attention.rotary_ndims == int(geometry.head_dim * args.rotary_pct) > 0
    q = torch.randn(7, 1, geometry.num_attention_heads, geometry.head_dim, dtype=torch.float64)
    k = torch.randn(7, 1, geometry.num_kv_heads, geometry.head_dim, dtype=torch.float64)
    for got, x in zip(attention._rotate(q.float(), k.float(), 3), (q, k), strict=True):
        assert_close(got, rotary_reference(x, attention.rotary_ndims, 5000, 3), FORWARD)


def test_the_frequencies_are_in_the_checkpoint_only_when_asked_for():
    plain = ParallelSelfAttention(tiny_args(**MQA))
    saving = ParallelSelfAttention(tiny_args(**MQA, rotary_save_freqs_buffer=True))
    added = set(saving.state_dict()) - set(plain.state_dict())
    assert added == {"rotary_emb.inv_freq"}
    torch.testing.assert_close(saving.rotary_emb.inv_freq, rotary_inv_freq(12, 10000))


def test_other_positions_rotate_nothing():
    attention = ParallelSelfAttention(tiny_args(**WIDE_NON_DIVISIBLE, pos_emb="none"))
    q = torch.randn(3, 1, 6, 24)
    assert attention._rotate(q, q, 0)[0] is q


# Scaled frequencies. The original length is 48, texts have up to 160 tokens.

ORIGINAL, LONGEST, BASE = 48, 160, 5000.0
FACTORS = dict(short_factor=[1 + i / 9 for i in range(20)], long_factor=[1.5 + i * i / 7 for i in range(20)])
SCALINGS = {
    "linear": dict(factor=3.0),
    "dynamic": dict(factor=2.5, original_max_position_embeddings=ORIGINAL),
    "llama3": dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL),
    "yarn": dict(factor=5.0, beta_fast=8.0, beta_slow=0.5, original_max_position_embeddings=ORIGINAL),
    "longrope": dict(**FACTORS, original_max_position_embeddings=ORIGINAL),
}


def scaled(rope_type, rotary_ndims):
    """Settings with LONGEST positions."""
    numbers = {
        key: each[: rotary_ndims // 2] if isinstance(each, list) else each for key, each in SCALINGS[rope_type].items()
    }
    return RotarySettings(
        rotary_ndims, BASE, LONGEST, parse_rope_scaling({"rope_type": rope_type, **numbers}, rotary_ndims, LONGEST)
    )


def theirs(rope_type, head_dim, rotary_ndims, offset, end, dtype=torch.float32):
    """transformers' (cos, sin) [end - offset, r] of a new LlamaRotaryEmbedding; 90 / 5 = 18 is not head_dim."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    numbers = {
        key: each[: rotary_ndims // 2] if isinstance(each, list) else each for key, each in SCALINGS[rope_type].items()
    }
    if rope_type == "dynamic":
        del numbers["original_max_position_embeddings"]  # there max_position_embeddings is the original length
    rope = {"rope_type": rope_type, **numbers, "rope_theta": BASE, "partial_rotary_factor": rotary_ndims / head_dim}
    config = LlamaConfig(
        hidden_size=90,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=head_dim,
        max_position_embeddings=ORIGINAL if rope_type == "dynamic" else LONGEST,
        rope_parameters=rope,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), torch.arange(offset, end)[None])
    return cos[0], sin[0]


def tables(rotary, head_dim, rotary_ndims, offset, end, dtype=torch.float32):
    """(cos, sin) [end - offset, r/2] as the module applies them: it turns the pairs (1, 0)."""
    x = torch.zeros(end - offset, 1, 1, head_dim, dtype=dtype)
    x[..., : rotary_ndims // 2] = 1
    x[..., rotary_ndims:] = 7
    turned = rotary(x, offset)[:, 0, 0]
    assert torch.all(turned[:, rotary_ndims:] == 7)
    return turned[:, : rotary_ndims // 2], turned[:, rotary_ndims // 2 : rotary_ndims]


@pytest.mark.parametrize("rope_type", SCALINGS)
@pytest.mark.parametrize("head_dim, rotary_ndims", [(40, 40), (40, 10), (24, 12)])
def test_scaled_tables_are_those_of_transformers(rope_type, head_dim, rotary_ndims):
    """Whole texts and single tokens, within, at and beyond the original length, in no order of lengths."""
    rotary = RotaryEmbedding(scaled(rope_type, rotary_ndims))
    spans = [(0, LONGEST), (0, 20), (0, ORIGINAL), (0, ORIGINAL + 1), (0, 100), (ORIGINAL - 1, ORIGINAL), (7, 30)]
    spans += [(ORIGINAL + 1, ORIGINAL + 2), (120, 121), (70, LONGEST), (0, LONGEST)]
    for offset, end in spans:
        mine = tables(rotary, head_dim, rotary_ndims, offset, end)
        wanted = theirs(rope_type, head_dim, rotary_ndims, offset, end)
        for name, table, whole in zip(("cos", "sin"), mine, wanted, strict=True):
            difference = (table - whole[:, : rotary_ndims // 2]).abs().max().item()
            assert difference <= 1e-6, f"{name} of positions {offset} to {end}: {difference}"


@pytest.mark.parametrize("rope_type", ("yarn", "longrope"))
def test_the_attention_factor_is_applied_before_rounding(rope_type):
    """In half precision too: the tables are rounded once, at the end."""
    rotary = RotaryEmbedding(scaled(rope_type, 40))
    assert rotary_frequencies(rotary.settings)[1] > 1.1
    mine = tables(rotary, 40, 40, 0, LONGEST, torch.bfloat16)
    for table, whole in zip(mine, theirs(rope_type, 40, 40, 0, LONGEST, torch.bfloat16), strict=True):
        assert torch.equal(table, whole[:, :20])


def test_scaled_positions_beyond_seq_length_are_refused_too():
    with pytest.raises(ConfigError, match=f"seq_length={LONGEST}.*reach {LONGEST + 1}"):
        RotaryEmbedding(scaled("linear", 8))(torch.zeros(LONGEST + 1, 1, 1, 8))


def test_longrope_refuses_to_change_the_frequencies_under_a_cache():
    rotary = RotaryEmbedding(scaled("longrope", 8))
    for offset, tokens in ((ORIGINAL, 1), (1, ORIGINAL), (40, 100)):
        with pytest.raises(ConfigError, match=f"beyond {ORIGINAL} tokens.*holds {offset} keys.*recompute=True"):
            rotary(torch.zeros(tokens, 1, 1, 8), offset)
    for offset, tokens in ((0, ORIGINAL), (0, ORIGINAL + 1), (ORIGINAL - 1, 1), (ORIGINAL + 1, 1)):
        rotary(torch.zeros(tokens, 1, 1, 8), offset)


def gemma3_args(**overrides):
    """Gemma 3's pattern and numbers at a head of 24; hidden / heads is 40."""
    return tiny_args(
        **NARROW,
        num_layers=6,
        layer_types=[[["sliding_attention"] * 5 + ["full_attention"], "all"]],
        sliding_window_width=7,
        rotary_emb_base={"full_attention": 1000000, "sliding_attention": 10000},
        rope_scaling={"full_attention": {"rope_type": "linear", "factor": 8.0}},
        **overrides,
    )


def test_bases_and_scalings_by_layer_type_are_gemma3s():
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    args = gemma3_args()
    config = Gemma3TextConfig(
        hidden_size=160,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        num_hidden_layers=6,
        layer_types=args.layer_types,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )
    embedding = Gemma3RotaryEmbedding(config)
    for number, layer_type in enumerate(config.layer_types):
        rotary = ParallelSelfAttention(args, number).rotary_emb
        wanted = embedding(torch.zeros(1), torch.arange(32)[None], layer_type)
        for table, whole in zip(tables(rotary, 24, 24, 0, 32), wanted, strict=True):
            assert (table - whole[0, :, :12]).abs().max() <= 1e-6, (number, layer_type)


def test_layers_with_equal_settings_share_their_tables():
    gc.collect()
    before = len(_SHARED)
    args = gemma3_args(rotary_save_freqs_buffer=True)
    layers = [ParallelSelfAttention(args, number) for number in range(6)]
    assert len(_SHARED) == before + 2  # full and sliding
    x = torch.zeros(5, 1, 6, 24)
    first, second, *_, full = (
        set(map(torch.Tensor.data_ptr, layer.rotary_emb._tables.rows(0, 5, x.device, x.dtype))) for layer in layers
    )
    assert first == second and not first & full
    for layer in layers:  # each has its buffer all the same
        inv_freq = layer.state_dict()["rotary_emb.inv_freq"]
        torch.testing.assert_close(inv_freq, rotary_frequencies(layer.function.rotary)[0])
    del layers, layer
    gc.collect()
    assert len(_SHARED) == before  # nothing is kept for models that are gone
