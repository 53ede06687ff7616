"""The geometry record: what it holds, and that each number in it is compared."""

import copy
import json

import pytest

from megatron.checkpointing import check_stamp, read_stamp, write_stamp
from megatron.checkpointing.stamp import STAMP_FILE
from megatron.errors import CheckpointError
from megatron.geometry import HeadGeometry
from tests.helpers.checkpoints import plain_args
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, WIDE_NON_DIVISIBLE


@pytest.mark.parametrize("name", ALL)
def test_round_trip(tmp_path, name):
    args = plain_args(geometry=ALL[name])
    write_stamp(args, str(tmp_path))
    stamp = read_stamp(str(tmp_path))
    assert [HeadGeometry.from_stamp(layer["geometry"]) for layer in stamp["layers"]] == [args.head_geometry()] * 2
    assert {layer["softmax_scale"] for layer in stamp["layers"]} == {args.head_geometry().head_dim ** -0.5}
    assert {layer["qkv_layout"] for layer in stamp["layers"]} == {args.head_geometry().qkv_layout.value}
    check_stamp(args, str(tmp_path))


def test_equal_shapes_with_heads_and_width_swapped_are_told_apart(tmp_path):
    write_stamp(plain_args(geometry=dict(hidden_size=64, num_attention_heads=8, head_dim=16)), str(tmp_path))
    other = plain_args(geometry=dict(hidden_size=64, num_attention_heads=4, head_dim=32))
    with pytest.raises(CheckpointError) as error:
        check_stamp(other, str(tmp_path))
    assert "num_attention_heads: 8 in the checkpoint, 4 in the config" in str(error.value)
    assert "head_dim: 16 in the checkpoint, 32 in the config" in str(error.value)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_kv_heads", "head_dim", "rotary_ndims"])
def test_each_number_is_compared(tmp_path, key):
    args = plain_args(geometry=WIDE_NON_DIVISIBLE)
    write_stamp(args, str(tmp_path))
    path = tmp_path / STAMP_FILE
    stamp = json.loads(path.read_text())
    stamp["layers"][1]["geometry"][key] += 2
    path.write_text(json.dumps(stamp))
    with pytest.raises(CheckpointError, match=rf"{key}: \d+ in the checkpoint, \d+ in the config \(layer 1\)"):
        check_stamp(args, str(tmp_path))


def test_softmax_scale_and_row_order_are_compared(tmp_path):
    args = plain_args(geometry=WIDE_NON_DIVISIBLE)
    write_stamp(args, str(tmp_path))
    with pytest.raises(CheckpointError, match="softmax_scale: 0.204.* in the checkpoint, 0.5 in the config"):
        check_stamp(plain_args(geometry=WIDE_NON_DIVISIBLE, attention_scale=lambda layer, group: 0.5), str(tmp_path))
    text = (tmp_path / STAMP_FILE).read_text()
    (tmp_path / STAMP_FILE).write_text(text.replace("per_rank", "per_group"))
    with pytest.raises(CheckpointError, match="QKV row order: per_group in the checkpoint, per_rank here"):
        check_stamp(args, str(tmp_path))


def test_other_number_of_layers(tmp_path):
    write_stamp(plain_args(), str(tmp_path))
    with pytest.raises(CheckpointError, match="num_layers: 2 in the checkpoint, 3 in the config"):
        check_stamp(plain_args(num_layers=3), str(tmp_path))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"version": 99, "layers": []}', '{"version": 1, "layers": [{}]}']
)
def test_unreadable_record(tmp_path, text):
    (tmp_path / STAMP_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=STAMP_FILE):
        check_stamp(plain_args(), str(tmp_path))


def test_without_a_record_the_yaml_decides(tmp_path):
    """GPT-NeoX keeps its YAML text, dashes and all, beside the weights."""
    (tmp_path / "configs").mkdir()
    text = "hidden-size: 64\nnum-attention-heads: 8\nhead-dim: 16\npos-emb: none\n"
    (tmp_path / "configs" / "a.yml").write_text(text)
    assert read_stamp(str(tmp_path)) is None
    check_stamp(plain_args(geometry=dict(hidden_size=64, num_attention_heads=8, head_dim=16)), str(tmp_path))
    swapped = plain_args(geometry=dict(hidden_size=64, num_attention_heads=4, head_dim=32))
    with pytest.raises(CheckpointError, match="head_dim: 16 in the checkpoint, 32 in the config"):
        check_stamp(swapped, str(tmp_path))
    plain = plain_args(geometry=dict(hidden_size=64, num_attention_heads=8))
    with pytest.raises(CheckpointError, match="head_dim: 16 in the checkpoint, 8 in the config"):
        check_stamp(plain, str(tmp_path))


def test_rotary_width_of_the_yaml_is_compared(tmp_path):
    (tmp_path / "configs").mkdir()
    text = "hidden_size: 64\nnum_attention_heads: 4\npos_emb: rotary\nrotary_pct: 0.25\n"
    (tmp_path / "configs" / "a.yml").write_text(text)
    args = plain_args(geometry=dict(hidden_size=64, num_attention_heads=4, rotary_pct=0.5), pos_emb="rotary")
    with pytest.raises(CheckpointError, match="rotary_ndims: 4 in the checkpoint, 8 in the config"):
        check_stamp(args, str(tmp_path))


def test_without_record_and_yaml_nothing_is_claimed(tmp_path):
    check_stamp(plain_args(), str(tmp_path))


GROUPS = [[24, 3], {"layer": 1, "groups": [[16, 3], [40, 3]]}]
LAYERED = dict(WIDE_NON_DIVISIBLE, num_layers=3, pos_emb="none")
OTHERS = {
    "head_dim: 40 in the checkpoint, 24 in the config (layer 2)": dict(head_dim=[16, 24, 24]),
    "num_kv_heads: 2 in the checkpoint, 3 in the config (layers 0-1)": dict(num_kv_heads=[3, 3, 2]),
    "groups of heads: 6 of 24 in the checkpoint, 3 of 16 + 3 of 40 in the config (layer 1)": dict(
        head_dim=[16, 24, 40, *GROUPS[1:]]
    ),
}


@pytest.mark.parametrize("told", OTHERS)
@pytest.mark.parametrize("recorded", (True, False))
def test_the_layers_that_differ_are_named(tmp_path, told, recorded):
    saved = dict(LAYERED, head_dim=[16, 24, 40])
    if recorded:
        write_stamp(tiny_args(**saved), str(tmp_path))
    else:
        (tmp_path / "configs").mkdir()
        (tmp_path / "configs" / "a.yml").write_text(json.dumps(saved))
    check_stamp(tiny_args(**saved), str(tmp_path))
    with pytest.raises(CheckpointError) as error:
        check_stamp(tiny_args(**{**saved, **OTHERS[told]}), str(tmp_path))
    assert told in str(error.value)


def test_each_group_of_heads_is_compared(tmp_path):
    args = tiny_args(**{**LAYERED, "head_dim": GROUPS})
    write_stamp(args, str(tmp_path))
    check_stamp(args, str(tmp_path))
    kept = json.loads((tmp_path / STAMP_FILE).read_text())
    assert [len(layer.get("groups", [0])) for layer in kept["layers"]] == [1, 2, 1]
    for path, value, told in (
        (("softmax_scale",), 0.7, "group 1 of heads: softmax_scale: 0.7 in the checkpoint, 0.158"),
        (("qkv_layout",), "per_head", "group 1 of heads: QKV row order: per_head in the checkpoint, per_rank here"),
        (("geometry", "head_dim"), 42, "group 1 of heads: head_dim: 42 in the checkpoint, 40 in the config (layer 1)"),
    ):
        changed = copy.deepcopy(kept)
        place = changed["layers"][1]["groups"][1]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        (tmp_path / STAMP_FILE).write_text(json.dumps(changed))
        with pytest.raises(CheckpointError) as error:
            check_stamp(args, str(tmp_path))
        assert told in str(error.value)
