"""Every preset is the published model: widths and parameter count, and a layer of it can be built and run.

The numbers to compare with are in data/preset_geometries.json, with their sources.
"""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron import costs
from megatron.geometry import padded_vocab_size
from megatron.model.gpt2_model import GPT2ModelSequential, build_model
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.loading import parse
from tests.helpers.distributed import run_distributed
from tests.helpers.engines import build_engine, train
from tests.helpers.tolerances import TRAJECTORY

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODELS = json.loads((Path(__file__).parent / "data" / "preset_geometries.json").read_text())["models"]
OTHERS = json.loads((Path(__file__).parent / "data" / "preset_configs.json").read_text())["presets"]
"""Presets of test_presets_families.py."""
DEMO = "demo/qwen3-tiny-cpu.yml"
PROGRESSIVE = "demo/progressive-tiny-cpu.yml"
MODELS_OF_DEMO = {Path(DEMO).name, Path(PROGRESSIVE).name}
OVERLAYS = sorted(path.name for path in (CONFIGS / "demo").glob("*.yml") if path.name not in MODELS_OF_DEMO)
UPSTREAM = {row[0] for row in json.loads((Path(__file__).parent / "data" / "upstream_args.json").read_text())["args"]}


def load(*names, **changes):
    args = NeoXArgs.from_ymls([str(CONFIGS / name) for name in names])
    return args.update(**changes) if changes else args


def one_process(name, **changes):
    """The preset on a single process, which is what a test can build."""
    single = dict(model_parallel_size=1, pipe_parallel_size=0, train_batch_size=None, train_micro_batch_size_per_gpu=1)
    return load(name, **{**single, "gradient_accumulation_steps": 1, **changes})


def test_every_preset_has_a_published_model_beside_it_and_is_in_the_readme():
    found = {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yml")}
    assert {name for name in found if not name.startswith("demo/")} == {*MODELS, *OTHERS}
    readme = (CONFIGS / "README.md").read_text()
    for name in found:
        stem = Path(name).stem if name.startswith(("pythia/", "llama")) or name in OTHERS else Path(name).name
        assert re.search(rf"\b{re.escape(stem)}\b", readme), name


@pytest.mark.parametrize("name", MODELS)
def test_widths_are_the_published_ones(name):
    model, args = MODELS[name], load(name)
    geometry, mlp = args.head_geometry(), args.mlp_geometry()
    assert args.num_layers == model["num_layers"]
    assert geometry.hidden_size == mlp.hidden_size == model["hidden_size"]
    assert (geometry.num_attention_heads, geometry.num_kv_heads) == (
        model["num_attention_heads"],
        model["num_kv_heads"],
    )
    assert geometry.head_dim == model["head_dim"]
    assert geometry.rotary_ndims == model["head_dim"] * model["partial_rotary"]
    assert args.rotary_emb_base == model["rope_theta"] and args.pos_emb == "rotary"
    assert mlp.ffn_hidden_size == model["intermediate_size"]
    assert args.sliding_window_width == model["sliding_window"]
    assert args.no_weight_tying != model["tie_embeddings"]
    assert args.max_position_embeddings == model["max_position_embeddings"] >= args.seq_length
    assert args.attention_scale() == pytest.approx(model["head_dim"] ** -0.5)


@pytest.mark.parametrize("name", MODELS)
def test_the_form_of_a_layer_is_the_published_one(name):
    model, args = MODELS[name], load(name)
    assert (args.norm, args.gpt_j_residual, args.gpt_j_tied) == (model["norm"], model["parallel_residual"], False)
    assert getattr(args, {"layernorm": "layernorm_epsilon", "rmsnorm": "rms_norm_epsilon"}[args.norm]) == pytest.approx(
        model["norm_epsilon"]
    )
    biased = model["norm"] == "layernorm"
    assert (args.use_bias_in_attn_linear, args.use_bias_in_mlp) == (biased, biased)
    assert (args.activation, args.bias_gelu_fusion) == (("gelu", True) if biased else ("swiglu", False))
    assert set(args.attention_config) <= {"auto", "flash", "global"}


@pytest.mark.parametrize("name", MODELS)
def test_parameter_count_is_the_published_one(name):
    """With the published, padded vocabulary, and without the padding with the tokenizer's own."""
    model, args = MODELS[name], load(name)
    published = model["params"]
    rows = padded_vocab_size(model["tokenizer_size"], args.make_vocab_size_divisible_by, args.model_parallel_size)
    assert rows == model["vocab_size"]
    args.padded_vocab_size = model["vocab_size"]
    assert costs.num_parameters(args) == published
    args.padded_vocab_size = model["tokenizer_size"]
    padding = model["vocab_size"] - model["tokenizer_size"]
    matrices = 1 if model["tie_embeddings"] else 2
    assert costs.num_parameters(args) == published - matrices * padding * model["hidden_size"]


@pytest.mark.parametrize("name", MODELS)
def test_the_header_states_the_parameter_count(name):
    text = (CONFIGS / name).read_text()
    assert f"{MODELS[name]['params']:,} parameters" in text.splitlines()[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_of_full_width_builds_and_runs(name, monkeypatch):
    """Shapes only: tensors without memory, so that the largest models fit."""
    monkeypatch.setattr(GPT2ModelSequential, "to", lambda self, device: self)  # such tensors cannot be moved
    model, kind = MODELS[name], load(name).attention_config[0]
    args = one_process(name, num_layers=1, attention_config=[kind], padded_vocab_size=128, seq_length=16)
    with FakeTensorMode():
        built = build_model(args)
        positions = torch.arange(16).expand(1, -1)
        logits = built((torch.zeros(1, 16, dtype=torch.int64), positions))
        shapes = {key.split(".", 2)[2]: tuple(value.shape) for key, value in built.named_parameters() if ".2." in key}
        count = sum(parameter.numel() for parameter in built.parameters())
    hidden, head_dim, width = model["hidden_size"], model["head_dim"], model["intermediate_size"]
    query, kv = model["num_attention_heads"] * head_dim, model["num_kv_heads"] * head_dim
    gated = 2 if args.activation == "swiglu" else 1
    assert tuple(logits.shape) == (1, 16, 128)
    assert shapes["attention.query_key_value.weight"] == (query + 2 * kv, hidden)
    assert shapes["attention.dense.weight"] == (hidden, query)
    assert shapes["mlp.linear1.weight"] == (gated * width, hidden)
    assert shapes["mlp.linear2.weight"] == (hidden, width)
    assert count == costs.num_parameters(args)


@pytest.mark.parametrize("name", [name for name in MODELS if "llama" in name or "mistral" in name])
def test_gpt_neoxs_way_to_write_the_mlp_width_gives_the_same(name):
    width = MODELS[name]["intermediate_size"]
    args = load(name)
    written = args.update(ffn_hidden_size=None, intermediate_size=3 * width)
    assert written.mlp_geometry() == args.mlp_geometry()
    assert str(3 * width) in (CONFIGS / name).read_text()


@pytest.mark.parametrize("name", MODELS)
def test_the_batch_keeps_its_size_on_any_number_of_devices(name):
    args = load(name)
    total, ranks = args.train_batch_size, args.global_num_gpus
    for replicas in (1, 4):
        changed = args.update(global_num_gpus=replicas * ranks)
        assert changed.train_batch_size == total
        assert changed.train_micro_batch_size_per_gpu * changed.gradient_accumulation_steps * replicas == total


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("pythia/") or name == "20B.yml"])
def test_gpt_neox_can_read_the_presets_of_its_own_models(name):
    """It knows every key, and its YAML 1.1 loader finds the same numbers."""
    text = (CONFIGS / name).read_text()
    values = parse(text, name)
    assert set(values) <= UPSTREAM
    assert yaml.load(text, Loader=yaml.FullLoader) == values


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_demo_overlays_merge_with_the_demo_model(overlay):
    base, args = load(DEMO), load(DEMO, f"demo/{overlay}")
    written = yaml.safe_load((CONFIGS / "demo" / overlay).read_text())
    assert args.head_geometry() == base.head_geometry() and args.train_batch_size == base.train_batch_size
    for key, value in written.items():
        assert args.given()[key] == value
    assert set(args.config_files) == {Path(DEMO).name, overlay}


@pytest.mark.parametrize("layout", ["single", "tp2", "pp2", "dp2-zero1", "dp2-zero2"])
def test_demo_layouts_can_be_cut_short(layout):
    args = load(DEMO, f"demo/{layout}.yml", "demo/20-steps.yml")
    assert args.exit_interval == 20
    assert args.global_num_gpus == (1 if layout == "single" else 2)


def _short_run(rank, world_size, ranks):
    """Losses of a few steps of the preset on one batch of random tokens."""
    args = load(PROGRESSIVE, load=None, save=None, seq_length=24, padded_vocab_size=256, train_batch_size=4,
                global_num_gpus=world_size, model_parallel_size=ranks, warmup=0.0)  # fmt: skip
    engine = build_engine(args)
    return [loss for _ in range(4) for loss in train(args, engine, 1)]


def test_progressive_demo(tmp_path):
    """The widths of its schedule; as many parameters as the other demo; it learns, alike at one rank and at two."""
    args, demo = (load(name).update(padded_vocab_size=4096) for name in (PROGRESSIVE, DEMO))
    assert [args.head_geometry(layer).head_dim for layer in range(4)] == [32, 48, 56, 64]  # 32 x 1, 1.41, 1.73, 2
    assert costs.num_parameters(args) == pytest.approx(costs.num_parameters(demo), rel=5e-3)
    assert load(PROGRESSIVE, "demo/20-steps.yml").exit_interval == 20
    (one,) = run_distributed(1, _short_run, 1, tmp_path=tmp_path)
    two, again = run_distributed(2, _short_run, 2, tmp_path=tmp_path)
    assert two == again and two == pytest.approx(one, abs=TRAJECTORY)
    assert one[-1] < one[0] - 0.3


def test_demo_geometry():
    geometry = load(DEMO).head_geometry()
    assert (geometry.query_hidden_size, geometry.kv_hidden_size, geometry.hidden_size) == (384, 128, 192)
