"""tools/head_dim plan: its numbers against megatron.costs and built models, sweeps at equal cost, fits, errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron import costs
from megatron.model.gpt2_model import build_model
from megatron.neox_arguments import NeoXArgs
from tests.helpers.geometries import ALL
from tools.head_dim.__main__ import main
from tools.head_dim.devices import DEVICES

ROOT = Path(__file__).parents[2]
MODEL = dict(
    num_layers=2, **ALL["wide_non_divisible"], ffn_hidden_size=112, pos_emb="rotary", norm="rmsnorm",
    activation="swiglu", seq_length=64, max_position_embeddings=64, padded_vocab_size=128, no_weight_tying=True,
    use_bias_in_attn_linear=False, use_bias_in_mlp=False, train_micro_batch_size_per_gpu=2,
    optimizer={"type": "Adam", "params": {"lr": 1e-3}},
)  # fmt: skip
LARGE = dict(MODEL, num_layers=40, hidden_size=5120, num_attention_heads=64, num_kv_heads=8, head_dim=128,
             ffn_hidden_size=25600, precision="bfloat16", padded_vocab_size=151936, seq_length=4096,
             max_position_embeddings=4096)  # fmt: skip


def plan(capsys, folder, settings, *options):
    """Exit status and the JSON, or what was said on stderr."""
    path = folder / "model.yml"
    path.write_text(yaml.safe_dump(settings))
    status = main(["plan", str(path), *options, "--json"])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else err


def args_of(settings, **changes):
    return NeoXArgs.from_dict({**settings, **changes})


def test_the_numbers_are_those_of_costs(tmp_path, capsys):
    status, report = plan(capsys, tmp_path, MODEL, "--seq", "96", "--batch", "3", "--tp", "2", "--gpus", "4")
    args = args_of(MODEL, seq_length=96, max_position_embeddings=96, model_parallel_size=2, global_num_gpus=4)
    assert status == 0
    geometry = report["geometry"]
    assert [geometry[key] for key in ("query_width", "kv_width", "qkv_width", "seq_length")] == [144, 48, 240, 96]
    assert report["parameters"].pop("total") == costs.num_parameters(args) == sum(report["parameters"].values())
    assert report["flops"]["training"] == costs.flops_per_token(args)
    assert report["kv_cache"]["bytes"] == costs.kv_cache_bytes(args, 3, 96)
    assert report["kv_cache"]["bytes_per_rank"] == costs.kv_cache_bytes(args, 3, 96) / 2
    assert report["memory"]["total"] == costs.memory_per_rank(args).total
    assert "fits" not in report["memory"]


def test_the_page_has_them_too(tmp_path, capsys):
    path = tmp_path / "model.yml"
    path.write_text(yaml.safe_dump(MODEL))
    assert main(["plan", str(path), "--device", "h100"]) == 0
    page = capsys.readouterr().out
    args = args_of(MODEL)
    assert "residual 80 -> QKV 240 -> 6 query heads x 24 = 144, 2 key/value heads x 24 = 48 -> output 144" in page
    for number in (costs.num_parameters(args), costs.kv_cache_bytes_per_token(args)):
        assert f"{number:,}" in page
    assert "It fits on H100" in page


@pytest.mark.parametrize("adjust, within", [("ffn", 1e-3), ("heads", 0.1)])
@pytest.mark.parametrize("equal", ["params", "flops"])
def test_variants_at_equal_cost_really_are(tmp_path, capsys, equal, adjust, within):
    """The parameters are counted on the modules that the variants build."""
    settings = {**MODEL, "num_attention_heads": 12, "num_kv_heads": 4, "ffn_hidden_size": 1120}
    options = ("--sweep", "head_dim=12,24,48", "--at-equal", equal, "--adjust", adjust)
    status, report = plan(capsys, tmp_path, settings, *options)
    assert status == 0
    base = args_of(settings)
    for row in report["variants"]:
        keys = ("head_dim", "num_attention_heads", "num_kv_heads", "ffn_hidden_size")
        variant = args_of(settings, **{key: row[key] for key in keys})
        built = sum(parameter.numel() for parameter in build_model(variant).parameters())
        assert row["parameters"] == built
        cost = costs.num_parameters if equal == "params" else costs.flops_per_token
        assert cost(variant) == pytest.approx(cost(base), rel=within)
    widths = [row["query_width"] for row in report["variants"]]
    assert len(set(widths)) == (3 if adjust == "ffn" else 1)


def test_a_variant_that_is_no_config_has_its_reason(tmp_path, capsys):
    _, report = plan(capsys, tmp_path, MODEL, "--sweep", "head_dim=24,25,-8")
    good, odd, negative = report["variants"]
    assert good["query_width"] == 144 and "problems" not in good
    assert "rotates 25 dimensions" in odd["problems"][0]
    assert "head_dim=-8 must be greater than 0" in negative["problems"][0]


def test_other_settings_can_be_swept(tmp_path, capsys):
    _, report = plan(capsys, tmp_path, MODEL, "--sweep", "num-kv-heads=1,2,3,6")
    cache = [row["kv_bytes_per_token"] for row in report["variants"]]
    assert [size / cache[0] for size in cache] == [1, 2, 3, 6]


BY_LAYER = dict(MODEL, num_layers=4, head_dim=[[24, 3], [40, 1]], num_kv_heads=[2, 2, 2, 6])


def test_widths_by_layer(tmp_path, capsys):
    """Lists in the JSON where layers differ; a line and a row for each kind of them on the page."""
    status, report = plan(capsys, tmp_path, BY_LAYER)
    args, geometry = args_of(BY_LAYER), report["geometry"]
    assert status == 0
    assert geometry["head_dim"] == [24, 24, 24, 40] and geometry["num_kv_heads"] == [2, 2, 2, 6]
    assert geometry["qkv_width"] == [240, 240, 240, 720]
    assert geometry["softmax_scale"] == [args.attention_scale(layer) for layer in range(4)]
    assert geometry["num_attention_heads"] == 6
    assert report["parameters"]["total"] == sum(p.numel() for p in build_model(args).parameters())
    notes = {row["note"] for row in report["backends"] if row["backend"] == "flash" and row["runs"]}
    assert notes <= {""}  # both are multiples of 8
    _, odd = plan(capsys, tmp_path, dict(BY_LAYER, head_dim=[[24, 3], [20, 1]]))
    notes = {row["note"] for row in odd["backends"] if row["backend"] == "flash" and row["runs"]}
    assert notes == {"layer 3: computed at 24, with 4 columns of zeros"}
    (tmp_path / "model.yml").write_text(yaml.safe_dump(BY_LAYER))
    assert main(["plan", str(tmp_path / "model.yml")]) == 0
    page = capsys.readouterr().out
    assert "layers 0-2: residual 80 -> QKV 240 -> 6 query heads x 24 = 144, 2 key/value heads x 24 = 48" in page
    assert "layer 3: residual 80 -> QKV 720 -> 6 query heads x 40 = 240, 6 key/value heads x 40 = 240" in page
    assert f"{costs.num_parameters(args):,}" in page


def test_groups_of_heads_in_a_layer(tmp_path, capsys):
    settings = dict(MODEL, num_layers=3, head_dim=[[24, 3], dict(layer=1, groups=[[10, 4, 2], [40, 2, 1]])])
    status, report = plan(capsys, tmp_path, settings)
    args, geometry = args_of(settings), report["geometry"]
    assert status == 0
    assert geometry["head_dim"] == geometry["rotary_dimensions"] == [24, [10, 40], 24]
    assert geometry["query_width"] == [144, 4 * 10 + 2 * 40, 144] and geometry["num_kv_heads"] == [2, 3, 2]
    assert geometry["groups"] == [[[24, 6, 2]], [[10, 4, 2], [40, 2, 1]], [[24, 6, 2]]]
    assert geometry["softmax_scale"] == [24**-0.5, [10**-0.5, 40**-0.5], 24**-0.5]
    assert report["parameters"]["total"] == sum(p.numel() for p in build_model(args).parameters())
    flash = {row["note"] for row in report["backends"] if row["backend"] == "flash" and row["runs"]}
    assert flash == {"layer 1: computed at 16, with 6 columns of zeros"}
    (te,) = (row for row in report["backends"] if row["backend"] == "te_mha")
    assert not te["runs"] and "gives layer 1 heads of several widths" in te["note"]
    assert main(["plan", str(tmp_path / "model.yml")]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert (
        "layer 1: residual 80 -> QKV 240 -> 4 query heads x 10 + 2 x 40 = 120, 2 key/value heads x 10 + 1 x 40 = 60"
        in page
    )
    assert "10 + 40" in page


def test_a_kernel_that_refuses_one_group_of_heads(tmp_path, capsys):
    groups = [[24, 4, 2], [320, 2, 1]]
    _, report = plan(capsys, tmp_path, dict(MODEL, num_layers=3, head_dim=[[24, 3], dict(layer=1, groups=groups)]))
    row = next(row for row in report["backends"] if (row["backend"], row["device"]) == ("flash", "cuda") and
               row["precision"] == "bfloat16")  # fmt: skip
    assert not row["runs"] and row["note"].startswith("layer 1: ") and "320" in row["note"]


def test_all_layers_with_the_same_groups_are_still_listed(tmp_path, capsys):
    """So that no list of groups can be taken for one of layers."""
    groups = [[10, 4, 2], [40, 2, 1]]
    _, report = plan(capsys, tmp_path, dict(MODEL, head_dim=[[24, 2], dict(layer=[0, 1], groups=groups)]))
    assert report["geometry"]["head_dim"] == [[10, 40], [10, 40]]
    assert report["geometry"]["query_width"] == 120


def test_widths_by_layer_are_swept_and_made_equal(tmp_path, capsys):
    settings = dict(MODEL, num_layers=4)
    sweep = "head_dim=24,[[16,2],[32,2]],{schedule: progressive, base: 14, exponent: 0.5, multiple_of: 2}"
    status, report = plan(capsys, tmp_path, settings, "--sweep", sweep, "--at-equal", "params")
    rows = report["variants"]
    assert status == 0 and [row["head_dim"] for row in rows] == [24, [16, 16, 32, 32], [14, 20, 24, 28]]
    for row, head_dim in zip(rows, (24, [[16, 2], [32, 2]], [14, 20, 24, 28]), strict=True):
        variant = args_of(settings, head_dim=head_dim, ffn_hidden_size=row["ffn_hidden_size"])
        assert row["parameters"] == sum(p.numel() for p in build_model(variant).parameters())
    assert [row["parameters"] for row in rows] == pytest.approx([rows[0]["parameters"]] * 3, rel=2e-3)
    picture = str(tmp_path / "widths.png")
    assert main(["plan", str(tmp_path / "model.yml"), "--sweep", sweep, "--plot", picture]) == 0
    page = capsys.readouterr().out
    assert "16 (layers 0-1)" in page and "32 (layers 2-3)" in page
    _, report = plan(capsys, tmp_path, settings, "--sweep", sweep, "--at-equal", "params", "--adjust", "heads")
    assert "problems" not in report["variants"][0]
    assert "needs one geometry for all layers" in report["variants"][1]["problems"][0]


def test_the_picture(tmp_path, capsys):
    picture = tmp_path / "widths.png"
    plan(capsys, tmp_path, MODEL, "--sweep", "head_dim=12,24", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_and_what_would(tmp_path, capsys):
    """A model of 16 bytes a parameter and more cannot be on one device of 24 GB, and may on many."""
    status, report = plan(capsys, tmp_path, LARGE, "--device", "rtx-4090", "--gpus", "1")
    memory = report["memory"]
    assert (status, memory["fits"], memory["would_fit"]) == (1, False, [])
    assert memory["total"] > 12 * report["parameters"]["total"]
    status, report = plan(capsys, tmp_path, LARGE, "--device", "h200", "--gpus", "64")
    assert status == 1
    layout = report["memory"]["would_fit"][0]
    assert "64 devices" in layout and "zero" in layout


def test_speed_is_the_peak_over_the_operations(tmp_path, capsys):
    _, report = plan(capsys, tmp_path, MODEL, "--device", "a100-80", "--mfu", "0.25")
    expected = 0.25 * DEVICES["a100-80"].bf16_tflops * 1e12 / costs.flops_per_token(args_of(MODEL))
    assert report["flops"]["tokens_per_second_per_device"] == pytest.approx(expected)


def test_backends_say_what_they_do_with_the_width(tmp_path, capsys):
    _, report = plan(capsys, tmp_path, dict(MODEL, head_dim=20))
    rows = {(row["backend"], row["device"], row["precision"]): row for row in report["backends"]}
    assert rows["flash", "cpu", "fp32"]["note"] == "computed at 24, with 4 columns of zeros"
    assert not rows["flash", "cuda", "fp32"]["runs"]
    _, report = plan(capsys, tmp_path, dict(MODEL, head_dim=320))
    rows = {(row["backend"], row["device"], row["precision"]): row for row in report["backends"]}
    assert "head_dim=320" in rows["flash", "cuda", "bfloat16"]["note"]
    assert rows["chunked", "cuda", "bfloat16"]["runs"]


@pytest.mark.parametrize(
    "changes, options, said",
    [
        (dict(padded_vocab_size=None), (), "give --vocab-size"),
        ({}, ("--sweep", "head_dim"), "write a setting and its values"),
        ({}, ("--plot", "x.png"), "give that too"),
        ({}, ("--mfu", "1.5"), "at most 1"),
        ({}, ("--sweep", "head_dims=8,16"), "did you mean head_dim?"),
        ({}, ("--sweep", "head_dim=25,-8"), "--sweep head_dim=-8: head_dim=-8 must be greater than 0"),
        ({}, ("--sweep", "head_dim=12,24", "--plot", "nowhere/x.png"), "there is no folder nowhere"),
        (dict(model_type="qwen3"), (), "from-hf"),
        (dict(head_dim=25), (), "rotates 25 dimensions"),
        ({}, ("--tp", "4", "--gpus", "4"), "num_attention_heads=6 does not divide by model_parallel_size=4"),
    ],
)
def test_errors(tmp_path, capsys, changes, options, said):
    status, text = plan(capsys, tmp_path, {**MODEL, **changes}, *options)
    assert status == 2
    assert said in text


def test_a_vocabulary_that_is_given(tmp_path, capsys):
    _, report = plan(capsys, tmp_path, dict(MODEL, padded_vocab_size=None), "--vocab-size", "1000", "--tp", "2")
    assert report["geometry"]["vocabulary"] == 1024


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "tools.head_dim", "verify", "configs/qwen3/qwen3-0.6B.yml"]
    program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    program.stdout.close()
    assert program.stderr.read() == b"" and program.wait(60) == 0
