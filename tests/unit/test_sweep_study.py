"""tools/head_dim sweep: what a study may say, and the models that it comes to."""

import pytest
import yaml

from megatron import costs
from megatron.errors import ConfigError
from megatron.model.gpt2_model import build_model
from megatron.neox_arguments import NeoXArgs
from tests.helpers.geometries import ALL
from tools.head_dim.sweep.plan import plan, runs
from tools.head_dim.sweep.study import load_study, study_of

MODEL = dict(
    num_layers=2, **ALL["wide_non_divisible"], ffn_hidden_size=512, pos_emb="rotary", norm="rmsnorm",
    activation="swiglu", seq_length=64, max_position_embeddings=64, no_weight_tying=True,
    use_bias_in_attn_linear=False, use_bias_in_mlp=False, train_batch_size=2, train_iters=100,
    tokenizer_type="CharLevelTokenizer", data_path="nowhere/text_document",
    optimizer={"type": "Adam", "params": {"lr": 1e-3, "eps": 1e-8}},
)  # fmt: skip


def study(**contents):
    return study_of({"base": MODEL, "vary": {"head_dim": [12, 24]}, **contents})


def problems(**contents):
    with pytest.raises(ConfigError) as raised:
        study(**contents)
    return raised.value.problems


def test_all_combinations_and_dotted_names():
    found = study(
        vary={"head_dim": [12, 24], "optimizer.params.lr": [1e-3, 3e-3]}, settings={"optimizer.params.eps": 1e-6}
    )
    assert [variant.name for variant in found.variants] == [
        "head_dim 12, lr 0.001", "head_dim 12, lr 0.003", "head_dim 24, lr 0.001", "head_dim 24, lr 0.003",
    ]  # fmt: skip
    settings = found.settings_of(found.variants[1])
    assert settings["head_dim"] == 12
    assert settings["optimizer"] == {"type": "Adam", "params": {"lr": 3e-3, "eps": 1e-6}}
    assert found.settings["optimizer"]["params"]["lr"] == 1e-3, "what variants share was changed"
    assert MODEL["optimizer"]["params"] == {"lr": 1e-3, "eps": 1e-8}, "the base was changed"


def test_a_file_with_base_files_named_variants_and_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.yml").write_text(yaml.safe_dump({**MODEL, "seed": 5, "save": "runs/mine"}))
    contents = {
        "base": ["model.yml"],
        "data": {"source": "a.txt,b.txt", "vocab_size": 300},
        "variants": [{"name": "as it is"}, {"name": "wide", "settings": {"head_dim": 48}}],
        "baseline": "wide",
        "seeds": [3, 1],
    }
    (tmp_path / "narrow or wide.yml").write_text(yaml.safe_dump(contents))
    found = load_study(str(tmp_path / "narrow or wide.yml"))
    assert (found.name, found.baseline, found.seeds) == ("narrow or wide", "wide", (3, 1))
    assert [found.settings_of(variant)["head_dim"] for variant in found.variants] == [24, 48]
    assert (found.data.source, found.data.vocab_size, found.data.max_bytes) == ("a.txt,b.txt", 300, None)
    assert "data_path" not in found.settings and "tokenizer_type" not in found.settings, "they follow from the data"
    assert "seed" not in found.settings and "save" not in found.settings, "the sweep sets them"


def test_paths_are_found_from_the_folder_of_the_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    named = {"vocab_file": "vocab.json", "train_data_paths": ["a/text", "/b/text"]}
    found = study(settings=named)
    settings = found.settings_of(found.variants[0])
    assert settings["data_path"] == str(tmp_path / "nowhere/text_document")
    assert settings["vocab_file"] == str(tmp_path / "vocab.json")
    assert settings["train_data_paths"] == [str(tmp_path / "a/text"), "/b/text"]
    found = study(settings={"vocab_file": "EleutherAI/name-on-a-hub"})
    assert found.settings_of(found.variants[0])["vocab_file"] == "EleutherAI/name-on-a-hub"


WRONG = {
    "an unknown key": (dict(adjsut="x"), "adjsut: is no key here; did you mean adjust?"),
    "nothing varied": (dict(vary=None), "either vary"),
    "two ways to vary": (dict(variants=[{"name": "a"}]), "either vary"),
    "no list of values": (dict(vary={"head_dim": 8}), "vary: head_dim=8: must be a list"),
    "an empty list": (dict(vary={"head_dim": []}), "vary: head_dim=[]: must be a list"),
    "the same twice": (dict(vary={"head_dim": [8, 8]}), "would share a folder"),
    "a seed twice": (dict(seeds=[1, 1]), "seeds=[1, 1]"),
    "no seed": (dict(seeds=[]), "seeds=[]"),
    "a seed that is none": (dict(seeds=[True]), "seeds=[True]"),
    "seeds that are no list": (dict(seeds=3), "seeds=3"),
    "an unknown baseline": (dict(baseline="head_dim 13"), "which are head_dim 12, head_dim 24"),
    "another equality": (dict(at_equal="time"), "at_equal='time': must be params or flops"),
    "another adjustment": (dict(adjust="hidden_size"), "adjust='hidden_size': must be"),
    "a tolerance over 1": (dict(tolerance=5), "tolerance=5"),
    "the sweep's own key": (dict(settings={"save": "x"}), "save: is set by the sweep"),
    "the seed as a setting": (dict(vary={"seed": [1, 2]}), "seed: is set by the sweep for each run; use seeds"),
    "a variant without a name": (dict(vary=None, variants=[{"settings": {}}]), "number 1 must be"),
    "a variant's other key": (dict(vary=None, variants=[{"name": "a", "head_dim": 8}]), "number 1 must be"),
    "data twice": (dict(data="pydocs", settings={"data_path": "x"}), "follows from `data`"),
    "an unknown key of data": (dict(data={"source": "pydocs", "vocab": 3}), "data: vocab: is no key here"),
    "data of no size": (dict(data={"source": "pydocs", "max_bytes": 0}), "max_bytes=0"),
    "data without a source": (dict(data={"max_bytes": 5}), "must name a text"),
    "no data": (dict(base={"num_layers": 2}), "there is no data"),
    "a base file that is missing": (dict(base=["nowhere.yml"]), "base: nowhere.yml: no such config file"),
    "a base that is neither": (dict(base=3), "base=3"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case):
    contents, told = WRONG[case]
    assert any(told in problem for problem in problems(**contents)), problems(**contents)


def test_problems_are_told_together():
    assert len(problems(seeds=[1, 1], at_equal="time", nonsense=1)) == 3


def test_a_study_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.yml"):
        load_study(str(tmp_path / "nowhere.yml"))
    (tmp_path / "list.yml").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="list.yml"):
        load_study(str(tmp_path / "list.yml"))


WIDTHS = [12, 24, 48, [[12, 1], [40, 1]]]


@pytest.mark.parametrize("at_equal", ["params", "flops"])
def test_variants_cost_the_same_within_a_percent(at_equal):
    """Parameters are those of the modules that each variant's settings build, FLOPs those of its config."""
    planned = plan(study(vary={"head_dim": WIDTHS}, at_equal=at_equal, baseline="head_dim 24"), {})
    args = [NeoXArgs.from_dict({**each.settings, "padded_vocab_size": 512}) for each in planned]
    built = [sum(parameter.numel() for parameter in build_model(each).parameters()) for each in args]
    flops = [costs.flops_per_token(each) for each in args]
    assert [each.parameters for each in planned] == built and [each.flops_per_token for each in planned] == flops
    wanted = built if at_equal == "params" else flops
    assert wanted == pytest.approx([wanted[1]] * len(WIDTHS), rel=0.01)
    assert planned[1].settings["ffn_hidden_size"] == 512, "the baseline was adjusted"
    assert [each.widths["head_dim"] for each in planned] == [12, 24, 48, [12, 40]]
    assert planned[0].widths["query_width"] == 72


def test_layers_with_groups_of_heads():
    mixed = [[24, 2], {"layer": 1, "groups": [[16, 3], [32, 3]]}]
    varied = dict(vary={"head_dim": [24, mixed]}, settings={"num_kv_heads": None}, at_equal="params")
    planned = plan(study(**varied), {})
    args = NeoXArgs.from_dict({**planned[1].settings, "padded_vocab_size": 512})
    assert sum(parameter.numel() for parameter in build_model(args).parameters()) == planned[1].parameters
    assert planned[1].parameters == pytest.approx(planned[0].parameters, rel=0.01)
    assert planned[1].widths["head_dim"] == [24, (16, 32)] and planned[1].widths["query_width"] == 144


def test_equal_by_heads_and_the_tolerance():
    varied = dict(vary={"head_dim": [12, 24]}, baseline="head_dim 24", at_equal="params", adjust="num_attention_heads")
    planned = plan(study(**varied), {})
    assert planned[0].widths["num_attention_heads"] == 12 and planned[0].widths["num_kv_heads"] == 4
    assert planned[0].parameters == planned[1].parameters
    varied["vary"] = {"head_dim": [20, 24]}  # 144 is no multiple of 20
    with pytest.raises(ConfigError, match="head_dim 20: adjust=num_attention_heads.*tolerance=0.01"):
        plan(study(**varied), {})
    assert plan(study(**varied, tolerance=0.1), {})[0].widths["num_kv_heads"] == 2


def test_unequal_variants_stay_as_they_are():
    planned = plan(study(vary={"head_dim": [12, 24]}), {})
    assert [each.settings["ffn_hidden_size"] for each in planned] == [512, 512]
    assert planned[0].parameters < planned[1].parameters


def test_problems_of_all_variants_are_told():
    with pytest.raises(ConfigError) as raised:
        plan(study(vary={"head_dim": [0, 24, -3]}), {})
    told = raised.value.problems
    assert any(problem.startswith("head_dim 0: ") for problem in told)
    assert any(problem.startswith("head_dim -3: ") for problem in told)
    assert not any(problem.startswith("head_dim 24") for problem in told)
    with pytest.raises(ConfigError, match="train_iters is not set"):
        plan(study(settings={"train_iters": None}), {})
    with pytest.raises(ConfigError, match="attention alone costs more"):
        plan(study(vary={"head_dim": [24, 512]}, at_equal="params"), {})


def test_runs_have_their_own_seed_and_folders():
    found = study(seeds=[5, 7])
    all_runs = runs(found, plan(found, {}))
    assert [(run.variant.name, run.seed) for run in all_runs] == [
        ("head_dim 12", 5), ("head_dim 24", 5), ("head_dim 12", 7), ("head_dim 24", 7),
    ]  # fmt: skip
    assert len({run.folder for run in all_runs}) == 4
    config = all_runs[3].config
    assert config["seed"] == 7 and config["head_dim"] == 24 and config["log_dir"] == all_runs[3].folder
    assert config["save"] == config["load"] and config["save"].startswith(all_runs[3].folder)
    assert (config["log_interval"], config["eval_interval"], config["log_head_diagnostics"]) == (2, 10, 25)
    longer = plan(study(vary={"train_iters": [100, 400]}), {})
    assert [each.settings["log_interval"] for each in longer] == [2, 8]
    kept = runs(found, plan(study(settings={"log_interval": 7, "log_head_diagnostics": None}), {}))[0].config
    assert kept["log_interval"] == 7 and kept["log_head_diagnostics"] is None
