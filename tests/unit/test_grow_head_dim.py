"""tools/ckpts/grow_head_dim.py: wider heads, the same logits, at every kind of positions, norm, layout and file."""

import math
import os

import pytest
import torch
import yaml

from megatron.checkpointing.grow import grown_qkv, grown_settings
from megatron.checkpointing.model_settings import checkpoint_folder, inference_args
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.resharded import ReshardedReader
from megatron.checkpointing.shards import Shards
from megatron.checkpointing.stamp import check_stamp
from megatron.geometry import HeadGeometry
from megatron.model.gpt2_model import build_model, cross_entropy
from megatron.neox_arguments import NeoXArgs
from tests.helpers.configs import tiny_args
from tests.helpers.resharding import VARIANTS, random_layers, settings_of, write_checkpoint
from tests.helpers.tolerances import FORWARD
from tools.ckpts import grow_head_dim, reshard

LAYER_NORMS = ("gqa full_width", "mha gated qk layernorm", "mqa shared kv, uneven", "kv heads by layer, full_width")
SCALES = ("mha widths by layer, per_head", "mqa progressive gpt_j", "mqa progressive rpe")
"""Of different widths, each with its own scale."""
MORE = {
    "per_head, a large epsilon": dict(VARIANTS["gqa per_head"], rms_norm_epsilon=0.5),
    "full width rms": dict(VARIANTS["gqa full_width"], norm="rmsnorm", rms_norm_epsilon=0.3),
    "shared kv, uneven": dict(VARIANTS["mqa shared kv, uneven"], norm="rmsnorm"),
    "per_head fused": dict(VARIANTS["gqa per_head"], rmsnorm_fusion=True),
    "partial rotary": dict(VARIANTS["gqa gated rms"], rotary_pct=0.4, softmax_scale=0.7),
    "learned with a cap": dict(VARIANTS["mha"], pos_emb="learned", attn_logit_softcap=3.0, sliding_window_width=4,
                               layer_types=["sliding_attention", "full_attention"]),
    "widths by layer, one scale": dict(VARIANTS["mqa progressive gpt_j"], softmax_scale=0.3),
}  # fmt: skip
GROUPS = [name for name in VARIANTS if "groups" in name]
SHARED = [name for name in VARIANTS if "keys are values" in name]
CASES = [name for name in VARIANTS if name not in (*LAYER_NORMS, *SCALES, *GROUPS, *SHARED)] + list(MORE)[:-1]
"""Names of tests.helpers.resharding, and some more."""


def settings(case):
    if case in VARIANTS:
        return settings_of(case)
    return {**settings_of("mha"), "num_kv_heads": None, **MORE[case]}


def saved(folder, case):
    """A checkpoint at one rank; returns its arguments."""
    args = NeoXArgs.from_dict(settings(case))
    write_checkpoint(folder, random_layers(args), settings(case))
    return args


def grown(source, out, width, *more):
    assert grow_head_dim.main([str(source), str(out), f"--head-dim={width}", *more]) == 0
    return out


def model_of(folder):
    """The checkpoint's model by its own configs, in fp32, joined at one rank."""
    reader = CheckpointReader(checkpoint_folder(str(folder)))
    args = inference_args(reader, model_parallel_size=1)
    check_stamp(args, reader.folder)
    saved_args = inference_args(reader)
    whole = ReshardedReader(reader, Shards(saved_args), 1, args.padded_vocab_size)
    weights = {
        f"sequential.{index}.{name}": tensor.float()
        for index in reader.layer_indices()
        for name, tensor in whole.layer_state(index).items()
    }
    model = build_model(args)
    model.load_state_dict(weights)
    return args, model


def logits_of(model, args):
    tokens = torch.randint(0, 128, (2, args.seq_length), generator=torch.Generator().manual_seed(1))
    return model((tokens, torch.arange(args.seq_length).expand(2, -1)))


@pytest.mark.parametrize("case", CASES)
def test_the_logits_stay(case, tmp_path, capsys):
    before = saved(tmp_path / "narrow", case)
    args, model = model_of(tmp_path / "narrow")
    expected = logits_of(model, args)
    width = before.head_geometry().head_dim + 7
    for name, more in (("wide", ()), ("zeros", ("--zeros",))):
        after, wide = model_of(grown(tmp_path / "narrow", tmp_path / name, width, *more))
        found = logits_of(wide, after)
        assert after.head_geometry().head_dim == width
        assert after.head_geometry().rotary_ndims == before.head_geometry().rotary_ndims
        assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item()), name
    assert expected.abs().max() > 0.3
    said = capsys.readouterr().out
    assert f"head_dim {before.head_geometry().head_dim} -> {width}" in said and "optimizer's state is left out" in said


@pytest.mark.parametrize(
    "case, asked, widths",
    [
        # An int(0.4 d) of 4 at a head_dim of 10 to 12, at one share.
        ("partial rotary", "[10, 12]", [10, 12]),
        ("learned with a cap", "[[31, 1], [20, 1]]", [31, 20]),
        ("mha gpt_j", "{schedule: progressive, base: 16, exponent: 0.5, multiple_of: 1}", [16, 23]),
        ("widths by layer, one scale", "[13, 16, 24]", [13, 16, 24]),
        ("widths by layer, one scale", "21", [21, 21, 21]),
    ],
)
def test_layers_grow_to_widths_of_their_own(case, asked, widths, tmp_path, capsys):
    before = saved(tmp_path / "narrow", case)
    args, model = model_of(tmp_path / "narrow")
    expected = logits_of(model, args)
    after, wide = model_of(grown(tmp_path / "narrow", tmp_path / "wide", asked))
    for number, width in enumerate(widths):
        old, new = before.head_geometry(number), after.head_geometry(number)
        assert (new.head_dim, new.rotary_ndims, new.num_kv_heads) == (width, old.rotary_ndims, old.num_kv_heads)
        assert after.attention_scale(number) == before.attention_scale(number)
    assert (logits_of(wide, after) - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    assert expected.abs().max() > 0.3
    assert "optimizer's state is left out" in capsys.readouterr().out


@pytest.mark.parametrize("case, reached", [("gqa gated rms", "qkv"), ("mha", "qkv"), ("gqa per_head", "v")])
def test_training_reaches_the_new_dimensions(case, reached, tmp_path):
    """Gradients of the new rows after one step; with --zeros there are none at all."""
    old = saved(tmp_path / "narrow", case).head_geometry()
    width = old.head_dim + 6
    for name, more in (("wide", ()), ("zeros", ("--zeros",))):
        args, model = model_of(grown(tmp_path / "narrow", tmp_path / name, width, *more))
        tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):  # zero rows get a gradient in the first step, those that they were multiplied with after it
            optimizer.zero_grad()
            logits = logits_of(model, args)
            cross_entropy(args)(logits, (tokens, torch.ones(2, 16))).backward()
            optimizer.step()
        attention = dict(model.local_layers())[2].attention
        rows = attention.query_key_value.weight.grad.unflatten(0, (-1, width))[:, old.head_dim :]
        columns = attention.dense.weight.grad.unflatten(1, (-1, width))[..., old.head_dim :]
        n, m = old.num_attention_heads, old.num_kv_heads
        kinds = "qkv" * n if n == m else "q" * n + "k" * m + "v" * m
        moved = {kind for kind, block in zip(kinds, rows, strict=True) if block.abs().max() > 0}
        assert moved == (set() if more else set(reached))
        assert bool(columns.abs().max() > 0) is not bool(more)


@pytest.mark.parametrize("tp, pp", [(2, 0), (2, 2), (4, 1)])
@pytest.mark.parametrize("case", ["gqa per_head", "shared kv, uneven", "gqa rpe", "full width rms"])
def test_every_layout_becomes_the_same_model(case, tp, pp, tmp_path):
    """Grown after it was split over ranks, or before: equal weights, in the same kind of files."""
    saved(tmp_path / "narrow", case)
    split, wide = (str(tmp_path / name) for name in ("split", "wide"))
    sizes = [f"--model-parallel-size={tp}", f"--pipe-parallel-size={pp}"]
    assert reshard.main([str(tmp_path / "narrow"), split, *sizes]) == 0
    grown(split, wide, 17)
    reader = CheckpointReader(checkpoint_folder(wide))
    assert (reader.model_parallel_size, reader.pipe_parallel_size) == (tp, pp)
    assert not os.path.exists(os.path.join(wide, "global_step5", "zero_pp_rank_0_mp_rank_00_optim_states.pt"))
    _, model = model_of(wide)
    _, expected = model_of(grown(tmp_path / "narrow", tmp_path / "whole", 17))
    for (name, one), (_, other) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
        assert torch.equal(one[:128] if "embed" in name or "final" in name else one, other), name


def test_configs_are_ready_and_keep_their_text(tmp_path):
    """rotary_pct and head_dim in the file that has them, what is new in a file of its own."""
    args = saved(tmp_path / "narrow", "partial rotary")
    configs = tmp_path / "narrow" / "global_step5" / "configs"
    (configs / "tiny.yml").write_text(yaml.safe_dump(dict(settings("partial rotary"), softmax_scale=None)))
    with_comment = (configs / "tiny.yml").read_text().replace("rotary_pct:", "# a comment\nrotary-pct:")
    (configs / "tiny.yml").write_text(with_comment.replace("softmax_scale: null\n", ""))
    out = grown(tmp_path / "narrow", tmp_path / "wide", 23) / "global_step5" / "configs"
    assert sorted(os.listdir(out)) == ["head_dim.yml", "layout.yml", "tiny.yml"]
    text = (out / "tiny.yml").read_text()
    assert "# a comment\nrotary-pct: 0." in text and "head_dim: 23" in text
    assert yaml.safe_load((out / "head_dim.yml").read_text()) == {
        "softmax_scale": args.head_geometry().head_dim ** -0.5
    }


def test_rotated_dimensions_survive_every_quotient():
    """int(head_dim x rotary_pct) is exact where the quotient of floats falls short."""
    for narrow in range(2, 40, 2):
        args = tiny_args(hidden_size=64, num_attention_heads=4, head_dim=narrow)
        for width in range(narrow + 1, 300, 7):
            share = grown_settings(args, width)["rotary_pct"]
            assert int(width * share) == narrow and share <= 1


def test_rows_of_each_order():
    """Each head's old rows stay where its head begins; k is zero, q and v are as large as they were."""
    for kv_heads, order in ((3, "qkvqkvqkv"), (1, "qqqkv")):
        old = HeadGeometry.from_config(8, 3, kv_heads, 4)
        fused = torch.randn(len(order) * 4, 8, generator=torch.Generator().manual_seed(0))
        wide = grown_qkv(fused, old, 400, math.sqrt(100), "qv", torch.Generator().manual_seed(1))
        for kind, block, before in zip(order, wide.view(-1, 400, 8), fused.view(-1, 4, 8), strict=True):
            assert torch.equal(block[:4], before if kind == "v" else before * 10)
            spread = block[4:].std().item()
            assert spread == 0 if kind == "k" else 0.3 < spread / block[:4].std().item() < 30


@pytest.mark.parametrize(
    "case, width, said",
    [
        ("gqa gated rms", 10, "the checkpoint's is 10; it can only become wider"),
        ("gqa full_width", 16, "norm=layernorm on queries and keys (qk_norm_type full_width): it subtracts the mean"),
        ("mha gated qk layernorm", 32, "qk_norm_type joint"),
        ("mha gpt_j", "[[24, 1], [12, 1]]", "layer 1 would get 12, and the checkpoint's are 16 wide"),
        ("widths by layer, one scale", "[10, 16, 20]", "these are the checkpoint's widths; nothing would grow"),
        ("mha groups, per_head", 32, "gives layers 0-1 heads of several widths; only layers whose heads are alike"),
        ("mha gpt_j", "[[24, 2], {layer: 1, groups: [[24, 2], [32, 2]]}]", "gives layer 1 heads of several widths"),
        ("mha gpt_j", "[[24, 3]]", "head_dim describes 3 layers and num_layers=2"),
        ("gqa gated rms", "[10, 16]", "(10 of 10 in layer 0, 10 of 16 in layer 1), and there is no one rotary_pct"),
        ("gqa rpe", "[10, 16]", "pos_emb=rpe has one table for all layers"),
        ("mha keys are values", 32, "v_norm=True: it divides by the root mean square of a head"),
        ("mha keys are values", 32, "shared_key_value=True: new rows of keys have to be zero"),
        ("mqa progressive gpt_j", 32, "0.316228 in layer 0, 0.25 in layer 1, 0.223607 in layer 2"),
    ],
)
def test_refused_with_the_reason(case, width, said, tmp_path, capsys):
    saved(tmp_path / "narrow", case)
    out = tmp_path / "wide"
    assert grow_head_dim.main([str(tmp_path / "narrow"), str(out), f"--head-dim={width}"]) == 1
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_half_precision_stays_within_its_rounding(tmp_path):
    """bf16 rounds the multiplied weights of normed queries and keys; others are moved as they are."""
    for case in ("gqa per_head", "gqa gated rms"):
        args = NeoXArgs.from_dict(settings(case))
        layers = {
            index: {name: tensor.bfloat16() for name, tensor in state.items()}
            for index, state in random_layers(args).items()
        }
        write_checkpoint(tmp_path / case / "narrow", layers, settings(case))
        narrow_args, narrow = model_of(tmp_path / case / "narrow")
        wide_args, wide = model_of(grown(tmp_path / case / "narrow", tmp_path / case / "wide", 15))
        difference = (logits_of(wide, wide_args) - logits_of(narrow, narrow_args)).abs().max()
        assert difference <= (FORWARD[torch.bfloat16] if case == "gqa per_head" else 1e-5)
