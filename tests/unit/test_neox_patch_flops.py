"""Operation counts of the patch, and the scale of relative position biases, in several spellings of the files."""

import math
import sys
from types import ModuleType

import pytest

from megatron.costs.flops import forward_flops
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, NARROW, WIDE_NON_DIVISIBLE
from tests.helpers.neox_patch_arguments import load_placed
from tests.helpers.neox_patch_edits import patched
from tests.helpers.neox_patch_geometry import (
    LAYER_LIST,
    LAYER_LISTS,
    LOGGING,
    LOGGING_OTHERWISE,
    LOGGINGS,
    counted_arguments,
    counting_functions,
)
from tools.neox_patch.change import Features
from tools.neox_patch.changes import flops, rpe
from tools.neox_patch.source import AnchorNotFound


def changes_for(text, tmp_path):
    """Those that a state with such a file gets."""
    (tmp_path / "megatron").mkdir(exist_ok=True)
    (tmp_path / flops.PATH).write_text(text)
    return [change for change in flops.CHANGES if change.wanted is None or change.wanted(Features(tmp_path))]


def formula(args, passes):
    """Narayanan et al. 2021, appendix: 96 B s l h² (1 + s/6h + V/16lh) with 4 passes."""
    h, s = args.hidden_size, args.seq_length
    parts = 1 + s / (6 * h) + args.padded_vocab_size / (16 * args.num_layers * h)
    return 24 * passes * args.train_batch_size * s * args.num_layers * h**2 * parts


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_attention_is_counted_with_its_true_widths(monkeypatch, name, recomputed):
    """Against the sums of this project's own costs, part by part."""
    placed, args = load_placed(monkeypatch, "flops"), counted_arguments(**ALL[name])
    ours = tiny_args(**ALL[name], num_layers=3, activation="gelu")
    parts = forward_flops(ours)
    assert parts["mlp"] == 3 * 16 * args.hidden_size**2, "an MLP as logging.py supposes all to be"
    expected = sum(parts.values()) - 0.25 * parts["head"]  # GPT-NeoX counts 3/4 of it, which is right with 4 passes
    passes = 4 if recomputed else 3
    assert placed.head_dim_flops(args, recomputed) == pytest.approx(passes * 6 * 32 * expected, rel=1e-12)


def test_as_wide_as_hidden_it_is_the_published_formula(monkeypatch):
    placed = load_placed(monkeypatch, "flops")
    args = counted_arguments(hidden_size=96, num_attention_heads=4, head_dim=24)
    assert placed.head_dim_flops(args) == pytest.approx(formula(args, 3), rel=1e-12)
    assert placed.head_dim_flops(args, recomputed=True) == pytest.approx(formula(args, 4), rel=1e-12)


def test_layers_without_heads_keep_their_count(monkeypatch):
    placed = load_placed(monkeypatch, "flops")
    args = counted_arguments(("gmlp", "global", "amlp"), **NARROW)
    wide = counted_arguments(hidden_size=160, num_attention_heads=4)
    expected = (2 * formula(wide, 3) + placed.head_dim_flops(counted_arguments(**NARROW))) / 3
    assert placed.head_dim_flops(args) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("spelling", LOGGINGS)
def test_only_another_query_width_is_counted_otherwise(monkeypatch, tmp_path, spelling):
    placed, text = load_placed(monkeypatch, "flops"), LOGGINGS[spelling]
    after = patched(changes_for(text, tmp_path), text)
    before, now = counting_functions(text, placed), counting_functions(after, placed)
    assert len(before) == len(now) == (2 if text is LOGGING else 1)
    same = dict(hidden_size=64, num_attention_heads=4)
    unchanged = [same, dict(same, head_dim=16), dict(same, num_kv_heads=2), dict(same, num_kv_heads=2, head_dim=16)]
    for recomputed in (False, True):
        for number, (old, new) in enumerate(zip(before, now, strict=True)):
            for widths in unchanged:
                args = counted_arguments(checkpoint_activations=recomputed, **widths)
                assert new(args, 0.7) == old(args, 0.7), "to the last bit"
            for kind in ("rwkv", "mamba"):
                args = counted_arguments((kind, "global", kind), recomputed, **WIDE_NON_DIVISIBLE)
                assert new(args, 0.7) == old(args, 0.7)
            args = counted_arguments(checkpoint_activations=recomputed, **WIDE_NON_DIVISIBLE)
            counts_again = recomputed and number == 0
            assert new(args, 0.7) == placed.head_dim_flops(args, counts_again) / (0.7 * 2)
            assert new(args, 0.7) != old(args, 0.7)


def test_a_model_whose_widths_make_no_geometry_is_counted_as_ever(monkeypatch, tmp_path):
    """Mamba layers need no heads, and hidden_size need not divide by their number."""
    placed = load_placed(monkeypatch, "flops")
    after = counting_functions(patched(changes_for(LOGGING, tmp_path), LOGGING), placed)
    for kind in ("mamba", "gmlp"):
        args = counted_arguments((kind,) * 3, hidden_size=50, num_attention_heads=4)
        assert [new(args, 1.0) for new in after] == [old(args, 1.0) for old in counting_functions(LOGGING, placed)]


def test_the_comment_above_else_stays_there(tmp_path):
    after = patched(changes_for(LOGGING_OTHERWISE, tmp_path), LOGGING_OTHERWISE)
    assert "  # all others\n  else: # as ever\n" in after
    assert set(LOGGING_OTHERWISE.split("\n")) <= set(after.split("\n")), "no line is changed"


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("def get_actual_flops", "def flops", "def get_actual_flops"),
        (
            "in neox_args.attention_config:\n        flops_per",
            "in kinds:\n        flops_per",
            "neox_args.attention_config",
        ),
        (
            "    else:\n        flops_per_iteration = (",
            "    if True:\n        flops_per_iteration = (",
            "else of the choice",
        ),
        ("flops_per_iteration = tokens * h\n", "return tokens * h\n", "the name that each branch"),
    ],
)
def test_what_is_not_found_is_named(tmp_path, old, new, said):
    with pytest.raises(AnchorNotFound, match=f"{flops.PATH}: .*{said}"):
        patched(changes_for(LOGGING, tmp_path), LOGGING.replace(old, new))


def test_a_branch_that_counts_otherwise_is_refused(tmp_path):
    changes = changes_for(LOGGING, tmp_path)
    text = patched(changes, LOGGING).replace("head_dim_flops(neox_args)", "head_dim_flops(neox_args) * 2")
    with pytest.raises(AnchorNotFound, match="head_dim_flops"):
        patched(changes, text)


def bias_scales(text, monkeypatch, args):
    """The scales that a layer list of these arguments gives its relative position biases."""
    config = load_placed(monkeypatch, "config")
    bias, groups = lambda scale: scale, ModuleType("megatron.mpu")
    groups.ParallelRelativePositionBias, groups.divide = bias, lambda numerator, denominator: numerator // denominator
    megatron = sys.modules["megatron"]
    monkeypatch.setitem(sys.modules, "megatron.mpu", groups)
    monkeypatch.setattr(megatron, "mpu", groups, raising=False)
    monkeypatch.setitem(sys.modules, "megatron.head_dim.config", config)
    space = {}
    exec("\n".join(line for line in text.split("\n") if "deepspeed" not in line), space)
    layers = space["GPT2ModelPipe"]()
    layers.neox_args = args
    layers.init_specs()
    return layers.specs


@pytest.mark.parametrize("spelling", LAYER_LISTS)
def test_scale_of_relative_positions(monkeypatch, spelling):
    text = LAYER_LISTS[spelling]
    after = patched(rpe.CHANGES, text)
    plain = counted_arguments(hidden_size=60, num_attention_heads=4, pos_emb="rpe")
    assert bias_scales(after, monkeypatch, plain) == bias_scales(text, monkeypatch, plain) == [math.sqrt(15)]
    for widths in (WIDE_NON_DIVISIBLE, dict(WIDE_NON_DIVISIBLE, softmax_scale=0.5)):
        assert bias_scales(after, monkeypatch, counted_arguments(**dict(widths, pos_emb="rpe"))) == [math.sqrt(24)]
    assert (
        bias_scales(after, monkeypatch, counted_arguments(hidden_size=50, num_attention_heads=4, pos_emb="none")) == []
    )


@pytest.mark.parametrize(
    "old, new",
    [
        ("num_attention_heads", "num_kv_heads"),
        ("mpu.divide", "mpu.product"),
        ("init_specs", "specs"),
        ("width =", "w ="),
    ],
)
def test_another_layer_list_is_refused_or_read(old, new):
    text = LAYER_LIST.replace(old, new)
    if old == "width =":
        text = text.replace("(width)", "(w)")
        assert "w = head_geometry(self.neox_args).head_dim" in patched(rpe.CHANGES, text)
    else:
        with pytest.raises(AnchorNotFound, match=rpe.PATH):
            patched(rpe.CHANGES, text)
