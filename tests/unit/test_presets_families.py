"""Presets of the families that conversion knows: the model is the one of the published config.json, key by key.

data/preset_configs.json has that config for each preset; tools/head_dim/data/geometries.json the published numbers
with their sources, from another reading.
"""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron import costs
from megatron.checkpointing.model_settings import FUNCTION_SETTINGS
from megatron.convert.families import FAMILIES
from megatron.convert.families.config_file import read_config
from megatron.model.gpt2_model import GPT2ModelSequential, build_model, cross_entropy
from tests.helpers.convert_models import differing_settings
from tools.head_dim import configs, published
from tools.head_dim.subject import Subject, numbers_of
from tools.head_dim.verify import report_on

ROOT = Path(__file__).resolve().parents[2]
PRESETS = json.loads((Path(__file__).parent / "data" / "preset_configs.json").read_text())["presets"]
SMALLEST = {}
"""The narrowest preset of each folder: one layer of it is computed with."""
for _name, _row in sorted(PRESETS.items(), key=lambda item: item[1]["config"]["hidden_size"]):
    SMALLEST.setdefault(Path(_name).parent.name, _name)


def load(name, **changes):
    return configs.load([str(ROOT / "configs" / name)], **changes)


def one_layer(name, number=0):
    """A layer of a preset by itself, on one process, with a small vocabulary."""
    args, here = load(name), slice(number, number + 1)
    geometry, is_local = args.head_geometry(number), args.layer_types[number] == "sliding_attention"
    return load(
        name, num_layers=1, layer_types=args.layer_types[here], model_parallel_size=1, padded_vocab_size=128,
        seq_length=16, precision="fp32", attention_config=None, checkpoint_activations=False,
        no_rope_layers=None if args.no_rope_layers is None else args.no_rope_layers[here],
        head_dim=geometry.head_dim, num_kv_heads=geometry.num_kv_heads,
        sliding_window_width=args.sliding_window_width if is_local else None,
    )  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_the_model_is_that_of_its_config(name):
    """What from-hf makes of the published config.json is what the preset says, setting by setting."""
    args = load(name)
    config = read_config(PRESETS[name]["config"])
    settings = FAMILIES[config.model_type].settings(config)
    wanted = args.from_dict({**settings, "train_micro_batch_size_per_gpu": 1})
    differing = set(differing_settings(args, wanted)) & FUNCTION_SETTINGS - {"seq_length", "tokenizer_type"}
    assert differing == set()
    assert args.padded_vocab_size == config.vocab_size


@pytest.mark.parametrize("name", PRESETS)
def test_geometry_and_parameters_are_the_published_ones(name):
    args, model = load(name), published.named(PRESETS[name]["model"])
    numbers = numbers_of(args)
    report = report_on(Subject("config", name, numbers, args), model)
    assert (report["ok"], report["problems"], report["other_differences"]) == (True, [], [])
    assert published.closest(numbers).name in (model.name, model.name.replace("-3-", "-2-"))
    unused = args.num_layers * 2 * args.hidden_size if args.gpt_j_tied else 0
    assert costs.num_parameters(args) == model.params + unused
    assert f"{model.name}: {model.params:,} parameters." in (ROOT / "configs" / name).read_text().splitlines()[0]


@pytest.mark.parametrize("name", PRESETS)
def test_a_layer_of_full_width_builds_and_runs_without_memory(name, monkeypatch):
    """One of each kind of layers that differ in their widths."""
    monkeypatch.setattr(GPT2ModelSequential, "to", lambda self, device: self)  # such tensors cannot be moved
    for geometry, numbers in load(name).layers_by_geometry().items():
        with FakeTensorMode():
            model = build_model(one_layer(name, numbers[0]))
            positions = torch.arange(16).expand(1, -1)
            logits = model((torch.zeros(1, 16, dtype=torch.int64), positions))
            layer = dict(model.sequential[2].named_parameters())
            shapes = {key: tuple(value.shape) for key, value in layer.items()}
        assert tuple(logits.shape) == (1, 16, 128)
        assert shapes["attention.query_key_value.weight"] == (geometry.qkv_hidden_size, geometry.hidden_size)
        assert shapes["attention.dense.weight"] == (geometry.hidden_size, geometry.query_hidden_size)


@pytest.mark.parametrize("folder", SMALLEST)
def test_a_layer_of_full_width_learns(folder):
    """Forward and backward with real numbers: every parameter that is in use gets a gradient."""
    args = one_layer(SMALLEST[folder])
    model = build_model(args)
    tokens, labels = torch.randint(128, (2, 1, 16), generator=torch.Generator().manual_seed(1))
    loss = cross_entropy(args)(model((tokens, torch.arange(16).expand(1, -1))), (labels, torch.ones(1, 16)))
    loss.backward()
    assert torch.isfinite(loss) and loss.item() > 1
    still = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert [name for name in still if not (args.gpt_j_tied and "post_attention_layernorm" in name)] == []


@pytest.mark.parametrize("name", PRESETS)
def test_what_has_no_source_is_said(name):
    head = [
        line for line in (ROOT / "configs" / name).read_text().splitlines() if line.startswith("# Without a source")
    ]
    fields = published.named(PRESETS[name]["model"]).unverified_fields
    assert all(field in "".join(head) for field in fields)


def test_every_preset_of_these_folders_is_here_and_in_the_readme():
    readme = (ROOT / "configs" / "README.md").read_text()
    for folder in {Path(name).parent.name for name in PRESETS}:
        found = {f"{folder}/{path.name}" for path in (ROOT / "configs" / folder).glob("*.yml")}
        assert found - {"mistral/7B.yml"} == {name for name in PRESETS if name.startswith(f"{folder}/")}
        assert f"`{folder}/`" in readme
    for name in PRESETS:
        assert re.search(rf"\b{re.escape(Path(name).stem)}\b", readme), name


@pytest.mark.parametrize("name", PRESETS)
def test_they_are_plain_yaml(name):
    assert yaml.safe_load((ROOT / "configs" / name).read_text())["num_layers"] > 0
