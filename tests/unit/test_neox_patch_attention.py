"""The patch of ParallelSelfAttention: texts in several spellings, and what the patched classes compute.

Truth: the fp64 einsum of tests.helpers.attention_reference.
"""

import functools
import sys
from itertools import product

import pytest
import torch

from tests.helpers import neox_patch_edits as edits
from tests.helpers.attention_reference import AttentionFunction, value_and_gradients
from tests.helpers.geometries import MHA, MQA, NARROW, QUOTIENT, WIDE_NON_DIVISIBLE
from tests.helpers.neox_patch_arguments import load_placed
from tests.helpers.neox_patch_attention import FlashCalls, attention_class, build, settings
from tests.helpers.neox_patch_attention_texts import OTHERWISE, PLAIN, SPELLINGS
from tests.helpers.tolerances import GRADIENT, assert_close
from tools.neox_patch.changes import attention, attention_norms
from tools.neox_patch.source import AnchorNotFound

CHANGES = [*attention.CHANGES, *attention_norms.CHANGES]
TOKENS, BATCH = 9, 2
PER_HEAD, JOINT = dict(qk_norm_type="per_head"), dict(qk_norm_type="joint")
CASES = {
    "wide": WIDE_NON_DIVISIBLE,
    "narrow, rotary 0.5": dict(NARROW, rotary_pct=0.5, use_bias_in_attn_linear=False),
    "MHA": MHA,
    "MHA by number": dict(MHA, num_kv_heads=3),
    "MQA": dict(MQA, pos_emb="none"),
    "scale": dict(WIDE_NON_DIVISIBLE, softmax_scale=0.45),
    "scale, by layer": dict(MHA, softmax_scale=0.45, apply_query_key_layer_scaling=True),
    "per_head": dict(WIDE_NON_DIVISIBLE, **PER_HEAD),
    "per_head, MHA": dict(MHA, norm="layernorm", **PER_HEAD),
    "joint, grouped": dict(WIDE_NON_DIVISIBLE, use_qk_layernorm=True),
    "joint, MHA": dict(MHA, norm="layernorm", **JOINT),
}
ABSENT = {
    "MHA": dict(QUOTIENT),
    "grouped": dict(QUOTIENT, num_kv_heads=2, rotary_pct=0.25),
    "norms": dict(QUOTIENT, use_qk_layernorm=True, norm="layernorm"),
    "by layer": dict(QUOTIENT, apply_query_key_layer_scaling=True),
    "muP": dict(QUOTIENT, use_mup=True),
}
GROUPED_NORMS = dict(QUOTIENT, num_kv_heads=1, use_qk_layernorm=True)
"""Global only: with flash GPT-NeoX itself cannot, and the patched class can."""


@functools.cache
def patched(text):
    """The text with all changes."""
    return edits.patched(CHANGES, text)


@pytest.mark.parametrize("spelling", ["plain", "otherwise"])
def test_changes_are_made_once(spelling):
    text = patched(SPELLINGS[spelling])
    for change in CHANGES:
        assert edits.edited(change, text) == text, f"{change.summary}: made again"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_rest_of_the_file_stays(spelling):
    before, after = SPELLINGS[spelling], patched(SPELLINGS[spelling])
    removed = [line for line in before.splitlines() if line not in after.splitlines()]
    touched = ("hidden_size", "num_attention_heads", "use_", "softmax_scale", "hp: h/p", "hn: h/n", "3*h", " h", ")")
    assert all(any(word in line for word in touched) for line in removed), removed
    assert len(removed) <= 18
    comments = [line.split("# ")[1].strip() for line in before.splitlines() if "# " in line]
    assert len(comments) >= 6 and all(f"# {comment}" in after for comment in comments)


LAST_NORM = "key_layer = self.qk_layernorm(key_layer)"


def test_own_lines_between_ours_stay_and_change_nothing():
    """A patched file that was edited further is still patched."""
    after = patched(PLAIN)
    for anchor in ("self.query_hidden_size = ", "self.softmax_scale = ", "self.qk_norm_type = "):
        line = next(line for line in after.splitlines() if anchor in line)
        after = after.replace(line, f"{line}  # mine\n        self.mine = 1")
    after = after.replace(LAST_NORM, f"{LAST_NORM}\n        self.mine = 1")
    assert patched(after) == after and after.count("self.mine = 1") == 4


def test_notes_on_shapes():
    notes = patched(PLAIN)
    assert "     hp: np * hn, by default h/p\n     hn: head_dim, by default h/n\n     b: batches\n" in notes


FLASH_CALL = "self.flash_qkv_fn(query_layer, key_layer, value_layer, 0.0, softmax_scale=None, causal=True)"
TRITON = "self.flash_triton_fn(query_layer, key_layer, value_layer, causal=True, bias=torch.zeros(1))"


def test_triton_kernel_is_told_the_scale_and_its_line_stays_short():
    text = patched(PLAIN.replace(FLASH_CALL, TRITON + " or " + FLASH_CALL.replace("softmax_scale=None, ", "")))
    lines = [line.strip() for line in text.splitlines()]
    place = lines.index("bias=torch.zeros(1),")
    assert lines[place + 1].startswith("softmax_scale=self.softmax_scale,")
    assert text.count("softmax_scale=self.softmax_scale") == 3


WIDTHS, NOTES, SCALE, FLASH, KINDS, APPLIED, GROUPS = CHANGES
BROKEN = {
    "class": (WIDTHS, "class ParallelSelfAttention(", "class Attention("),
    "width of a rank": (WIDTHS, "self.hidden_size_per_partition = mpu", "self.width = mpu"),
    "width of a rank, from elsewhere": (WIDTHS, "divide(neox_args.hidden_size, r", "divide(64, r"),
    "head width": (WIDTHS, "self.hidden_size_per_attention_head = mpu", "head = mpu"),
    "head width, from elsewhere": (WIDTHS, "neox_args.hidden_size, neox_args.n", "64, neox_args.n"),
    "another head width": (WIDTHS, "neox_args.num_attention_heads\n        )", "neox_args.heads)"),
    "width of keys": (WIDTHS, "self.kv_hidden_size = ", "self.kv_width = "),
    "width of keys, from elsewhere": (WIDTHS, "kv_hidden_size = neox_args.hidden_size", "kv_hidden_size = 64"),
    "projection": (WIDTHS, "self.query_key_value = Linear", "self.qkv = Linear"),
    "projection, from elsewhere": (WIDTHS, "output_size=3 * neox_args.hidden_size", "output_size=192"),
    "projection without a width": (WIDTHS, "output_size=3 * neox_args.hidden_size", "rows=3 * neox_args.hidden_size"),
    "dense": (WIDTHS, "self.dense = ", "self.out = "),
    "dense, from elsewhere": (WIDTHS, "neox_args.hidden_size,\n            output_size=neox", "w, output_size=neox"),
    "own query width": (WIDTHS, "        factor = None", "        self.query_hidden_size = 5"),
    "divisor": (SCALE, "math.sqrt(self.hidden", "root(self.hidden"),
    "own scale": (SCALE, "        factor = None", "        self.softmax_scale = 5"),
    "flash": (FLASH, "self.flash_qkv_fn(", "flash("),
    "flash of rows": (FLASH, "self.flash_varlen_qkv_fn(", "flash_of_rows("),
    "flash, of another scale": (FLASH, "softmax_scale=None, causal", "softmax_scale=0.5, causal"),
    "joint norm": (KINDS, "self.qk_layernorm = kind", "norm = kind"),
    "flag of the joint norm": (KINDS, "layernorm = neox_args.use_qk_layernorm", "layernorm = False"),
    "branch of the joint norm": (KINDS, "if self.use_qk_layernorm:\n            kind", "if 1:\n            kind"),
    "other branch": (KINDS, "qk_layernorm:\n", "qk_layernorm:\n            pass\n        else:\n"),
    "own norms": (KINDS, "        factor = None", "        self.k_layernorm = None"),
    "own kind of norm": (KINDS, "        factor = None", "        self.qk_norm_type = None"),
    "joint norm of keys": (APPLIED, LAST_NORM, "pass"),
    "joint norm without a branch": (APPLIED, "if self.use_qk_layernorm:\n            q", "if 1:\n            q"),
    "other variables": (APPLIED, "self.attention(query_layer, key_layer,", "self.attention(query, key_layer,"),
    "attention": (APPLIED, "self.attention(query_layer", "self.attend(query_layer"),
    "branch of groups": (GROUPS, "if not self.use_flash_attention:", "if self.repeats:"),
    "number of key heads": (GROUPS, "key_layer.transpose(0, 1).reshape(*sizes, self", "shaped(sizes, self"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_not_found_is_said(what):
    change, old, new = BROKEN[what]
    assert old in PLAIN
    with pytest.raises(AnchorNotFound, match=f"^{attention.PATH}: "):
        edits.edited(change, PLAIN.replace(old, new))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["global", "flash"])
@pytest.mark.parametrize("spelling", ["plain", "otherwise"])
def test_patched_class_is_attention(spelling, kind, case, monkeypatch):
    """Value and gradients; then in evaluation, and in steps with the cache."""
    values = CASES[case]
    if kind == "flash" and values.get("apply_query_key_layer_scaling"):
        values = {**values, "apply_query_key_layer_scaling": False}  # flash attention does not know it
    args, calls = settings(**values, attention_config=[kind] * 4), FlashCalls()
    made = attention_class(monkeypatch, patched(SPELLINGS[spelling]), calls)
    layer, hidden, upstream = build(made, args, layer_number=3), noise(1, args), noise(2, args)
    expected, gradients = value_and_gradients(layer.state_dict(), hidden, function(args), upstream)

    output = whole(layer(hidden.requires_grad_()))
    assert_close(output, expected)
    (output * upstream).sum().backward()
    assert_close(hidden.grad, gradients.pop("input"), GRADIENT)
    parameters = dict(layer.named_parameters())
    assert set(parameters) == set(gradients)
    for name, gradient in gradients.items():
        assert_close(parameters[name].grad, gradient, GRADIENT, name)

    with torch.no_grad():
        assert_close(whole(layer.eval()(hidden)), expected, what="in evaluation")
        assert_close(in_steps(build(made, args, layer_number=3, use_cache=True).eval(), hidden), expected, what="steps")
    assert set(calls.scales) == ({args.softmax_scale} if kind == "flash" else set())


def function(args):
    """The function that the arguments mean."""
    heads = args.num_attention_heads
    turned = int(args.head_dim * args.rotary_pct) if args.pos_emb == "rotary" else 0
    return AttentionFunction(
        *(heads, args.num_kv_heads or heads, args.head_dim, turned, args.rotary_emb_base, args.softmax_scale),
        qk_norm=args.qk_norm_type or ("joint" if args.use_qk_layernorm else None),
        norm=args.norm,
        eps=args.rms_norm_epsilon if args.norm == "rmsnorm" else args.layernorm_epsilon,
    )


def noise(seed, args):
    return torch.randn(TOKENS, BATCH, args.hidden_size, generator=torch.Generator().manual_seed(seed))


def whole(result):
    output, bias = result
    return output if bias is None else output + bias


def in_steps(layer, hidden):
    """A prompt of 4 tokens, then 1 and 1, then the rest."""
    outputs, past, start = [], None, 0
    for end in (4, 5, 6, TOKENS):
        (output, past), bias = layer(hidden[start:end], layer_past=past)
        outputs.append(whole((output, bias)))
        start = end
    return torch.cat(outputs)


@pytest.mark.parametrize("case, kind", [*product(ABSENT.values(), ["global", "flash"]), (GROUPED_NORMS, "global")])
@pytest.mark.parametrize("spelling", ["plain", "otherwise"])
def test_without_the_arguments_nothing_changes(spelling, kind, case, monkeypatch):
    """Parameters in their order, and every bit; a head_dim that is the quotient is the same."""
    values = dict(case, attention_config=[kind] * 4)
    results = []
    before, after = (attention_class(monkeypatch, text(SPELLINGS[spelling])) for text in (str, patched))
    for made, head_dim in ((before, None), (after, None), (after, 16)):
        layer = build(made, settings(**values, head_dim=head_dim), layer_number=2)
        hidden = noise(1, settings(**values)).requires_grad_()
        output = whole(layer(hidden))
        output.square().sum().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        names = [(name, tuple(tensor.shape)) for name, tensor in layer.state_dict().items()]
        results.append((names, [output.detach(), hidden.grad, *gradients, torch.tensor(layer.norm_factor)]))
    for names, tensors in results[1:]:
        assert names == results[0][0]
        assert all(torch.equal(one, other) for one, other in zip(tensors, results[0][1], strict=True))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradient_of_shared_norms_is_summed_over_ranks_once(sequence_parallel, monkeypatch):
    """Under sequence_parallel GPT-NeoX does it for all norms itself."""
    norms = load_placed(monkeypatch, "qk_norm").per_head_norms(
        settings(**MHA, norm="layernorm", sequence_parallel=sequence_parallel)
    )
    monkeypatch.setattr(sys.modules["megatron.mpu"], "reduce_from_model_parallel_region", lambda gradient: 3 * gradient)
    x = noise(1, settings(hidden_size=MHA["head_dim"]))
    for norm in norms:
        norm(x).sum().backward()
        assert_close(norm.bias.grad, torch.full((16,), 1.0 * TOKENS * BATCH * (1 if sequence_parallel else 3)))
    assert norms[0].weight is not norms[1].weight


def test_kind_of_norm(monkeypatch):
    kind = load_placed(monkeypatch, "qk_norm").qk_norm_type
    assert kind(settings()) is None
    assert kind(settings(use_qk_layernorm=True)) == kind(settings(**JOINT)) == "joint"
    assert kind(settings(**PER_HEAD)) == "per_head"


def test_norms_come_before_the_projections(monkeypatch):
    """Where GPT-NeoX's joint norm is: the state of an optimizer knows parameters by their order."""
    for text in (PLAIN, OTHERWISE):
        layer = attention_class(monkeypatch, patched(text))(settings(**MHA, **PER_HEAD))
        names = [name.rsplit(".", 1)[0] for name, _ in layer.named_parameters()]
        assert names[:3] == ["q_layernorm", "k_layernorm", "query_key_value"]
