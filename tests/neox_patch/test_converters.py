"""The patched converters of real checkouts: their exports in transformers, their imports in this project, and back."""

import json

import pytest
import torch
import yaml

from megatron.convert.hf_source import HFSource
from tests.helpers.geometries import NARROW
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


REFUSED = {
    "neox": ("llama narrow", "neox", {}, ["head_dim=24", "mistral or qwen3"]),
    "llama no quotient": ("mistral no quotient", "llama", {}, ["hidden_size=80", "num_attention_heads=6", "mistral"]),
    "scale, norms": (
        "llama narrow",
        "llama",
        dict(softmax_scale=0.3, use_qk_layernorm=True),
        ["softmax_scale=0.3", "qk_norm_type=joint"],
    ),
    "qwen3 without norms": ("llama narrow", "qwen3", {}, ["qk_norm_type=None", "per_head"]),
    "llama with norms": ("qwen3 mha biases", "llama", {}, ["qk_norm_type=per_head", "--architecture qwen3"]),
    "other heads": ("llama narrow", "llama", dict(num_attention_heads=8, num_kv_heads=4, head_dim=12), ["head_dim: "]),
    "left out": ("qwen3 mha biases", "llama", dict(qk_norm_type=None), ["attention.k_layernorm.scale", "no place"]),
    "biases left out": ("llama biases", "mistral", {}, ["attention.query_key_value.bias", "no place"]),
    "no whole width": ("llama narrow", "llama", dict(hidden_size=81, head_dim=None), ["set head_dim"]),
}


def test_exports_that_cannot_be_right_are_refused(new, state, ours, tmp_path):
    jobs = []
    for name, (model, architecture, changes, _) in REFUSED.items():
        settings = {**layout_settings(EXPORTS[model][1], (1, 0)), **changes}
        jobs.append(converters.export_job(ours[model][0][1, 0], settings, tmp_path / name, architecture))
    for (name, (*_, parts)), job, result in zip(
        REFUSED.items(), jobs, converters.run_jobs(new, jobs, tmp_path), strict=True
    ):
        assert result is not None and result["error"] == "ConversionError", f"{state} {name}: {result}"
        assert all(part in result["message"] for part in parts), f"{name}: {result['message']}"
        assert not (tmp_path / name).exists(), job


def test_without_head_dim_exports_are_as_before(plain, new, state, ours, tmp_path):
    """What the unpatched converter of a state gets right: groups of queries since 2025, none before."""
    name = (
        "llama quotient gqa" if "transformer_engine" in (plain / converters.PATH).read_text() else "llama quotient mha"
    )
    settings = {**layout_settings(EXPORTS[name][1], (2, 0)), "intermediate_size": FFN}
    step = ours[name][0][2, 0]
    folders = {}
    for checkout, kind in ((plain, "plain"), (new, "new")):
        folders[kind] = tmp_path / kind
        (result,) = converters.run_jobs(
            checkout, [converters.export_job(step, settings, folders[kind], "llama")], tmp_path / f"run {kind}"
        )
        assert result is None, result["traceback"]
    first, second = (HFSource(str(folder)) for folder in folders.values())
    assert set(first.names()) == set(second.names())
    assert all(torch.equal(first.read(tensor), second.read(tensor)) for tensor in first.names())
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders.values()]
    assert {key: value for key, value in configs[0].items() if key != "head_dim"} == {
        key: value for key, value in configs[1].items() if key != "head_dim"
    }


def test_precision_and_raw_files(new, state, ours, tmp_path):
    settings = layout_settings(NARROW, (1, 0))
    out = tmp_path / "half"
    job = converters.export_job(ours["llama narrow"][0][1, 0], settings, out, "llama", "--precision", "bf16")
    heads, width, hidden = 4, 20, 72
    raw = converters.write_raw(tmp_path / "raw", heads, width, hidden)
    results = converters.run_jobs(new, [job, converters.raw_job(tmp_path / "raw", tmp_path / "out")], tmp_path / "run")
    assert results == [None, None], results
    source = HFSource(str(out))
    assert {str(source.dtype(name)) for name in source.names()} == {"torch.bfloat16"}

    module = torch.load(tmp_path / "out" / "global_step0" / "mp_rank_00_model_states.pt")["module"]
    fused = module["sequential.2.attention.query_key_value.weight"].view(heads, 3, width, hidden)
    for part, name in enumerate(("wq", "wk", "wv")):
        rows = raw[f"layers.0.attention.{name}.weight"].view(heads, width, hidden)
        if name != "wv":  # pairs beside each other become pairs half a head apart
            rows = torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)
        assert torch.equal(fused[:, part], rows), f"{state} {name}"
