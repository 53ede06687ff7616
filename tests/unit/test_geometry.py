"""The integers: semantics of head_dim, shards, stamps, and GPT-NeoX's MLP widths stated a second time."""

import dataclasses
import itertools

import pytest

from megatron.errors import ConfigError
from megatron.geometry import HeadGeometry, MLPGeometry, QKVLayout, padded_vocab_size
from tests.helpers.geometries import ALL, GQA_TP4, MHA_TP4, MQA, TP2, TP4, WIDE_NON_DIVISIBLE


@pytest.mark.parametrize("name", ALL)
def test_widths(name):
    numbers = ALL[name]
    geometry = HeadGeometry.from_config(**numbers)
    n = numbers["num_attention_heads"]
    m = numbers.get("num_kv_heads") or n
    d = numbers.get("head_dim") or numbers["hidden_size"] // n
    assert (geometry.query_hidden_size, geometry.kv_hidden_size) == (n * d, m * d)
    assert geometry.qkv_hidden_size == (n + m + m) * d
    assert geometry.queries_per_kv * m == n and geometry.is_gqa == (m != n)
    assert geometry.matches_hidden == (n * d == numbers["hidden_size"])
    assert geometry.default_softmax_scale == pytest.approx(1 / d**0.5, rel=1e-15)
    assert geometry.qkv_layout is (QKVLayout.PER_HEAD if m == n else QKVLayout.PER_RANK)
    assert geometry.rotary_ndims == 0


def test_the_test_geometries_cannot_pass_by_coincidence():
    """Some are wider and some narrower than hidden, some do not divide, and no kv width equals another width."""
    built = [HeadGeometry.from_config(**numbers) for name, numbers in ALL.items() if name != "quotient"]
    assert any(g.query_hidden_size > g.hidden_size for g in built)
    assert any(g.query_hidden_size < g.hidden_size for g in built)
    assert any(g.hidden_size % g.num_attention_heads for g in built)
    for g in built:
        assert len({g.hidden_size, g.query_hidden_size, g.qkv_hidden_size}) == 3
        assert not g.is_gqa or g.kv_hidden_size not in (g.hidden_size, g.query_hidden_size)


@pytest.mark.parametrize("kv_heads", (None, 1, 2, 4))
def test_absent_null_and_the_quotient_are_the_same(kv_heads):
    built = {HeadGeometry.from_config(64, 4, kv_heads, head_dim, 0.25) for head_dim in (None, 16)}
    assert len(built) == 1
    assert HeadGeometry.from_config(64, 4, rotary_pct=0.25) == HeadGeometry(64, 4, 4, 16, 4)


def test_a_positive_head_dim_needs_no_division():
    assert HeadGeometry.from_config(80, 6, head_dim=24).query_hidden_size == 144


def test_absent_head_dim_must_divide():
    with pytest.raises(ConfigError, match="hidden_size=80 .*num_attention_heads=6.*set head_dim"):
        HeadGeometry.from_config(80, 6)


@pytest.mark.parametrize("value", (0, -1, True, False, 64.0, "64", [64]))
@pytest.mark.parametrize("key", ("head_dim", "hidden_size", "num_attention_heads", "num_kv_heads"))
def test_widths_are_positive_whole_numbers(key, value):
    numbers = dict(hidden_size=64, num_attention_heads=4, num_kv_heads=2, head_dim=16)
    with pytest.raises(ConfigError) as raised:
        HeadGeometry.from_config(**{**numbers, key: value})
    assert f"{key}={value!r}" in str(raised.value) and "whole number" in str(raised.value)


def test_several_problems_are_reported_together():
    with pytest.raises(ConfigError) as raised:
        HeadGeometry.from_config(64, 0, -1, "x")
    assert len(raised.value.problems) == 3
    with pytest.raises(ConfigError) as raised:
        HeadGeometry.from_config(80, 6, 4)
    assert len(raised.value.problems) == 2
    with pytest.raises(ConfigError) as raised:
        HeadGeometry.from_config(80, 6, 4, 15, 1.0)
    assert len(raised.value.problems) == 2


@pytest.mark.parametrize("head_dim, rotary_pct, ndims", [(24, 1, 24), (24, 0.5, 12), (10, 0.4, 4), (128, 0.25, 32)])
def test_rotary_width(head_dim, rotary_pct, ndims):
    assert HeadGeometry.from_config(80, 6, 2, head_dim, rotary_pct).rotary_ndims == ndims


@pytest.mark.parametrize("head_dim, rotary_pct", [(24, 0.3), (15, 1.0), (24, 0.01), (24, 0), (24, 1.5), (24, -0.5)])
def test_odd_zero_and_too_wide_rotary_is_refused(head_dim, rotary_pct):
    with pytest.raises(ConfigError, match=f"rotary_pct={rotary_pct} of head_dim={head_dim}"):
        HeadGeometry.from_config(80, 6, 2, head_dim, rotary_pct)


@pytest.mark.parametrize("name, ranks", [(name, 2) for name in TP2] + [(name, 4) for name in TP4])
def test_shares_add_up(name, ranks):
    whole = HeadGeometry.from_config(**ALL[name])
    share = whole.shard(ranks)
    for total in ("query_hidden_size", "num_attention_heads"):
        assert getattr(share, total) * ranks == getattr(whole, total), total
    for same in ("hidden_size", "head_dim", "rotary_ndims"):
        assert getattr(share, same) == getattr(whole, same), same
    if whole.kv_replicas(ranks) > 1:
        return
    for total in ("kv_hidden_size", "qkv_hidden_size", "num_kv_heads"):
        assert getattr(share, total) * ranks == getattr(whole, total), total
    for same in ("queries_per_kv", "is_gqa", "qkv_layout"):
        assert getattr(share, same) == getattr(whole, same), same
    assert whole.shard(1) == whole and not whole.shard_problems(ranks)


def test_one_query_head_per_rank_is_still_grouped():
    """The share keeps the whole model's layout: 4 heads over 2 kv heads are not MHA, whatever one rank holds."""
    whole = HeadGeometry.from_config(64, 4, 2)
    assert whole.qkv_layout is whole.shard(2).qkv_layout is QKVLayout.PER_RANK


@pytest.mark.parametrize(
    "numbers, ranks, named",
    [
        (WIDE_NON_DIVISIBLE, 4, ["num_attention_heads=6", "model_parallel_size=4"]),
        (MHA_TP4, 3, ["num_attention_heads=4", "model_parallel_size=3", "num_kv_heads=4"]),
        (GQA_TP4, 6, ["num_kv_heads=4", "model_parallel_size=6"]),
        (dict(hidden_size=88, num_attention_heads=12, num_kv_heads=6), 4, ["num_kv_heads=6", "model_parallel_size=4"]),
    ],
)
def test_heads_that_do_not_split_are_named(numbers, ranks, named):
    geometry = HeadGeometry.from_config(**{"head_dim": 10, **numbers})
    for refused in (geometry.shard, geometry.kv_replicas):
        with pytest.raises(ConfigError) as raised:
            refused(ranks)
        for text in named:
            assert text in str(raised.value)
    assert ("num_attention_heads" in str(raised.value)) == bool(geometry.num_attention_heads % ranks)


@pytest.mark.parametrize(
    "heads, kv_heads, ranks, own, replicas",
    [
        (12, 4, 4, 1, 1), (12, 4, 2, 2, 1), (12, 4, 12, 1, 3), (12, 2, 4, 1, 2), (12, 1, 6, 1, 6), (12, 3, 6, 1, 2),
        (12, 12, 4, 3, 1), (12, 12, 12, 1, 1),
    ],
)  # fmt: skip
def test_ranks_share_kv_heads_when_there_are_more_of_them(heads, kv_heads, ranks, own, replicas):
    whole = HeadGeometry.from_config(88, heads, kv_heads, 10)
    share = whole.shard(ranks)
    assert (share.num_kv_heads, whole.kv_replicas(ranks)) == (own, replicas)
    assert share.num_kv_heads * ranks == whole.num_kv_heads * replicas
    assert share.qkv_hidden_size == 10 * (heads // ranks + 2 * own)
    # The query heads of a rank are served by its own kv heads: `own` of them from rank * own // replicas.
    for rank in range(ranks):
        served = {head // whole.queries_per_kv for head in range(rank * heads // ranks, (rank + 1) * heads // ranks)}
        first = rank * own // replicas
        assert served == set(range(first, first + own))


@pytest.mark.parametrize("name", ALL)
def test_stamp_round_trip(name):
    geometry = HeadGeometry.from_config(**ALL[name], rotary_pct=1.0)
    stamp = geometry.stamp()
    assert HeadGeometry.from_stamp(stamp) == geometry
    assert all(type(value) is int for value in stamp.values()), "the stamp must survive JSON"


def test_stamp_tells_equal_shapes_apart():
    eight, four = HeadGeometry.from_config(128, 8), HeadGeometry.from_config(128, 4)
    assert eight.query_hidden_size == four.query_hidden_size and eight.qkv_hidden_size == four.qkv_hidden_size
    assert eight.stamp() != four.stamp()
    assert eight.differences(four) == ["num_attention_heads: 8 and 4", "num_kv_heads: 8 and 4", "head_dim: 16 and 32"]
    assert eight.differences(eight) == []


def test_foreign_stamps_are_refused():
    stamp = HeadGeometry.from_config(**GQA_TP4).stamp()
    for broken in (
        {**stamp, "version": 99},
        {**stamp, "extra": 1},
        {key: value for key, value in stamp.items() if key != "head_dim"},
        {},
        None,
        "text",
    ):
        with pytest.raises(ValueError, match="geometry stamp"):
            HeadGeometry.from_stamp(broken)


def test_geometry_is_frozen_and_hashable():
    geometry = HeadGeometry.from_config(**MQA)
    assert geometry in {HeadGeometry.from_config(**MQA)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.head_dim = 1


def _neox_mlp_widths(hidden, gated, intermediate, factor, multiple):
    """GPT-NeoX's rule as facts state it: (rows of linear1, columns of linear2)."""
    before = intermediate if intermediate else int(factor * hidden) if factor else 4 * hidden
    up = lambda number, step: number if number % step == 0 else number + step - number % step  # noqa: E731
    if not gated:
        return up(before, 2 * multiple), up(before, multiple)
    gated_width = int(before * 2 / 3)
    return up(gated_width, 2 * multiple), up(gated_width // 2, multiple)


def test_mlp_widths_equal_gpt_neox_wherever_it_works():
    """Where its two roundings agree. Elsewhere GPT-NeoX crashes at the first forward."""
    hiddens, intermediates, factors, multiples = (64, 80, 88, 100), (None, 96, 288, 290), (None, 3.5), (1, 16, 32)
    compared = 0
    for hidden, intermediate, factor, multiple in itertools.product(hiddens, intermediates, factors, multiples):
        if intermediate is not None and factor is not None:
            continue
        for gated in (False, True):
            rows, columns = _neox_mlp_widths(hidden, gated, intermediate, factor, multiple)
            if rows != columns * (2 if gated else 1):
                continue
            geometry = MLPGeometry.from_config(hidden, gated, None, intermediate, factor, multiple)
            assert (geometry.linear1_width, geometry.ffn_hidden_size) == (rows, columns)
            compared += 1
    assert compared > 40


@pytest.mark.parametrize(
    "hidden, intermediate, multiple, branch",
    [(4096, 32768, 256, 11008), (64, 288, 32, 96), (4096, 14336, 1, 4778), (64, 200, 1, 66), (64, 290, 32, 96)],
)
def test_known_gated_widths(hidden, intermediate, multiple, branch):
    """Llama-7B's 11008, a golden model's 96, what mistral/7B.yml gives, and two on which GPT-NeoX crashes."""
    geometry = MLPGeometry.from_config(hidden, True, intermediate_size=intermediate, mlp_multiple_of=multiple)
    assert (geometry.ffn_hidden_size, geometry.linear1_width) == (branch, 2 * branch)


def test_ffn_hidden_size_is_exact_and_alone():
    assert MLPGeometry.from_config(64, True, ffn_hidden_size=97, mlp_multiple_of=1).linear1_width == 194
    with pytest.raises(ConfigError, match="ffn_hidden_size=96.*intermediate_size=288"):
        MLPGeometry.from_config(64, True, ffn_hidden_size=96, intermediate_size=288)
    with pytest.raises(ConfigError, match="ffn_hidden_size=96.*expansion_factor=4"):
        MLPGeometry.from_config(64, True, ffn_hidden_size=96, expansion_factor=4)


def test_mlp_shares():
    geometry = MLPGeometry.from_config(64, True, ffn_hidden_size=96)
    assert geometry.shard(4).ffn_hidden_size == 24 and geometry.shard(4).hidden_size == 64
    with pytest.raises(ConfigError, match="96 does not divide by model_parallel_size=5"):
        geometry.shard(5)


@pytest.mark.parametrize(
    "vocab, multiple, ranks", [(50257, 128, 1), (50257, 128, 8), (512, 128, 4), (1, 1, 3), (300, 7, 2)]
)
def test_padded_vocabulary_is_the_smallest_that_fits(vocab, multiple, ranks):
    padded = padded_vocab_size(vocab, multiple, ranks)
    assert [size for size in range(vocab, padded + 1) if size % (multiple * ranks) == 0] == [padded]
