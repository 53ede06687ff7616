"""rotary_denominator_scale: inv_freq_i = base^(-2i / (scale x r)), in every type of scaling, in records and exports."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.checkpointing.stamp import check_stamp, write_stamp
from megatron.convert.families import FAMILIES
from megatron.convert.families.rope import with_plain_base
from megatron.errors import CheckpointError, ConfigError
from megatron.model.gpt2_model import GPT2ModelSequential
from megatron.model.rotary import rotary_frequencies
from tests.helpers.configs import tiny_args
from tests.helpers.convert_models import VOCAB, as_theirs, text, their_logits, written_config
from tests.helpers.geometries import ALL, WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import FORWARD, assert_close
from tests.unit.test_rope_scaling import REAL, theirs

SCALE = 1.5
LLAMA = dict(
    norm="rmsnorm", activation="swiglu", use_bias_in_attn_linear=False, use_bias_in_mlp=False, ffn_hidden_size=46
)


def frequencies(args, layer=0):
    return rotary_frequencies(args.layer_attention(layer).rotary)[0]


@pytest.mark.parametrize("geometry", ("wide_non_divisible", "mqa", "quotient"))
@pytest.mark.parametrize("scale", (SCALE, 0.7, 4))
def test_equals_the_definition(geometry, scale):
    args = tiny_args(**ALL[geometry], rotary_denominator_scale=scale, rotary_pct=0.5, rotary_emb_base=5000)
    r = args.head_geometry().rotary_ndims
    wanted = 5000.0 ** (-np.arange(0, r, 2) / (scale * r))
    np.testing.assert_allclose(frequencies(args).double().numpy(), wanted, rtol=1e-6)


def test_one_and_null_change_nothing():
    plain = tiny_args(**WIDE_NON_DIVISIBLE, rotary_emb_base=5000)
    one = plain.update(rotary_denominator_scale=1.0)
    assert one.layer_attention() == plain.layer_attention() != plain.update(rotary_denominator_scale=SCALE)


def test_each_layer_type_has_its_own_base():
    kinds = ["sliding_attention", "full_attention"]
    bases = {"sliding_attention": 1000.0, "full_attention": 50000.0}
    args = tiny_args(
        layer_types=kinds, sliding_window_width=5, rotary_emb_base=bases, rotary_denominator_scale=SCALE, head_dim=12
    )
    for layer, kind in enumerate(kinds):
        wanted = bases[kind] ** (-np.arange(0, 12, 2) / (SCALE * 12))
        np.testing.assert_allclose(frequencies(args, layer).double().numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize("case", REAL, ids=lambda case: case[0])
def test_every_scaling_starts_from_the_stretched_frequencies(case):
    rope_type, numbers, base, head_dim, rotary_pct, longest = case
    args = tiny_args(
        **dict(num_attention_heads=2, hidden_size=64, head_dim=head_dim, rotary_pct=rotary_pct),
        **dict(seq_length=longest, max_position_embeddings=longest, rotary_emb_base=base),
        rope_scaling=dict(rope_type=rope_type, **numbers),
        rotary_denominator_scale=SCALE,
    )
    stretched = math.exp(math.log(base) / SCALE)
    wanted, factor = theirs(rope_type, numbers, stretched, head_dim, rotary_pct, longest, length=longest)
    got, ours = rotary_frequencies(args.layer_attention().rotary, length=longest)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)
    assert ours == pytest.approx(factor)


def test_values_that_are_refused():
    for value, complaint in ((0.0, "greater than 0"), (-1, "greater than 0"), (True, "a number"), ("2", "a number")):
        with pytest.raises(ConfigError, match=f"rotary_denominator_scale={value!r}.*{complaint}"):
            tiny_args(rotary_denominator_scale=value)
    with pytest.raises(ConfigError, match="rotary_denominator_scale=1.5 is only used with pos_emb=rotary, not alibi"):
        tiny_args(rotary_denominator_scale=SCALE, pos_emb="alibi")


def test_a_checkpoint_knows_it(tmp_path):
    plain = tiny_args(**WIDE_NON_DIVISIBLE)
    stretched = plain.update(rotary_denominator_scale=SCALE)
    (tmp_path / "plain").mkdir()
    (tmp_path / "stretched").mkdir()
    write_stamp(plain, str(tmp_path / "plain"))
    write_stamp(stretched, str(tmp_path / "stretched"))
    check_stamp(stretched, str(tmp_path / "stretched"))
    with pytest.raises(CheckpointError, match="rotary_denominator_scale: 1.5 in the checkpoint, 1.0 in the config"):
        check_stamp(plain, str(tmp_path / "stretched"))
    with pytest.raises(CheckpointError, match="rotary_denominator_scale: 1.0 in the checkpoint, 1.5 in the config"):
        check_stamp(stretched, str(tmp_path / "plain"))


@pytest.mark.parametrize("scaled", (False, True))
def test_an_export_says_it_by_the_base(scaled):
    """transformers' model of the export, and its frequencies, to the last bit."""
    numbers = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, rope_theta=5000.0)
    args = tiny_args(
        **WIDE_NON_DIVISIBLE, **LLAMA, rotary_emb_base=5000.0, rotary_denominator_scale=SCALE,
        rope_scaling=numbers if scaled else None, init_method_std=0.3,
    )  # fmt: skip
    model, family = GPT2ModelSequential(args).eval(), FAMILIES["mistral"]
    assert any("rotary_denominator_scale" in problem for problem in family.refusals(args))
    plain = with_plain_base(args)
    config = written_config(family, plain)
    assert config.rope_parameters["rope_theta"] == 5000.0 ** (1 / SCALE)
    config._attn_implementation = "eager"
    hf = AutoModelForCausalLM.from_config(config).float().eval()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    hf.load_state_dict(as_theirs(family, plain, weights), strict=True)
    assert torch.equal(hf.model.rotary_emb.inv_freq, frequencies(args))
    tokens = text()
    with torch.no_grad():
        logits = model((tokens, torch.arange(tokens.shape[1]).expand_as(tokens)))[..., :VOCAB]
        without = GPT2ModelSequential(args.update(rotary_denominator_scale=None)).eval()
        other = without((tokens, torch.arange(tokens.shape[1]).expand_as(tokens)))[..., :VOCAB]
    assert_close(logits, their_logits(hf, tokens), FORWARD)
    assert (logits - other).abs().max() > 1e-2, "the comparison would see nothing"
