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
RAW_WIDTHS = dict(heads=4, width=20, hidden=72)


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


def layout_settings(settings, layout=(1, 0)):
    return {**LLAMA_LIKE, **settings, "model_parallel_size": layout[0], "pipe_parallel_size": layout[1]}


def before_job(checkout, ours, out):
    """An export that the unpatched converter of a state gets right: groups of queries since 2025, none before.

    It takes the width of an MLP branch as intermediate_size.
    """
    text = (checkout / converters.PATH).read_text()
    name = "llama quotient gqa" if "transformer_engine" in text else "llama quotient mha"
    settings = {**layout_settings(EXPORTS[name][1], (2, 0)), "intermediate_size": FFN}
    return converters.export_job(ours[name][0][2, 0], settings, out, "llama")


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


@pytest.fixture(scope="session")
def converted(new, state, ours, theirs, tmp_path_factory):
    """{(what, ...): (folder, error or None)} of everything that is converted first, in one process."""
    folder, jobs = tmp_path_factory.mktemp("converted"), {}

    def out(*key):
        return folder / " ".join(str(part) for part in key)

    for name, (architecture, settings) in EXPORTS.items():
        for layout in LAYOUTS:
            key = ("export", name, layout)
            jobs[key] = converters.export_job(
                ours[name][0][layout], layout_settings(settings, layout), out(*key), architecture
            )
    for name, (model, architecture, changes, _) in REFUSED.items():
        settings = {**layout_settings(EXPORTS[model][1]), **changes}
        jobs["refused", name] = converters.export_job(
            ours[model][0][1, 0], settings, out("refused", name), architecture
        )
    for name, (path, _) in theirs.items():
        for tp in (1, 2):
            tied = ["--tied"] if "tied" in name else []
            jobs["import", name, tp] = converters.import_job(path, out("import", name, tp), tp, *tied)
    half = layout_settings(NARROW), out("half"), "llama", "--precision", "bf16"
    jobs["half",] = converters.export_job(ours["llama narrow"][0][1, 0], *half)
    jobs["before",] = before_job(new, ours, out("before"))
    converters.write_raw(folder / "meta", **RAW_WIDTHS)
    jobs["raw",] = converters.raw_job(folder / "meta", out("raw"))
    results = converters.run_jobs(new, list(jobs.values()), folder / "run")
    return {key: (out(*key), result) for key, result in zip(jobs, results, strict=True)}


def test_exports_have_the_logits_of_the_checkpoint(converted, state, ours):
    for name, (_, settings) in EXPORTS.items():
        for layout in LAYOUTS:
            out, error = converted["export", name, layout]
            assert error is None, f"{state} {name} {layout}: {error['traceback']}"
            difference = (converters.their_logits(out) - ours[name][1]).abs().max().item()
            assert difference < ALLOWED, f"{state} {name} {layout}: {difference}"
            config = json.loads((out / "config.json").read_text())
            assert config["head_dim"] == settings.get("head_dim", 16) and config["intermediate_size"] == FFN


def test_imports_have_the_logits_of_the_model(converted, state, theirs):
    for name in IMPORTS:
        out, error = converted["import", name, 1]
        assert error is None, f"{state} {name}: {error['traceback']}"
        settings = out / "neox_settings.yml"
        assert yaml.safe_load(settings.read_text())["no_weight_tying"] == ("tied" not in name)
        difference = (converters.our_logits(out / "0", [str(settings)]) - theirs[name][1]).abs().max().item()
        assert difference < ALLOWED, f"{state} {name}: {difference}"


def test_the_way_back_is_bit_equal(converted, new, state, theirs, tmp_path):
    jobs = {}
    for name, (architecture, *_) in IMPORTS.items():
        for tp in (1, 2):
            out, error = converted["import", name, tp]
            assert error is None, f"{state} {name} {tp}: {error['traceback']}"
            settings = yaml.safe_load((out / "neox_settings.yml").read_text())
            settings.update(tokenizer_type="CharLevelTokenizer", make_vocab_size_divisible_by=128)
            back = architecture if name != "qwen2" else "llama"
            jobs[name, tp] = converters.export_job(out / "0", settings, tmp_path / f"{name} {tp}", back)
    results = converters.run_jobs(new, list(jobs.values()), tmp_path / "run")
    for (name, tp), error in zip(jobs, results, strict=True):
        assert error is None, f"{state} {name} {tp}: {error['traceback']}"
        first, second = HFSource(str(theirs[name][0])), HFSource(str(tmp_path / f"{name} {tp}"))
        added = {tensor for tensor in second.names() if tensor.endswith("o_proj.bias")} if name == "qwen2" else set()
        assert set(first.names()) | added == set(second.names())
        for tensor in first.names():
            assert torch.equal(first.read(tensor), second.read(tensor)), f"{state} {name} {tp}: {tensor}"
        assert not any(second.read(tensor).any() for tensor in added)


def test_exports_that_cannot_be_right_are_refused(converted, state):
    for name, (*_, parts) in REFUSED.items():
        out, error = converted["refused", name]
        assert error is not None and error["error"] == "ConversionError", f"{state} {name}: {error}"
        assert all(part in error["message"] for part in parts), f"{name}: {error['message']}"
        assert not out.exists()


def test_without_head_dim_exports_are_as_before(converted, plain, state, ours, tmp_path):
    (error,) = converters.run_jobs(plain, [before_job(plain, ours, tmp_path / "plain")], tmp_path / "run")
    assert error is None, error["traceback"]
    out, error = converted["before",]
    assert error is None, error["traceback"]
    first, second = HFSource(str(tmp_path / "plain")), HFSource(str(out))
    assert set(first.names()) == set(second.names())
    assert all(torch.equal(first.read(tensor), second.read(tensor)) for tensor in first.names())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "plain", out)]
    one, other = ({key: value for key, value in config.items() if key != "head_dim"} for config in configs)
    assert one == other and configs[1]["head_dim"] == 16


def test_precision_and_raw_files(converted, state):
    out, error = converted["half",]
    assert error is None, error["traceback"]
    source = HFSource(str(out))
    assert {str(source.dtype(name)) for name in source.names()} == {"torch.bfloat16"}

    out, error = converted["raw",]
    assert error is None, error["traceback"]
    heads, width, hidden = RAW_WIDTHS["heads"], RAW_WIDTHS["width"], RAW_WIDTHS["hidden"]
    module = torch.load(out / "global_step0" / "mp_rank_00_model_states.pt")["module"]
    fused = module["sequential.2.attention.query_key_value.weight"].view(heads, 3, width, hidden)
    meta = torch.load(out.parent / "meta" / "mistral-7B-v0.1" / "consolidated.00.pth")
    for part, name in enumerate(("wq", "wk", "wv")):
        rows = meta[f"layers.0.attention.{name}.weight"].view(heads, width, hidden)
        if name != "wv":  # pairs beside each other become pairs half a head apart
            rows = torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)
        assert torch.equal(fused[:, part], rows), f"{state} {name}"
