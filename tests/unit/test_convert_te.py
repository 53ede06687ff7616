"""tools/ckpts/convert_te.py: both directions against names and rows written by hand, logits, settings."""

import io
import json
import os

import pytest
import torch
import yaml

from megatron.checkpointing import inspection
from megatron.checkpointing.config_texts import with_setting
from megatron.checkpointing.model_settings import inference_args, vocabulary_rows
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.resharded import ReshardedReader
from megatron.checkpointing.shards import Shards
from megatron.checkpointing.stamp import read_stamp
from megatron.checkpointing.te_names import form_of
from megatron.checkpointing.weights import fill, layers_of, load_weights_from, weight_problems
from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER, build_model
from tests.helpers.resharding import random_layers, read_all, write_checkpoint
from tests.helpers.te import install_te, requires_te
from tests.helpers.te_attention import te_row_order
from tests.helpers.te_conversion import (
    CASES,
    KEEP_MHA,
    SWITCHES,
    TP2,
    assert_equal,
    convert,
    in_one_process,
    native_checkpoint,
    parts_of,
    reshard_to,
    settings_of,
    weights_in,
)
from tests.helpers.te_layers import native_layout, native_name
from tests.helpers.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:.*cuda.amp.autocast:FutureWarning")


@pytest.mark.parametrize("name", CASES)
def test_names_and_rows(name, tmp_path):
    """Every native weight once, under TE's name and in TE's order as counted by hand; and exactly back."""
    layers = native_checkpoint(name, tmp_path / "native")
    layers = {f"{index}.{key}": tensor for index, state in layers.items() for key, tensor in state.items()}
    reader = convert(tmp_path / "native", tmp_path / "te", "te", *parts_of(name))
    args = inference_args(reader)
    assert args.te_mha == (name not in KEEP_MHA) and args.te_layernorm_mlp and args.norm.startswith("te_")
    unused = dict(layers)
    for (_, index, key), tensor in weights_in(reader).items():
        expected = unused.pop(native_name(f"{index}.{key}", args.norm))
        if key.startswith("attention.qkv."):
            expected = expected[te_row_order(args.head_geometry(index - FIRST_TRANSFORMER_LAYER))]
        elif key.startswith("mlp.fc1_"):
            expected = native_layout("fc1_weight", expected, args.mlp_geometry().gated)
        assert torch.equal(tensor, expected), key
    assert not unused
    back = convert(tmp_path / "te", tmp_path / "back", "native")
    assert_equal(read_all(back), read_all(CheckpointReader(str(tmp_path / "native" / "global_step5"))))
    assert read_stamp(back.folder) == read_stamp(reader.folder)


@pytest.mark.parametrize("name", TP2)
def test_rank_by_rank_is_the_whole_split(name, tmp_path):
    """At TP 2: a converted checkpoint is what the converted TP 1 checkpoint gives when split."""
    native_checkpoint(name, tmp_path / "one")
    whole = convert(tmp_path / "one", tmp_path / "one_te", "te", *parts_of(name))
    two = reshard_to(2, tmp_path / "one", tmp_path / "two", stages=2)
    converted = convert(tmp_path / "two", tmp_path / "two_te", "te", *parts_of(name))
    assert (converted.model_parallel_size, converted.pipe_parallel_size) == (2, 2)
    split = ReshardedReader(whole, Shards(inference_args(whole)), 2, vocabulary_rows(converted))
    for rank in (0, 1):
        for index in whole.layer_indices():
            found, expected = (reader.layer_state(index, rank) for reader in (converted, split))
            assert_equal(found, expected)
    assert_equal(read_all(convert(tmp_path / "two_te", tmp_path / "back", "native")), read_all(two))


def test_one_file_per_rank(tmp_path):
    native_checkpoint("gqa gated rms", tmp_path / "one")
    found = []
    for stages in (0, 1):
        reshard_to(2, tmp_path / "one", tmp_path / f"two{stages}", stages)
        found.append(convert(tmp_path / f"two{stages}", tmp_path / f"te{stages}", "te"))
        assert found[-1].is_layered == bool(stages)
    assert_equal(*map(read_all, found))


@requires_te
@pytest.mark.parametrize("name", CASES)
def test_both_models_give_the_same_logits(name, tmp_path):
    """Built by the config written beside the weights; at TP 2 through the split that loading knows."""
    install_te()
    native_checkpoint(name, tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "te", "te", *parts_of(name))
    folders_ = ["native", "te"]
    if name in TP2:
        reshard_to(2, tmp_path / "native", tmp_path / "two")
        convert(tmp_path / "two", tmp_path / "two_te", "te", *parts_of(name))
        folders_.append("two_te")
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(1))
    inputs, found = (tokens, torch.arange(16).expand(2, -1)), {}
    for folder in folders_:
        reader = CheckpointReader(str(tmp_path / folder / "global_step5"))
        linears = {key: reader.config().get(key, False) for key in SWITCHES[2:]}
        args = inference_args(reader, model_parallel_size=1, changes=linears)
        model = build_model(args)
        assert any("transformer_engine" in type(part).__module__ for part in model.modules()) == (folder != "native")
        load_weights_from(args, model, reader.folder)
        with torch.no_grad():
            found[folder] = model.eval()(inputs)[..., :128]
    spread = found["native"].std()
    for folder in folders_[1:]:
        assert_close(found[folder] / spread, found["native"] / spread, what=folder)


@requires_te
def test_what_transformer_engine_saved_becomes_native(tmp_path, capsys):
    """A model's own state dict, and the same with `_extra_state` as GPT-NeoX writes it; and the empty ones we write."""
    install_te()
    from megatron.model.transformer_engine import extra_state

    settings = {**settings_of("gqa gated rms"), **dict.fromkeys(SWITCHES, True), "norm": "te_rmsnorm"}
    settings["attention_config"] = None
    layers = random_layers(in_one_process(settings))
    entries = {(index, name) for index, state in layers.items() for name in state if name.endswith("_extra_state")}
    layers = {i: {n: extra_state.NOTHING if (i, n) in entries else t for n, t in s.items()} for i, s in layers.items()}
    write_checkpoint(tmp_path / "ours", layers, settings)
    packed = io.BytesIO()
    torch.save(None, packed)
    theirs = {i: {n: packed if (i, n) in entries else t for n, t in s.items()} for i, s in layers.items()}
    write_checkpoint(tmp_path / "theirs", theirs, settings)
    native = []
    for folder in ("ours", "theirs"):
        capsys.readouterr()
        native.append(convert(tmp_path / folder, tmp_path / f"{folder}_native", "native"))
        assert f"{len(entries)} _extra_state entries of Transformer Engine" in capsys.readouterr().out
    assert_equal(read_all(native[1]), read_all(native[0]))
    assert not any("_extra_state" in name or "qkv." in name for _, _, name in read_all(native[0]))
    again = convert(tmp_path / "ours_native", tmp_path / "again", "te")
    expected = {(0, index, name): tensor for index, state in layers.items() for name, tensor in state.items()}
    assert_equal(read_all(again), expected)


class WithExtraState(torch.nn.Linear):
    """What Transformer Engine 1.12 puts into a state dict beside its weights."""

    def get_extra_state(self):
        return io.BytesIO(b"now")

    def set_extra_state(self, state):
        raise AssertionError("weights alone are taken")


@pytest.mark.parametrize(
    "saved", [None, io.BytesIO(b"longer than now"), torch.zeros(9, dtype=torch.uint8)], ids=("none", "file", "bytes")
)
def test_extra_state_is_no_weight(saved, tmp_path):
    """Loading weights neither compares nor needs it: FP8 on or off, before or now."""
    model = torch.nn.Module()
    model.sequential = torch.nn.ModuleList([WithExtraState(3, 2)])
    state = {"weight": torch.randn(2, 3), "bias": torch.randn(2)}
    layer = state if saved is None else {**state, "_extra_state": saved}
    folder = write_checkpoint(tmp_path, {0: layer}, settings_of("mha"))
    reader = CheckpointReader(folder)
    assert layers_of(model)[0].keys() == state.keys()
    assert weight_problems(model, reader, 0) == []
    fill(model, reader, 0)
    assert torch.equal(model.sequential[0].weight, state["weight"])
    assert len(list(inspection.tensors(reader))) == len(layer)
    model.sequential[0].bias = None
    assert weight_problems(model, reader, 0) == [
        "layer 0 bias: in the checkpoint, but this model has no such parameter"
    ]


# Parts and settings


def switches_of(values):
    return {key: values[key] for key in (*SWITCHES, "norm", "te_fp8_mha", "attention_config") if key in values}


def test_parts_and_the_config_beside_them(tmp_path, capsys):
    """One part after the other, in one direction and back by a config; comments and spelling stay."""
    native_checkpoint("gqa gated rms", tmp_path / "native")
    path = tmp_path / "native" / "global_step5" / "configs" / "tiny.yml"
    settings = json.loads(path.read_text())
    del settings["attention_config"]
    own = '{ # a comment\n "attention-config": [[["flash"], 2]], "te_fp8_wgrad": true,'
    text = own + json.dumps(settings, indent=1)[1:]
    path.write_text(text)
    reader = convert(tmp_path / "native", tmp_path / "a", "te", "--norms")
    assert switches_of(reader.config()) == {"norm": "te_rmsnorm", "attention_config": [[["flash"], 2]]}
    assert form_of(reader.layer_state(2)) == (False, False, True)
    capsys.readouterr()
    reader = convert(tmp_path / "a", tmp_path / "b", "te", "--mha", "--linears")
    told = capsys.readouterr().out
    assert "attention_config: null" in told and "no_load_optim: true or finetune: true" in told
    assert switches_of(reader.config()) == {
        "te_mha": True,
        "norm": "te_rmsnorm",
        "attention_config": None,
        "te_columnparallel": True,
        "te_rowparallel": True,
    }
    assert form_of(reader.layer_state(2)) == (True, False, True)
    extra = {name for name in reader.layer_state(2) if name.endswith("_extra_state")}
    attention = {f"attention.{module}._extra_state" for module in ("qkv", "core_attention", "proj")}
    assert extra == attention | {"mlp.linear1._extra_state", "mlp.linear2._extra_state"}
    assert set(reader.layer_state(6)) == {"final_linear.weight", "final_linear._extra_state"}
    kept = (tmp_path / "b" / "global_step5" / "configs" / "tiny.yml").read_text()
    assert kept == text.replace('[[["flash"], 2]]', "null").replace('"norm": "rmsnorm"', '"norm": "te_rmsnorm"')
    wanted = tmp_path / "wanted.yml"
    wanted.write_text(kept.replace("{", '{"te_mha": true,', 1).replace("te_rmsnorm", "rmsnorm"))
    reader = convert(tmp_path / "b", tmp_path / "c", "native", "--config", wanted)
    assert form_of(reader.layer_state(2)) == (True, False, False)
    assert switches_of(reader.config()) == {"te_mha": True, "norm": "rmsnorm", "attention_config": None}
    final = convert(tmp_path / "c", tmp_path / "d", "native")
    assert_equal(read_all(final), read_all(CheckpointReader(str(tmp_path / "native" / "global_step5"))))


def test_fp8_is_switched_off_with_its_attention(tmp_path):
    settings = {**settings_of("mha"), "attention_config": None, "te_fp8_mha": True, "te_fp8_margin": 3}
    settings["precision"] = "bfloat16"
    native_checkpoint("mha", tmp_path / "native")
    te = convert(tmp_path / "native", tmp_path / "te", "te", "--mha")
    kept = os.path.join(te.folder, "configs")
    for name in os.listdir(kept):
        os.remove(os.path.join(kept, name))
    with open(os.path.join(kept, "model.json"), "w") as file:
        json.dump(settings, file)
    reader = convert(te.folder, tmp_path / "back", "native")
    with open(os.path.join(reader.folder, "configs", "model.json")) as file:
        assert json.load(file) == {**settings, "te_fp8_mha": False, "te_fp8_margin": 0}
    assert form_of(reader.layer_state(2)) == (False, False, False)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("te-mha: true # te-mha: true\n", "te-mha: false # te-mha: true\n"),
        ('{"te_mha": null, "norm": "te_mha"}', '{"te_mha": false, "norm": "te_mha"}'),
        ("te_mha:\n  true\n", None),
        ('{"optimizer": {"te_mha": true}, "te_mha": true}', None),
    ],
)
def test_settings_in_any_spelling(text, expected):
    new, found = with_setting(text, "te_mha", False)
    assert found and (expected is None or new == expected)
    before, after = yaml.safe_load(text), yaml.safe_load(new)
    name = next(key for key in before if key.startswith("te"))
    assert after == {**before, name: False} and list(after) == list(before)
