"""inspect_checkpoints: what it shows of a checkpoint, and that it finds every difference between two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.errors import CheckpointError
from tests.helpers.plain_model import Plain
from tools.ckpts import inspect_checkpoints as tool

ROOT = Path(__file__).resolve().parents[2]
CONFIG = dict(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=24,
    seq_length=16,
    max_position_embeddings=16,
    pos_emb="rotary",
    rotary_pct=0.5,
    norm="rmsnorm",
    activation="swiglu",
    mlp_multiple_of=8,
    no_weight_tying=True,
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What the tool sets for its own process is put back."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)


def saved(folder, changes=None, config=None, **form):
    """A checkpoint with some weights replaced: {(layer, name): function of the tensor}."""
    model = Plain({**CONFIG, **(config or {})}, 256)
    for key, change in (changes or {}).items():
        model.weights[key] = change(model.weights[key].clone())
    model.save(folder, **form)
    return str(folder)


def rows(text):
    """{place: line}"""
    return {line.split("  ")[0].strip(): line for line in text.splitlines()}


def test_every_tensor_with_shape_dtype_and_ranks(tmp_path, capsys):
    tool.main([saved(tmp_path, tp=2)])
    shown = capsys.readouterr().out
    files = sorted((tmp_path / "global_step7").glob("layer_*-model_00-model_states.pt"))
    tensors = {(path.name[6:8], name): value for path in files for name, value in torch.load(path).items()}
    assert len(tensors) == 2 * 10 + 3
    table = [
        line.split(maxsplit=2) for line in shown.splitlines() if line[:2].isdigit() and line[2] == " " and "[" in line
    ]
    assert {(layer, name): rest for layer, name, rest in table}.keys() == tensors.keys()
    for layer, name, rest in table:
        shape, dtype, ranks = rest.replace(", ", ",").split()
        assert (shape, dtype, ranks) == (str(list(tensors[layer, name].shape)).replace(" ", ""), "float32", "0,1")
    for line in ("iteration: 7", "model_parallel_size: 2", "args.hidden_size: 64", "geometry: from configs/"):
        assert f"  {line}\n" in shown
    for line in ("head_dim: 24", "num_kv_heads: 2", "rotary_ndims: 12", "qkv_layout: per_rank"):
        assert f"  geometry.{line}\n" in shown
    assert f"{2 * sum(value.numel() for value in tensors.values()):,} elements" in shown


def test_a_stamp_is_preferred_and_a_missing_config_is_no_obstacle(tmp_path, capsys):
    folder = saved(tmp_path)
    (tmp_path / "global_step7" / "configs" / "model.yml").unlink()
    tool.main([folder])
    assert "geometry: unknown: " in capsys.readouterr().out
    numbers = '{"hidden_size":64,"num_attention_heads":4,"num_kv_heads":2,"head_dim":%d,"rotary_ndims":12,"version":1}'
    layers = [f'{{"geometry":{numbers % d},"softmax_scale":0.2,"qkv_layout":"per_rank"}}' for d in (24, 32, 24, 8, 16)]
    layers = [*layers[:3], f'{{"groups":[{layers[3]},{layers[4]}]}}']
    (tmp_path / "global_step7" / "head_geometry.json").write_text(f'{{"version":1,"layers":[{",".join(layers)}]}}')
    tool.main([folder])
    shown = capsys.readouterr().out
    assert (
        "geometry: from the stamp" in shown
        and "geometry.softmax_scale: 0.2 (layers 0-2), 0.2 + 0.2 (layer 3)\n" in shown
    )
    assert "geometry.head_dim: 24 (layers 0, 2), 32 (layer 1), 8 + 16 (layer 3)\n" in shown
    assert "geometry.num_kv_heads: 2 (layers 0-2), 2 + 2 (layer 3)\n" in shown
    assert "geometry.hidden_size: 64\n" in shown


@pytest.mark.parametrize("form", [dict(tp=2), dict(sequential=True), dict(tp=2, sequential=True)], ids=str)
def test_equal_weights_are_equal_in_any_layout(form, tmp_path, capsys):
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b", **form)
    tool.main([first, second])
    assert "no differences in 23 tensors" in capsys.readouterr().out


def _add(amount):
    def change(tensor):
        tensor.view(-1)[5] += amount
        return tensor

    return change


QKV = (3, "attention.query_key_value.weight")
DIFFERENCES = {
    "a value": (dict(changes={QKV: _add(0.25)}), "layer 03 rank 0 attention.query_key_value.weight", "0.25"),
    "not a number": (
        dict(changes={QKV: _add(float("nan"))}),
        "layer 03 rank 0 attention.query_key_value.weight",
        "inf",
    ),
    "a shape": (dict(config={"ffn_hidden_size": 96}), "layer 02 rank 0 mlp.linear2.weight", "[64, 96]"),
    "a name": (dict(config={"use_bias_in_mlp": False}), "layer 02 rank 0 mlp.linear1.bias", "absent"),
    "a dtype": (dict(dtype=torch.float16), "layer 05 rank 0 norm.scale", "float16"),
    "a layer": (dict(config={"num_layers": 3}), "layer 04 rank 0 attention.dense.weight", "absent"),
    "rotary_pct": (dict(config={"rotary_pct": 1.0}), "geometry.rotary_ndims", "24"),
    "args": (dict(config={"max_position_embeddings": 32}), "args.max_position_embeddings", "32"),
}


@pytest.mark.parametrize("form", [{}, {"tp": 2}, {"sequential": True}], ids=str)
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_a_difference_is_found(kind, form, tmp_path, capsys):
    other, place, text = DIFFERENCES[kind]
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b", **other, **form)
    with pytest.raises(SystemExit) as end:
        tool.main([f"{first},{second}", "--compare", "--diff"])
    assert end.value.code == 1
    shown = rows(capsys.readouterr().out)
    assert text in shown[place]
    if kind in ("a value", "not a number", "args", "rotary_pct"):  # and nothing else
        assert [line for line in shown if line.startswith(("layer", "args", "geometry"))] == [place]


def test_attributes_of_files(tmp_path, capsys):
    folder = saved(tmp_path, tp=2)
    tool.main([folder, "-a", "args/hidden_size", "np_rng_state/2", "norm.scale"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("layer_05-model_00-model_states.pt norm.scale: tensor [64] float32, mean ")
    assert "mp_rank_01_model_states.pt args/hidden_size: 64" in shown
    assert [line.split(":")[0] for line in shown[2:]] == [
        f"mp_rank_0{rank}_model_states.pt {name}" for rank in (0, 1) for name in ("args/hidden_size", "np_rng_state/2")
    ]
    with pytest.raises(CheckpointError, match="no file of .* has args/head_dim"):
        tool.main([folder, "-a", "args/head_dim"])
    tool.main([str(tmp_path / "global_step7" / "mp_rank_00_model_states.pt")])
    shown = rows(capsys.readouterr().out)
    assert shown["iteration"].endswith("7") and "num_layers" in shown["args"]


def test_command_line(tmp_path):
    """Exit codes, and that a file which would run code is refused."""
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b", tp=2)

    def run(*arguments):
        command = [sys.executable, "tools/ckpts/inspect_checkpoints.py", *arguments]
        environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "4"}  # as inside another job
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)

    done = run(first, second)
    assert (done.returncode, done.stderr) == (0, "")
    assert run(first, "-c").returncode == 2
    torch.save({"norm.scale": print}, tmp_path / "b" / "global_step7" / "layer_05-model_01-model_states.pt")
    failed = run(second)
    assert failed.returncode == 1 and failed.stderr.startswith("error: ") and "is refused" in failed.stderr
