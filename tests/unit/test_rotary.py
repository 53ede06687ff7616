"""Rotary positions against their definition, and against transformers' tables."""

import math

import pytest
import torch

from megatron.errors import ConfigError
from megatron.model.attention import ParallelSelfAttention
from megatron.model.rotary import RotaryEmbedding, rotary_inv_freq
from megatron.neox_arguments.layer_attention import RotarySettings
from tests.helpers.attention_reference import rotary_reference
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, MQA, WIDE_NON_DIVISIBLE
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
