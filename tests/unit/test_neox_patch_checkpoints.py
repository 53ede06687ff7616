"""The record of the head geometry that the patch writes beside checkpoints, and this project's: they are one."""

import json
from types import SimpleNamespace

import pytest

from megatron.checkpointing import check_stamp, read_stamp, write_stamp
from megatron.checkpointing.stamp import STAMP_FILE, make_stamp
from megatron.errors import CheckpointError
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, MHA, WIDE_NON_DIVISIBLE
from tests.helpers.neox_patch_arguments import load_placed
from tests.helpers.neox_patch_edits import patched
from tests.helpers.neox_patch_geometry import CHECKPOINTING, CHECKPOINTINGS
from tools.neox_patch.changes import checkpoints
from tools.neox_patch.source import AnchorNotFound

TAG = "global_step7"
GQA_QUOTIENT = dict(hidden_size=64, num_attention_heads=8, num_kv_heads=2)
SWAPPED = (
    dict(hidden_size=64, num_attention_heads=8, head_dim=16),
    dict(hidden_size=64, num_attention_heads=4, head_dim=32),
)


def arguments(**given):
    """What the record asks of a checkout's NeoXArgs."""
    common = dict(num_layers=2, num_kv_heads=None, head_dim=None, softmax_scale=None, rotary_pct=1.0, pos_emb="rotary")
    return SimpleNamespace(**{**common, "use_mup": False, "attention_config": ["global"] * 2, **given})


@pytest.fixture
def placed(monkeypatch):
    return load_placed(monkeypatch, "stamp")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / TAG).mkdir()
    (tmp_path / "latest").write_text(TAG)
    return tmp_path


def edit_record(folder, **layer):
    path = folder / TAG / STAMP_FILE
    record = json.loads(path.read_text())
    record["layers"][1].update(layer)
    path.write_text(json.dumps(record))


def kept(folder, text):
    (folder / TAG / "configs").mkdir()
    (folder / TAG / "configs" / "a.yml").write_text(text)


@pytest.mark.parametrize("name", ALL)
def test_the_record_is_this_projects(placed, folder, name):
    """Each reads what the other writes; all but the name of the program is the same."""
    theirs, ours = arguments(**ALL[name]), tiny_args(**ALL[name])
    placed.write_head_geometry(theirs, str(folder), TAG)
    written = json.loads((folder / TAG / STAMP_FILE).read_text())
    wanted = make_stamp(ours)
    for layer in wanted["layers"]:
        layer["softmax_scale"] = pytest.approx(layer["softmax_scale"], rel=1e-15)  # 1/sqrt(d) and d ** -0.5
    assert written.pop("framework") != wanted.pop("framework")
    assert written == wanted
    assert [path.name for path in (folder / TAG).iterdir()] == [STAMP_FILE]
    check_stamp(ours, str(folder / TAG))
    placed.check_head_geometry(theirs, str(folder), TAG)
    write_stamp(ours, str(folder / TAG))
    placed.check_head_geometry(theirs, str(folder))


def test_scale_is_in_the_record(placed, folder):
    placed.write_head_geometry(arguments(**MHA, softmax_scale=0.3), str(folder), TAG)
    assert [layer["softmax_scale"] for layer in read_stamp(str(folder / TAG))["layers"]] == [0.3] * 2
    with pytest.raises(CheckpointError, match="softmax_scale: 0.3 in the checkpoint, 0.25 in the config"):
        placed.check_head_geometry(arguments(**MHA), str(folder))
    with pytest.raises(CheckpointError, match="softmax_scale: 0.3 in the checkpoint, 0.25 in the config"):
        check_stamp(tiny_args(**MHA), str(folder / TAG))


def test_equal_shapes_with_heads_and_width_swapped_are_told_apart(placed, folder):
    one, other = (arguments(**widths) for widths in SWAPPED)
    placed.write_head_geometry(one, str(folder), TAG)
    with pytest.raises(CheckpointError) as error:
        placed.check_head_geometry(other, str(folder), TAG)
    assert "num_attention_heads: 8 in the checkpoint, 4 in the config" in str(error.value)
    assert "head_dim: 16 in the checkpoint, 32 in the config" in str(error.value)
    with pytest.raises(CheckpointError) as error:
        placed.check_head_geometry(arguments(hidden_size=64, num_attention_heads=8), str(folder), TAG)
    assert "head_dim: 16 in the checkpoint, 8 in the config\n  rotary_ndims: 16 in the checkpoint, 8" in str(
        error.value
    )
    assert f"{TAG} is a model of another head geometry (according to its {STAMP_FILE})" in str(error.value)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_kv_heads", "head_dim", "rotary_ndims"])
def test_each_number_is_compared(placed, folder, key):
    args = arguments(**WIDE_NON_DIVISIBLE)
    placed.write_head_geometry(args, str(folder), TAG)
    layer = read_stamp(str(folder / TAG))["layers"][1]["geometry"]
    edit_record(folder, geometry=dict(layer, **{key: layer[key] + 2}))
    with pytest.raises(CheckpointError, match=rf"{key}: \d+ in the checkpoint, \d+ in the config \(layers 1\)"):
        placed.check_head_geometry(args, str(folder))


def test_row_order_and_number_of_layers(placed, folder):
    args = arguments(**WIDE_NON_DIVISIBLE)
    placed.write_head_geometry(args, str(folder), TAG)
    with pytest.raises(CheckpointError, match="num_layers: 2 in the checkpoint, 3 in the config"):
        placed.check_head_geometry(arguments(**WIDE_NON_DIVISIBLE, num_layers=3), str(folder))
    edit_record(folder, qkv_layout="per_group")
    with pytest.raises(
        CheckpointError, match=r"QKV row order: per_group in the checkpoint, per_rank here \(layers 1\)"
    ):
        placed.check_head_geometry(args, str(folder))


def test_what_loaded_without_head_dim_loads(placed, folder):
    """Another rotary_pct, no rotary at all, muP on or off: GPT-NeoX has never compared them."""
    placed.write_head_geometry(arguments(**GQA_QUOTIENT), str(folder), TAG)
    for changed in (dict(rotary_pct=0.25), dict(pos_emb="alibi"), dict(use_mup=True)):
        placed.check_head_geometry(arguments(**GQA_QUOTIENT, **changed), str(folder))
    with pytest.raises(CheckpointError, match="rotary_ndims: 8 in the checkpoint, 2 in the config"):
        placed.check_head_geometry(arguments(**GQA_QUOTIENT, head_dim=8, rotary_pct=0.25), str(folder))
    with pytest.raises(CheckpointError, match="num_kv_heads: 2 in the checkpoint, 8 in the config"):
        placed.check_head_geometry(arguments(**dict(GQA_QUOTIENT, num_kv_heads=None)), str(folder))
    edit_record(folder, softmax_scale=0.2)
    with pytest.raises(CheckpointError, match="softmax_scale: 0.2 in the checkpoint"):
        placed.check_head_geometry(arguments(**GQA_QUOTIENT), str(folder))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"version": 9, "layers": []}', '{"version": 1, "layers": [{}]}']
)
def test_unreadable_record(placed, folder, text):
    (folder / TAG / STAMP_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=f"{STAMP_FILE} is not a readable geometry record"):
        placed.check_head_geometry(arguments(**MHA), str(folder))


def test_without_a_record_the_yaml_decides(placed, folder):
    kept(folder, "hidden-size: 64\nnum-attention-heads: 8\nhead-dim: 16\npos-emb: rotary\n")
    one, other = (arguments(**widths) for widths in SWAPPED)
    placed.check_head_geometry(one, str(folder))
    with pytest.raises(
        CheckpointError, match=r"according to its configs/\):\n(.*\n)+  head_dim: 16 in the checkpoint, 32"
    ):
        placed.check_head_geometry(other, str(folder))
    with pytest.raises(CheckpointError, match="head_dim: 16 in the checkpoint, 8 in the config"):
        placed.check_head_geometry(arguments(hidden_size=64, num_attention_heads=8), str(folder))
    with pytest.raises(CheckpointError, match="softmax_scale: 0.25 in the checkpoint, 0.5 in the config"):
        placed.check_head_geometry(arguments(**SWAPPED[0], softmax_scale=0.5), str(folder))


def test_old_yaml_and_old_config_are_left_to_gpt_neox(placed, folder):
    kept(folder, "hidden-size: 64\nnum-attention-heads: 8\n")
    placed.check_head_geometry(arguments(hidden_size=64, num_attention_heads=4), str(folder))
    with pytest.raises(CheckpointError, match="head_dim: 8 in the checkpoint, 16 in the config"):
        placed.check_head_geometry(arguments(hidden_size=64, num_attention_heads=8, head_dim=16), str(folder))


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "", "hidden_size: 64\n"])
def test_yaml_that_does_not_say_claims_nothing(placed, folder, text):
    kept(folder, text)
    placed.check_head_geometry(arguments(**MHA), str(folder))


def test_without_a_checkpoint_nothing_is_claimed(placed, tmp_path):
    placed.check_head_geometry(arguments(**MHA), str(tmp_path))
    placed.check_head_geometry(arguments(**MHA), str(tmp_path / "none"), TAG)
    (tmp_path / "latest").write_text("gone")
    placed.check_head_geometry(arguments(**MHA), str(tmp_path))


def test_models_without_heads_have_no_record(placed, folder):
    """Their hidden_size need not divide by num_attention_heads."""
    args = arguments(hidden_size=50, num_attention_heads=4, attention_config=["mamba"] * 2)
    placed.write_head_geometry(args, str(folder), TAG)
    assert list((folder / TAG).iterdir()) == []
    placed.write_head_geometry(arguments(**MHA), str(folder), TAG)
    placed.check_head_geometry(args, str(folder))


def test_only_rank_0_writes(placed, folder, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    placed.write_head_geometry(arguments(**MHA), str(folder), TAG)
    assert list((folder / TAG).iterdir()) == []


class Engine:
    """Notes what is called, as DeepSpeed's engine would be; saving makes the folder."""

    def __init__(self):
        self.ready, self.calls = True, []

    def save_checkpoint(self, save_dir, tag=None, client_state=None):
        self.calls.append(("engine saves", save_dir, tag, client_state))

    def load_checkpoint(self, load_dir, tag=None, load_optimizer_states=True):
        self.calls.append(("engine loads", load_dir, tag, load_optimizer_states))
        return "name", {}


@pytest.mark.parametrize("spelling", CHECKPOINTINGS)
def test_written_after_saving_and_checked_before_loading(spelling, tmp_path):
    text = CHECKPOINTINGS[spelling]
    after = patched(checkpoints.CHANGES, text)
    engine = Engine()
    space = {
        "write_head_geometry": lambda *given: engine.calls.append(("written", *given)),
        "check_head_geometry": lambda *given: engine.calls.append(("checked", *given)),
    }
    exec("\n".join(line for line in after.split("\n") if not line.startswith("from megatron")), space)
    args = SimpleNamespace(save=str(tmp_path), load="from", deepspeed=True, no_load_optim=True)
    space["save_ds_checkpoint"](7, engine, args)
    state = {"iteration": 7}
    assert engine.calls == [("engine saves", str(tmp_path), TAG, state), ("written", args, str(tmp_path), TAG)]
    for iteration, tag in ((7, TAG), (None, None)):
        engine.calls.clear()
        assert space["load_checkpoint"](args, engine, None, None, iteration=iteration) == "name"
        assert engine.calls == [("checked", args, "from", tag), ("engine loads", "from", tag, False)]
    assert set(text.split("\n")) <= set(after.split("\n")), "no line is changed"


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("def save_ds_checkpoint", "def save_all", "def save_ds_checkpoint"),
        (
            "model.save_checkpoint",
            "engine().save_checkpoint",
            r"model.save_checkpoint\(...\) in def save_ds_checkpoint",
        ),
        ("tag=tag, client_state", "client_state", "folder and tag in model.save_checkpoint"),
        ("neox_args.save", "folder", "parameter of def save_ds_checkpoint with .save"),
        ("            neox_args.load,\n", "", "folder in model.load_checkpoint"),
        ("name, state = model.load_checkpoint", "name, state = load", "model.load_checkpoint"),
    ],
)
def test_what_is_not_found_is_named(old, new, said):
    with pytest.raises(AnchorNotFound, match=f"{checkpoints.PATH}: .*{said}"):
        patched(checkpoints.CHANGES, CHECKPOINTING.replace(old, new))
