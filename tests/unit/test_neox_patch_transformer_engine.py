"""The patch of TEMultiheadAttention: texts in several spellings, and what the patched classes compute.

Truth: the fp64 einsum of tests.helpers.attention_reference, on rows counted one head at a time.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron.errors import ConfigError
from tests.helpers import neox_patch_edits as edits
from tests.helpers.attention_reference import AttentionFunction, value_and_gradients
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import MHA, MQA, NARROW, QUOTIENT, WIDE_NON_DIVISIBLE
from tests.helpers.neox_patch_arguments import load_placed
from tests.helpers.neox_patch_transformer_engine import PLAIN, SPELLINGS, attention_class, build
from tests.helpers.te import install_te, requires_te
from tests.helpers.te_attention import NAMES, te_row_order
from tests.helpers.tolerances import GRADIENT, assert_close
from tools.neox_patch.changes import transformer_engine
from tools.neox_patch.source import AnchorNotFound

TOKENS, BATCH = 12, 2
CASES = {
    "wide": WIDE_NON_DIVISIBLE,
    "narrow": dict(NARROW, rotary_pct=0.5, use_bias_in_attn_linear=False, softmax_scale=0.5),
    "mha": dict(MHA, sliding_window_width=3, softmax_scale=0.4),
    "mqa": dict(MQA, pos_emb="none", norm="scalenorm"),
    "quotient": dict(QUOTIENT, norm="rmsnorm"),
}


def patched(text):
    """The text with all changes."""
    return edits.patched(transformer_engine.CHANGES, text)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_rest_of_the_file_stays(spelling):
    before, after = SPELLINGS[spelling], patched(SPELLINGS[spelling])
    removed = [line for line in before.splitlines() if line not in after.splitlines()]
    touched = ("norm", "eps", "bias=", "window_size", "divide", "hidden_size, ", ")", "else", "get_emb", "forward(")
    assert all(any(word in line for word in touched) for line in removed), removed
    for own in ("# the class", "# which norm", "# turns", "# ours", "# always", "self.mine = 3", "# all positions"):
        assert (own in after) == (own in before), own


BROKEN = {
    "class": ("class TEMultiheadAttention(", "class Attention("),
    "constructor of the base": ("super(TEMultiheadAttention, self).__init__", "setup"),
    "head width": ("self.hidden_size_per_attention_head = ", "width = "),
    "bias": ("bias=True", "biased=True"),
    "window": ("window_size=", "window="),
    "norm": ("self.eps = ", "eps = "),
    "cache": ("use_cache=False", "cache=False"),
    "sum over ranks": ("parallel_output=False", "parallel=False"),
    "angles": ("self.rope_emb = self.turns.get_emb()", "self.rope_emb = angles"),
    "rounded angles": ("self.turns.get_emb()", "torch.clone(self.turns.table())"),
    "branch": ('if neox_args.pos_emb == "rotary":', "with rotary:"),
    "past": ("layer_past=None", "past=None"),
    "rotary table of the base": ("rotary_pos_emb=self.rope_emb", "table=self.rope_emb"),
    "forward of the base": ("super(TEMultiheadAttention, self).forward", "self.run"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_not_found_is_said(what):
    old, new = BROKEN[what]
    assert old in PLAIN
    with pytest.raises(AnchorNotFound, match=f"^{transformer_engine.PATH}: "):
        patched(PLAIN.replace(old, new))


def test_without_te_mha_nothing_is_wanted():
    assert not any(
        part.wanted(SimpleNamespace(te_attention=False))
        for part in [*transformer_engine.CHANGES, *transformer_engine.FILES]
    )


@requires_te
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spelling", ["plain", "otherwise"])
def test_patched_class_is_attention(spelling, case, monkeypatch):
    """Value and gradients, then in steps with the cache."""
    install_te()
    args = tiny_args(**CASES[case])
    kind = attention_class(monkeypatch, patched(SPELLINGS[spelling]))
    attention, hidden, upstream = build(kind, args), noise(1, args), noise(2, args)
    geometry = args.head_geometry()
    order = te_row_order(geometry).argsort()
    weights = {native: dict(attention.named_parameters()).get(name) for native, name in NAMES.items()}
    native = {name: in_rows(name, values, order).detach() for name, values in weights.items() if values is not None}
    assert ("dense.bias" in native) == args.use_bias_in_attn_linear
    numbers = (geometry.num_attention_heads, geometry.num_kv_heads, geometry.head_dim, geometry.rotary_ndims)
    function = AttentionFunction(*numbers, args.rotary_emb_base, args.softmax_scale, args.sliding_window_width)
    expected, gradients = value_and_gradients(native, hidden, function, upstream)

    output = whole(attention(hidden.requires_grad_(), None))
    assert_close(output, expected)
    (output * upstream).sum().backward()
    assert_close(hidden.grad, gradients["input"], GRADIENT)
    for name in native:
        assert_close(in_rows(name, weights[name].grad, order), gradients[name], GRADIENT, name)

    assert_close(in_steps(build(kind, args, use_cache=True), hidden.detach(), geometry), expected, what="in steps")


def noise(seed, args):
    return torch.randn(TOKENS, BATCH, args.hidden_size, generator=torch.Generator().manual_seed(seed))


def in_rows(name, values, order):
    return values[order] if name.startswith("query_key_value") else values


def whole(result):
    output, bias = result
    return output if bias is None else output + bias


def in_steps(attention, hidden, geometry):
    """A prompt of 5 tokens, then 1 and 1, then the rest."""
    outputs, past, start = [], None, 0
    with torch.no_grad():
        for end in (5, 6, 7, TOKENS):
            (output, past), bias = attention(hidden[start:end], None, layer_past=past)
            outputs.append(whole((output, bias)))
            assert past.shape == (2, end, BATCH, geometry.num_kv_heads, geometry.head_dim)
            start = end
    return torch.cat(outputs)


@requires_te
def test_cache_is_switched_on_the_attribute(monkeypatch):
    """As inference_mode does. An empty past is none, and a past is not looked at without use_cache."""
    install_te()
    args = tiny_args(**MQA)
    attention = build(attention_class(monkeypatch, patched(PLAIN)), args)
    hidden = noise(1, args)
    plain = whole(attention(hidden, None, layer_past=torch.ones(2, 3, BATCH, 1, 12)))
    assert torch.equal(plain, whole(attention(hidden, None)))
    assert not attention.core_attention._forward_pre_hooks
    attention.use_cache = True
    (output, present), bias = attention(hidden, None, layer_past=torch.empty(0))
    assert torch.equal(whole((output, bias)), plain) and present.shape[1] == TOKENS
    assert not attention.core_attention._forward_pre_hooks


@requires_te
def test_angles_are_not_rounded_and_follow_the_input(monkeypatch):
    install_te()
    kind = attention_class(monkeypatch, patched(PLAIN))
    attention = build(kind, tiny_args(**WIDE_NON_DIVISIBLE, precision="bfloat16", zero_optimization={"stage": 0}))
    angles = attention.rope_emb
    assert angles.dtype == torch.float32 and angles.shape == (32, 1, 1, 24)
    assert angles[31, 0, 0, 0] == angles[31, 0, 0, 12] == 31
    attention(noise(1, tiny_args(**WIDE_NON_DIVISIBLE)).bfloat16(), None)
    assert attention.rope_emb.dtype == torch.float32
    assert build(kind, tiny_args(**MQA, pos_emb="none")).rope_emb is None


@requires_te
def test_projection_leaves_the_sum_to_the_layer(monkeypatch):
    install_te()
    kind = attention_class(monkeypatch, patched(PLAIN))
    for parallel_output in (False, True):
        placed = SimpleNamespace(parallel_mode="row", sequence_parallel=True)
        attention = SimpleNamespace(proj=placed)
        configure = kind.__init__.__globals__["te_attention"].configure
        configure(attention, SimpleNamespace(softmax_scale=None), parallel_output, False)
        assert (placed.parallel_mode, placed.sequence_parallel) == ((None, False) if parallel_output else ("row", True))


REFUSED = {
    "alibi": (dict(pos_emb="alibi"), ["pos_emb=alibi"]),
    "rpe": (dict(pos_emb="rpe"), ["pos_emb=rpe"]),
    "joint norm": (dict(use_qk_layernorm=True), ["use_qk_layernorm=True"]),
    "norm per head": (dict(qk_norm_type="per_head"), ["qk_norm_type=per_head"]),
    "sparse": (dict(attention_config=["global", "sparse_fixed", "local"]), ["local, sparse_fixed"]),
    "all": (
        dict(pos_emb="rpe", qk_norm_type="joint", attention_config=["bigbird"]),
        ["pos_emb=rpe", "qk_norm_type=joint", "bigbird"],
    ),
    "nothing": (dict(attention_config=["global", "flash", "mamba"]), []),
}


@pytest.mark.parametrize("switch", ["te_mha", "te_fp8_mha"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_ignored_is_refused(case, switch, monkeypatch):
    module = load_placed(monkeypatch, "te_attention")
    values, expected = REFUSED[case]
    plain = dict(pos_emb="rotary", rotary_pct=1, use_qk_layernorm=False, qk_norm_type=None, attention_config=["global"])
    plain.update(MQA, te_mha=False, te_fp8_mha=False)
    problems = module.problems(SimpleNamespace(**{**plain, switch: True, **values}))
    assert len(problems) == len(expected)
    assert all(part in problem for part, problem in zip(expected, problems, strict=True))
    assert module.problems(SimpleNamespace(**{**plain, **values})) == []
    if expected:
        with pytest.raises(ConfigError) as error:
            module.geometry(SimpleNamespace(**{**plain, switch: True, **values}))
        assert error.value.problems == problems
