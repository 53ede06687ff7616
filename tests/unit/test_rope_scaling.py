"""rope_scaling against transformers' own functions, and what is refused."""

import pytest
import torch

from megatron.errors import ConfigError
from megatron.model.rotary import rotary_frequencies
from megatron.neox_arguments.layer_attention import RotarySettings
from megatron.neox_arguments.rope_scaling import RopeScaling, parse_rope_scaling
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import GQA_TP4, NARROW

LLAMA3 = dict(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
YARN = dict(factor=4.0, original_max_position_embeddings=32768)
DEEPSEEK = dict(factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1)
PHI3 = dict(
    short_factor=[1 + i / 100 for i in range(48)],
    long_factor=[1 + i * i / 40 for i in range(48)],
    original_max_position_embeddings=4096,
)
GEMMA3 = dict(factor=8.0)

REAL = [  # type, numbers, base, head_dim, rotary_pct, max_position_embeddings
    ("linear", GEMMA3, 1e6, 256, 1.0, 131072),
    ("linear", dict(factor=2.5), 10000, 80, 0.4, 4096),
    ("llama3", LLAMA3, 500000, 128, 1.0, 131072),
    ("llama3", {**LLAMA3, "factor": 32.0, "high_freq_factor": 16}, 500000, 64, 0.75, 131072),
    ("llama3", {key: LLAMA3[key] for key in LLAMA3 if "original" not in key}, 500000, 128, 1.0, 8192),
    ("yarn", YARN, 1e6, 128, 1.0, 131072),
    ("yarn", {**YARN, "attention_factor": 1.25}, 1e6, 128, 0.25, 131072),
    ("yarn", {**YARN, "factor": None}, 1e6, 128, 1.0, 65536),
    ("yarn", {**DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 0.5}, 10000, 64, 1.0, 163840),
    ("yarn", {**DEEPSEEK, "mscale": 0.707}, 10000, 64, 1.0, 163840),
    ("yarn", dict(factor=32.0, truncate=False, original_max_position_embeddings=4096), 150000, 64, 1.0, 131072),
    ("yarn", dict(factor=2, beta_fast=4, beta_slow=4.0, truncate=False), 10000, 40, 0.5, 4096),
    ("yarn", dict(factor=1.0), 10000, 32, 1.0, 16),
    ("yarn", dict(factor=2.0, original_max_position_embeddings=65536), 100, 64, 1.0, 131072),
    ("longrope", PHI3, 10000, 96, 1.0, 131072),
    ("longrope", {**PHI3, "factor": 16.0}, 10000, 128, 0.75, 131072),
    ("longrope", {**PHI3, "attention_factor": 1.5}, 250000, 96, 1.0, 131072),
    ("longrope", {**PHI3, "original_max_position_embeddings": 131072}, 10000, 96, 1.0, 131072),
    ("dynamic", dict(factor=4.0), 10000, 128, 1.0, 4096),
    ("dynamic", dict(factor=2), 500000, 96, 0.5, 2048),
]


def theirs(rope_type, numbers, base, head_dim, rotary_pct, max_positions, length=None):
    """transformers' (frequencies, attention factor). hidden / heads is not head_dim."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": rope_type, **numbers, "rope_theta": base, "partial_rotary_factor": rotary_pct}
    config = LlamaConfig(
        hidden_size=90,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=rope,
    )
    return ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=length)


@pytest.mark.parametrize("case", REAL, ids=lambda case: f"{case[0]}-{case[3]}-{case[5]}")
def test_frequencies_are_those_of_transformers(case):
    rope_type, numbers, base, head_dim, rotary_pct, max_positions = case
    ndims = int(head_dim * rotary_pct)
    mapping = {"rope_type": rope_type, **numbers, "rope_theta": base, "partial_rotary_factor": rotary_pct}
    scaling = parse_rope_scaling(mapping, ndims, max_positions, base=base, rotary_pct=rotary_pct)
    original = numbers.get("original_max_position_embeddings", max_positions)
    lengths = {None, 1, original, original + 1, 4 * original} if rope_type in ("dynamic", "longrope") else {None}
    for length in lengths:
        mine, factor = rotary_frequencies(RotarySettings(ndims, base, original, scaling), length)
        wanted, wanted_factor = theirs(*case, length=length)
        assert mine.dtype == torch.float32 and mine.shape == (ndims // 2,)
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=0)
        assert factor == pytest.approx(wanted_factor, rel=1e-12)


@pytest.mark.parametrize("head_dim, share, factor", [(512, 0.25, 1.0), (24, 0.7, 8.0), (10, 1.0, 1.0), (22, 0.1, 2.5)])
def test_proportional_turns_a_share_of_the_pairs_of_a_whole_head(head_dim, share, factor):
    """Gemma 4's global layers; its first case. int(share x head_dim) can be odd: half of it is rounded down."""
    numbers = dict(rope_type="proportional", partial_rotary_factor=share, factor=factor)
    scaling = parse_rope_scaling(numbers, head_dim, 64, base=1e6, rotary_pct=1.0)
    mine, attention_factor = rotary_frequencies(RotarySettings(head_dim, 1e6, 64, scaling))
    wanted, _ = theirs("proportional", dict(factor=factor), 1e6, head_dim, share, 64)
    torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=0)
    assert attention_factor == 1.0 and (mine > 0).sum() == int(head_dim * share) // 2


def test_dynamic_begins_at_a_length_of_its_own():
    """transformers' max_position_embeddings is the original length of dynamic; here it is the bound of seq_length."""
    scaling = parse_rope_scaling(dict(rope_type="dynamic", factor=4, original_max_position_embeddings=64), 24, 512)
    for length in (10, 64, 65, 512):
        mine, _ = rotary_frequencies(RotarySettings(24, 10000.0, 512, scaling), length)
        wanted, _ = theirs("dynamic", dict(factor=4), 10000.0, 24, 1.0, 64, length)
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "value", [None, {"rope_type": "default"}, {"type": "default", "rope_theta": 10000}, {"rope_theta": 10000.0}]
)
def test_no_scaling(value):
    assert parse_rope_scaling(value, 16, 64, base=10000) is None


def test_older_spellings_mean_the_same():
    for new, old in (
        ({"rope_type": "linear", "factor": 2}, {"type": "linear", "factor": 2.0}),
        ({"rope_type": "longrope", **PHI3}, {"type": "su", **PHI3}),
        ({"rope_type": "longrope", **PHI3}, {"type": "su", "rope_type": "longrope", **PHI3}),
        ({"rope_type": "yarn", **YARN}, {"type": "yarn", **YARN, "attention_factor": None, "mscale": None}),
    ):
        assert parse_rope_scaling(new, 96, 131072) == parse_rope_scaling(old, 96, 131072) is not None
    assert len({parse_rope_scaling({"rope_type": "longrope", **PHI3}, 96, 131072) for _ in range(2)}) == 1  # hashable


REFUSED = [  # mapping and what the message says, for 16 of 32 rotated dimensions, 64 positions and base 10000
    ({}, "rope_scaling={} has no rope_type; give one of default, linear"),
    ({"factor": 2.0}, "has no rope_type"),
    ({"rope_type": "yarm", "factor": 2}, "'yarm', which is none of .*; did you mean yarn?"),
    ({"rope_type": "axial"}, "'axial', which is none of"),
    ({"rope_type": 3}, "rope_type 3, which is none of"),
    ({"rope_type": "linear", "type": "yarn", "factor": 2}, "rope_type 'linear' and type 'yarn'; keep rope_type"),
    ("linear", "'linear' must be a mapping"),
    ({"rope_type": "linear"}, "of type linear: factor is missing"),
    ({"rope_type": "linear", "factor": None}, "factor is missing"),
    ({"rope_type": "yarn"}, "factor is missing"),
    ({"rope_type": "llama3", "factor": 2}, "low_freq_factor is missing.*high_freq_factor is missing"),
    ({"rope_type": "longrope", "factor": 2}, "short_factor is missing.*long_factor is missing"),
    ({"rope_type": "default", "factor": 2}, "factor is not one of its numbers"),
    ({"rope_type": "linear", "factor": 2, "beta_fast": 3}, "beta_fast is not one of its numbers; remove it"),
    ({"rope_type": "yarn", "factor": 2, "beta_slov": 3}, "beta_slov is not .*; did you mean beta_slow?"),
    ({"rope_type": "proportional", "partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 must be at most 1"),
    ({"rope_type": "proportional", "partial_rotary_factor": 0.1}, "=0.1 of 16 dimensions turns none"),
    ({"rope_type": "linear", "factor": True}, "factor=True must be a number of at least 1"),
    ({"rope_type": "linear", "factor": "2"}, "factor='2' must be a number"),
    ({"rope_type": "linear", "factor": 0.5}, "factor=0.5 must be a number of at least 1"),
    ({"rope_type": "linear", "factor": float("nan")}, "factor=nan must be"),
    ({"rope_type": "dynamic", "factor": float("inf")}, "factor=inf must be"),
    ({"rope_type": "yarn", "factor": 2, "truncate": 1}, "truncate=1 must be true or false"),
    ({"rope_type": "yarn", "factor": 2, "mscale": -1}, "mscale=-1 must be a number of at least 0"),
    ({"rope_type": "yarn", "factor": 2, "attention_factor": 0}, "attention_factor=0 must be a number greater than 0"),
    (
        {"rope_type": "yarn", "factor": 2, "beta_fast": 2, "beta_slow": 3},
        "beta_fast=2 must not be less than beta_slow=3",
    ),
    ({"rope_type": "yarn", "factor": 2, "beta_fast": 0.5}, "beta_fast=0.5 must not be less than beta_slow=1"),
    (
        {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 65},
        "original_max_position_embeddings=65 is more than max_position_embeddings=64",
    ),
    ({"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 32.0}, "=32.0 must be a whole number"),
    ({"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": True}, "=True must be a whole number"),
    (
        {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4},
        "high_freq_factor=4 must be greater than low_freq_factor=4",
    ),
    (
        {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1] * 9},
        "short_factor=.* a list of 8 numbers, .* it has 7.*long_factor=.* it has 9",
    ),
    ({"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": 2.0}, "long_factor=2.0 must be a list of 8"),
    ({"rope_type": "longrope", "short_factor": [1] * 7 + [0], "long_factor": [2] * 8}, "short_factor=.*greater than 0"),
    ({"rope_type": "longrope", "short_factor": [1] * 7 + [True], "long_factor": [2] * 8}, "short_factor=.*numbers"),
    (
        {"rope_type": "linear", "factor": 2, "rope_theta": 1e6},
        "rope_theta=1000000.0 and rotary_emb_base=10000 are one setting",
    ),
    ({"rope_type": "default", "rope_theta": "1e4"}, "rope_theta='1e4' must be a number"),
    (
        {"rope_type": "default", "partial_rotary_factor": 1.0},
        "partial_rotary_factor=1.0 and rotary_pct=0.5 are one setting",
    ),
]


@pytest.mark.parametrize("mapping, message", REFUSED)
def test_refused(mapping, message):
    """Alone, and as the setting of a model."""
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        parse_rope_scaling(mapping, 16, 64, base=10000, rotary_pct=0.5)
    if isinstance(mapping, dict):
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            tiny_args(
                hidden_size=64, num_attention_heads=2, rotary_pct=0.5, max_position_embeddings=64, rope_scaling=mapping
            )


def test_all_problems_are_reported_together():
    mapping = {"rope_type": "yarn", "factor": 0, "beta_fast": "32", "speed": 1, "rope_theta": 5}
    with pytest.raises(ConfigError) as caught:
        parse_rope_scaling(mapping, 16, 64, base=10000)
    assert len(caught.value.problems) == 4
    for name in ("factor=0", "beta_fast='32'", "speed", "rope_theta=5"):
        assert name in str(caught.value)


def test_what_cannot_be_computed_is_refused():
    with pytest.raises(ConfigError, match="rotary_emb_base greater than 1, not 0.5"):
        tiny_args(rope_scaling={"rope_type": "yarn", "factor": 2}, rotary_emb_base=0.5)
    with pytest.raises(ConfigError, match="no frequency of 2 rotated dimensions"):
        tiny_args(**GQA_TP4, rotary_pct=0.2, rope_scaling={"rope_type": "dynamic", "factor": 2})


def test_scalings_by_layer_type():
    args = tiny_args(
        **NARROW,
        num_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window_width=4,
        rotary_emb_base={"full_attention": 1000000, "sliding_attention": 5000},
        rope_scaling={"full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 1e6}},
    )
    sliding, full, last = (args.layer_attention(number).rotary for number in range(3))
    assert full == RotarySettings(24, 1e6, 32, RopeScaling("linear", 8.0))
    assert sliding == last == RotarySettings(24, 5000.0, 32)


def test_proportional_is_not_partial_rotation():
    numbers = dict(rope_type="proportional", partial_rotary_factor=0.5)
    with pytest.raises(ConfigError, match=r"partial_rotary_factor=0.5 says which .*; set rotary_pct 1.0, not 0.5"):
        parse_rope_scaling(numbers, 16, 64, rotary_pct=0.5)
    assert parse_rope_scaling(numbers, 16, 64, rotary_pct=1.0).rotated_pairs(16) == 4


def test_problems_name_the_layer_type_and_are_reported_once():
    pattern = dict(layer_types=["full_attention", "sliding_attention"], sliding_window_width=4)
    bad = {"rope_type": "linear", "factor": 0}
    with pytest.raises(ConfigError) as caught:
        tiny_args(**pattern, rope_scaling={"sliding_attention": bad, "full_attention": None})
    assert caught.value.problems == [
        "rope_scaling.sliding_attention of type linear: factor=0 must be a number of at least 1"
    ]
    with pytest.raises(ConfigError) as caught:
        tiny_args(**pattern, rope_scaling=bad)
    assert caught.value.problems == ["rope_scaling of type linear: factor=0 must be a number of at least 1"]
    with pytest.raises(ConfigError, match="full_attention=8|full_attention.*must be a mapping"):
        tiny_args(**pattern, rope_scaling={"full_attention": 8})
    with pytest.raises(ConfigError, match="names layer types beside other keys"):
        tiny_args(**pattern, rope_scaling={"full_attention": bad, "rope_type": "linear"})
    with pytest.raises(ConfigError, match="rope_scaling.*only used with pos_emb=rotary"):
        tiny_args(rope_scaling={"rope_type": "linear", "factor": 2}, pos_emb="learned")


def test_one_base_for_two_repeated_ones_is_refused():
    pattern = dict(layer_types=["full_attention", "sliding_attention"], sliding_window_width=4)
    both = {kind: {"rope_type": "default", "rope_theta": 10000} for kind in pattern["layer_types"]}
    tiny_args(**pattern, rope_scaling=both)
    both["full_attention"]["rope_theta"] = 1e6
    with pytest.raises(
        ConfigError, match="rope_scaling.full_attention .*rope_theta=1000000.0 and rotary_emb_base=10000"
    ):
        tiny_args(**pattern, rope_scaling=both)
    args = tiny_args(**pattern, rope_scaling=both, rotary_emb_base=dict(full_attention=1e6, sliding_attention=10000))
    assert [args.layer_attention(number).rotary.base for number in range(2)] == [1e6, 1e4]


@pytest.mark.parametrize("rope_type", ("dynamic", "longrope"))
def test_a_prompt_in_pieces_needs_frequencies_that_stay(rope_type):
    numbers = dict(factor=2) if rope_type == "dynamic" else dict(short_factor=[1] * 8, long_factor=[2] * 8)
    scaling = {"rope_type": rope_type, **numbers, "original_max_position_embeddings": 16}
    with pytest.raises(ConfigError, match=f"prefill_chunk_size=4 with rope_scaling of type {rope_type}.*beyond 16"):
        tiny_args(rope_scaling=scaling, prefill_chunk_size=4)
    tiny_args(rope_scaling=scaling)
    tiny_args(rope_scaling=scaling, prefill_chunk_size=4, seq_length=16)
    tiny_args(rope_scaling={"rope_type": "linear", "factor": 2}, prefill_chunk_size=4)
