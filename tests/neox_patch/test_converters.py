"""The patched converters of real checkouts: their exports in transformers, their imports in this project, and back."""

import json

import pytest
import torch
import yaml

from megatron.convert.hf_source import HFSource
from tests.neox_patch import converters
from tests.neox_patch.converters import EXPORTS, FFN, IMPORTS, LLAMA_LIKE

LAYOUTS = [(1, 0), (1, 1), (2, 0), (2, 1)]
"""Tensor-parallel ranks; sequential or layer files."""
ALLOWED = 1e-4
"""Of logits of order 5, through files."""


@pytest.fixture(scope="session")
def ours(tmp_path_factory):
    """{name: (step's folder by layout, logits)} of the checkpoints to export; made once."""
    folder = tmp_path_factory.mktemp("ours")
    made = {}
    for name, (_, settings) in EXPORTS.items():
        step = converters.write_ours(settings, folder / name / "first")
        steps = {layout: converters.split(step, folder / name / str(layout), *layout) for layout in LAYOUTS}
        made[name] = steps, converters.our_logits(step)
    return made


@pytest.fixture(scope="session")
def theirs(tmp_path_factory):
    """{name: (folder, logits)} of the models to import; made once."""
    folder = tmp_path_factory.mktemp("theirs")
    made = {name: converters.write_theirs(*what, folder / name) for name, what in IMPORTS.items()}
    return {name: (path, converters.their_logits(path)) for name, path in made.items()}


def layout_settings(settings, layout):
    return {**LLAMA_LIKE, **settings, "model_parallel_size": layout[0], "pipe_parallel_size": layout[1]}


def test_exports_have_the_logits_of_the_checkpoint(new, state, ours, tmp_path):
    cells = [(name, layout) for name in EXPORTS for layout in LAYOUTS]
    jobs = []
    for name, layout in cells:
        architecture, settings = EXPORTS[name]
        out = tmp_path / f"{name} {layout[0]} {layout[1]}"
        jobs.append(converters.export_job(ours[name][0][layout], layout_settings(settings, layout), out, architecture))
    results = converters.run_jobs(new, jobs, tmp_path)
    for (name, layout), job, result in zip(cells, jobs, results, strict=True):
        assert result is None, f"{state} {name} {layout}: {result['traceback']}"
        out = job["arguments"][5]
        difference = (converters.their_logits(out) - ours[name][1]).abs().max().item()
        assert difference < ALLOWED, f"{state} {name} {layout}: {difference}"
        with open(f"{out}/config.json") as file:
            config = json.load(file)
        settings = EXPORTS[name][1]
        assert config["head_dim"] == settings.get("head_dim", 16) and config["intermediate_size"] == FFN


def test_imports_and_the_way_back(new, state, theirs, tmp_path):
    cells = [(name, tp) for name in IMPORTS for tp in (1, 2)]
    jobs, back = [], []
    for name, tp in cells:
        tied = ["--tied"] if "tied" in name else []
        jobs.append(converters.import_job(theirs[name][0], tmp_path / f"{name} {tp}", tp, *tied))
    results = converters.run_jobs(new, jobs, tmp_path / "in")
    for (name, tp), result in zip(cells, results, strict=True):
        assert result is None, f"{state} {name} {tp}: {result['traceback']}"
        folder = tmp_path / f"{name} {tp}"
        settings = yaml.safe_load((folder / "neox_settings.yml").read_text())
        assert settings["no_weight_tying"] == ("tied" not in name)
        if tp == 1:
            logits = converters.our_logits(folder / "0", [str(folder / "neox_settings.yml")])
            difference = (logits - theirs[name][1]).abs().max().item()
            assert difference < ALLOWED, f"{state} {name}: {difference}"
        settings["tokenizer_type"], settings["make_vocab_size_divisible_by"] = "CharLevelTokenizer", 128
        architecture = IMPORTS[name][0] if name != "qwen2" else "llama"
        back.append(converters.export_job(folder / "0", settings, tmp_path / f"{name} {tp} back", architecture))
    results = converters.run_jobs(new, back, tmp_path / "out")
    for (name, tp), job, result in zip(cells, back, results, strict=True):
        assert result is None, f"{state} {name} {tp} back: {result['traceback']}"
        first, second = HFSource(str(theirs[name][0])), HFSource(job["arguments"][5])
        added = {tensor for tensor in second.names() if tensor.endswith("o_proj.bias")} if name == "qwen2" else set()
        assert set(first.names()) | added == set(second.names())
        for tensor in first.names():
            assert torch.equal(first.read(tensor), second.read(tensor)), f"{state} {name} {tp}: {tensor}"
        assert not any(second.read(tensor).any() for tensor in added)
