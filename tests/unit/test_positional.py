"""ALiBi and T5's relative bias: slopes, buckets, offsets, and their way into the scores."""

import math

import pytest
import torch

from megatron.model.attention import ParallelSelfAttention
from megatron.model.gpt2_model import GPT2ModelSequential
from megatron.model.positional_embeddings import (
    AliBi,
    ParallelRelativePositionBias,
    alibi_slopes,
    relative_position_bucket,
)
from tests.helpers.attention_reference import core_reference
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import GQA_TP4, WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import FORWARD, assert_close

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", (1, 2, 4, 8, 16))
def test_alibi_slopes_of_powers_of_two(heads):
    assert alibi_slopes(heads) == pytest.approx([2 ** (-8 * (i + 1) / heads) for i in range(heads)])


def test_alibi_slopes_between_powers_of_two():
    """The published rule: 12 heads take the 8 slopes of 8 heads and every other of the first 8 of 16 heads."""
    exponents = [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]
    assert alibi_slopes(12) == pytest.approx([2.0**-exponent for exponent in exponents])


@pytest.mark.parametrize("heads", (3, 5, 6, 12, 16))
def test_alibi_equals_transformers_bloom(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 9), heads, torch.float32)  # [heads, 1, t], up to a constant per row
    mine = AliBi(heads)(9, 9, 0, CPU)
    last_row = mine[:, -1:, :] - mine[:, -1:, :1]
    torch.testing.assert_close(last_row, theirs)


def test_alibi_offset_is_a_row_of_the_whole():
    whole = AliBi(6)(9, 9, 0, CPU)
    torch.testing.assert_close(AliBi(6)(3, 9, 6, CPU), whole[:, 6:])
    assert whole[2, 7, 4].item() == pytest.approx(-3 * alibi_slopes(6)[2])


def test_alibi_buffer_has_gpt_neox_name_and_does_not_follow_the_model_to_half():
    attention = ParallelSelfAttention(tiny_args(**GQA_TP4, pos_emb="alibi"))
    assert attention.state_dict()["alibi_embed.slopes"].tolist() == pytest.approx(alibi_slopes(12))
    before = attention.alibi_embed(5, 5, 0, CPU)
    assert torch.equal(attention.bfloat16().alibi_embed(5, 5, 0, CPU), before)


@pytest.mark.parametrize("buckets, farthest", [(32, 128), (16, 40), (8, 9)])
def test_buckets_equal_transformers_t5(buckets, farthest):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(300)
    theirs = T5Attention._relative_position_bucket(-distance, False, buckets, farthest)
    assert torch.equal(relative_position_bucket(distance, buckets, farthest), theirs)


def test_relative_bias_is_offset():
    args = tiny_args(**WIDE_NON_DIVISIBLE, pos_emb="rpe")
    bias = ParallelRelativePositionBias(args, 6)
    assert bias.weight.shape == (32, 6)
    whole = bias(9, 9, 0, CPU)
    assert whole[4, 8, 3].item() == pytest.approx(bias.weight[5, 4].item())
    torch.testing.assert_close(bias(2, 9, 7, CPU), whole[:, 7:])


def test_all_layers_share_one_relative_bias_scaled_by_the_root_of_their_head_dim():
    model = GPT2ModelSequential(tiny_args(**{**WIDE_NON_DIVISIBLE, "head_dim": [24, 40]}, pos_emb="rpe"))
    names = [name for name in model.state_dict() if "rpe" in name]
    assert names == ["sequential.2.attention.rpe.weight", "sequential.3.attention.rpe.weight"]
    first, second = (layer.attention for _, layer in model.local_layers()[2:4])
    assert first.rpe is second.rpe
    for attention, width in ((first, 24), (second, 40)):
        torch.testing.assert_close(attention._score_bias(9, 9, 0, 0, CPU), first.rpe(9, 9, 0, CPU) * math.sqrt(width))
    assert sum("rpe" in name for name, _ in model.named_parameters()) == 1


def test_rpe_without_the_shared_bias_is_an_error():
    with pytest.raises(ValueError, match="rpe"):
        ParallelSelfAttention(tiny_args(**WIDE_NON_DIVISIBLE, pos_emb="rpe"))


@pytest.mark.parametrize("pos_emb", ("alibi", "rpe"))
def test_the_layer_adds_its_bias_after_the_scale(pos_emb):
    args = tiny_args(**WIDE_NON_DIVISIBLE, pos_emb=pos_emb)
    shared = ParallelRelativePositionBias(args, 6) if pos_emb == "rpe" else None
    attention = ParallelSelfAttention(args, rpe=shared)
    q, k, v = (torch.randn(9, 2, heads, 24, dtype=torch.float64) for heads in (6, 2, 2))
    bias = torch.zeros(6, 9, 9, dtype=torch.float64)
    for head in range(6):
        for i in range(9):
            for j in range(i + 1):  # all distances are below 16, so each has a bucket of its own
                if shared is None:
                    bias[head, i, j] = -alibi_slopes(6)[head] * (i - j)
                else:
                    bias[head, i, j] = math.sqrt(24) * shared.weight[i - j, head]
    got = attention._attend(q.float(), k.float(), v.float(), oldest_key=0)
    assert_close(got, core_reference(q, k, v, 24**-0.5, bias=bias), FORWARD)
    chunk = attention._attend(q[5:].float(), k.float(), v.float(), oldest_key=0)
    assert_close(chunk, got[5:], FORWARD)
