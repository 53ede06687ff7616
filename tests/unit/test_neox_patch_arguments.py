"""The patch's arguments: fields, checks, their page and presets, in checkouts that are written otherwise too."""

import ast
import difflib
import re
from types import SimpleNamespace

import pytest
import yaml

from megatron.errors import ConfigError
from megatron.geometry import HeadGeometry, MLPGeometry
from megatron.neox_arguments import NeoXArgs
from tests.helpers import geometries
from tests.helpers import neox_patch_edits as edits
from tests.helpers.configs import tiny_args, tiny_values
from tests.helpers.neox_patch_arguments import (
    CHECKS,
    FIELDS,
    FIELDS_OTHERWISE,
    SPELLINGS,
    load_arguments,
    load_placed,
    page_of,
)
from tools.neox_patch.change import FILES, PROJECT
from tools.neox_patch.changes import arguments, documents
from tools.neox_patch.source import AnchorNotFound

NEW = ("head_dim", "softmax_scale", "qk_norm_type")


def patched(path, text):
    """The text with all changes of its file."""
    return edits.patched([change for change in arguments.CHANGES if change.path == path], text)


def patched_page(text):
    for change in documents.TEXTS:
        text = change.edit(text)
    return text


def model_class(text):
    spaces = {}
    exec(text, spaces)
    return spaces["NeoXArgsModel"]


@pytest.mark.parametrize("spelling", [FIELDS, FIELDS_OTHERWISE], ids=["plain", "otherwise"])
def test_fields(spelling):
    after = patched(arguments.FIELDS_PATH, spelling)
    changes = difflib.ndiff(spelling.split("\n"), after.split("\n"))
    assert {line[0] for line in changes} <= {" ", "+"}, "lines are added, and none is changed"
    new, old = model_class(after)(), model_class(spelling)()
    assert [getattr(new, name) for name in NEW] == [None] * 3
    names = list(new.__dataclass_fields__)
    assert sorted(names) == sorted([*old.__dataclass_fields__, *NEW])
    place = names.index("num_kv_heads")
    assert names[place + 1 : place + 3] == ["head_dim", "softmax_scale"]
    assert names[names.index("use_qk_layernorm") + 1] == "qk_norm_type"


def test_fields_have_texts_and_types():
    after = patched(arguments.FIELDS_PATH, FIELDS)
    types = {name: field.type for name, field in model_class(after).__dataclass_fields__.items() if name in NEW}
    assert types["head_dim"] is int and types["softmax_scale"] is float
    assert types["qk_norm_type"].__args__ == ("joint", "per_head")
    entries = dict(re.findall(r"- \*\*(\w+)\*\*.*?\n\n.*?\n\n(.*?)(?=\n- \*\*|\Z)", page_of(after), re.S))
    assert all(entries[name].strip() for name in NEW)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_checks(spelling):
    fields, checks = SPELLINGS[spelling]
    seen = []
    after = patched(arguments.CHECKS_PATH, checks)
    new = load_arguments(patched(arguments.FIELDS_PATH, fields), after, lambda args: seen.append(list(args.log)))
    old = load_arguments(fields, checks, None)
    for kinds in (["global"], ["mamba"]):
        for hidden, heads, length in ((80, 4, 32), (80, 6, 32), (80, 4, 13), (80, 6, 13)):
            values = dict(hidden_size=hidden, num_attention_heads=heads, attention_config=kinds, seq_length=length)
            refused, message = refusal(old, values)
            assert refusal(new, values)[0] == refused, "without head_dim nothing changes"
            one_head = refusal(old, dict(values, num_attention_heads=1))  # whose remainder is 0
            assert refusal(new, dict(values, head_dim=24))[0] == one_head[0], "with head_dim it does not matter"
            if refused and "head" in message:
                assert "head_dim" in refusal(new, values)[1] or spelling == "otherwise"
    assert seen and all(log[-1] == "derived" for log in seen), "after what is derived, before the types"


def refusal(arguments_class, values):
    try:
        arguments_class(**values)
        return False, ""
    except ValueError as error:
        return True, str(error)


def test_the_remainder_reads_as_black_writes_it():
    after = patched(arguments.CHECKS_PATH, CHECKS)
    assert (
        """
        if (
            self.head_dim is None
            and self.hidden_size % self.num_attention_heads != 0
            and not ("mamba" in self.attention_config)
        ):
"""
        in after
    )


@pytest.mark.parametrize(
    "path, text, named",
    [
        (arguments.FIELDS_PATH, FIELDS.replace("num_kv_heads:", "kv_heads:"), "num_kv_heads"),
        (arguments.FIELDS_PATH, FIELDS.replace("use_qk_layernorm", "qk_norm"), "use_qk_layernorm"),
        (arguments.FIELDS_PATH, FIELDS.replace("NeoXArgsModel", "Model"), "NeoXArgsModel"),
        (arguments.FIELDS_PATH, FIELDS.replace("use_mup: bool = False", "head_dim: int = 64"), "NeoXArgsOther"),
        (arguments.FIELDS_PATH, FIELDS.replace("use_mup: bool = False", "head_dim: int = None"), "NeoXArgsOther"),
        (arguments.FIELDS_PATH, FIELDS.replace("use_mup: bool", "softmax_scale: bool"), "softmax_scale"),
        (arguments.FIELDS_PATH, FIELDS.replace("seq_length: int = 32", "head_dim: str = None"), "head_dim: str"),
        (arguments.CHECKS_PATH, CHECKS.replace("self.calculate_derived()\n", "pass\n"), "self.calculate_derived"),
        (arguments.CHECKS_PATH, CHECKS.replace("hidden_size %", "hidden_size //"), "self.hidden_size %"),
        (arguments.CHECKS_PATH, CHECKS.replace("def validate_values", "def check"), "validate_values"),
    ],
)
def test_what_is_not_found_is_named(path, text, named):
    with pytest.raises(AnchorNotFound, match=re.escape(named)) as error:
        patched(path, text)
    assert path in str(error.value)


@pytest.mark.parametrize("spelling", [FIELDS, FIELDS_OTHERWISE], ids=["plain", "otherwise"])
def test_page_is_that_of_the_patched_fields(spelling):
    page = patched_page(page_of(spelling))
    assert page == page_of(patched(arguments.FIELDS_PATH, spelling)) and patched_page(page) == page
    assert page != page_of(spelling)


@pytest.mark.parametrize("old, named", [("NeoXArgsModel", "NeoXArgsModel"), ("**num_kv_heads**", "num_kv_heads")])
def test_page_without_the_place_is_refused(old, named):
    with pytest.raises(AnchorNotFound, match=named):
        patched_page(page_of(FIELDS).replace(old, "other"))


def configured(**values):
    """What the checks of the patch read of arguments whose derived values are there."""
    defaults = dict(
        head_dim=None,
        softmax_scale=None,
        qk_norm_type=None,
        hidden_size=64,
        num_attention_heads=4,
        num_kv_heads=None,
        rotary_pct=1.0,
        pos_emb="rotary",
        use_qk_layernorm=False,
        use_mup=False,
        model_parallel_size=1,
        attention_config=["global", "global"],
    )
    return SimpleNamespace(**{**defaults, **values})


BOTH = [
    *geometries.ALL.values(),
    *[dict(head_dim=value) for value in (24, "24", 24.0, True, 0, -8, [24], {})],
    *[dict(softmax_scale=value) for value in (0.1, 1, "0.1", True, 0, -1.0, float("inf"), float("nan"), [1])],
    *[dict(qk_norm_type=value) for value in ("joint", "per_head", "head", True, 1)],
    dict(qk_norm_type="joint", use_qk_layernorm=True),
    dict(qk_norm_type="per_head", use_qk_layernorm=True),
    dict(head_dim=25),
    dict(head_dim=25, pos_emb="none"),
    dict(head_dim=True, pos_emb="none"),
    dict(head_dim=24, rotary_pct=0.3),
    dict(head_dim=24, rotary_pct=0.25),
    dict(head_dim=24, rotary_pct=0.01),
    dict(head_dim=24, num_attention_heads=3, model_parallel_size=2),
    dict(head_dim=24, num_attention_heads=6, num_kv_heads=4),
    dict(head_dim=24, use_mup=True),
]


@pytest.mark.parametrize("values", BOTH, ids=str)
def test_refuses_what_this_project_refuses(monkeypatch, values):
    problems = load_placed(monkeypatch, "validation").head_dim_problems(configured(**values))
    try:
        tiny_args(**values, global_num_gpus=values.get("model_parallel_size", 1))
    except ConfigError:
        assert problems
    else:
        assert not problems
    for problem in problems:
        assert any(name in problem for name in values)


@pytest.mark.parametrize(
    "values, named",
    [
        (dict(head_dim=24, attention_config=["gmlp", "amlp"]), "head_dim=24: amlp, gmlp"),
        (dict(softmax_scale=0.1, attention_config=["rwkv"]), "softmax_scale=0.1: rwkv"),
        (dict(head_dim=264, attention_config=["global", "flash"]), "head_dim=264: flash"),
        (dict(head_dim=20, attention_config=["flash"]), "head_dim=20: flash"),
        (dict(softmax_scale=0.1, attention_config=["global", "sparse_fixed", "local"]), "0.1: local, sparse_fixed"),
        (dict(softmax_scale=0.1, use_mup=True), "use_mup=True"),
        (dict(softmax_scale=0.1, hidden_size=80, num_attention_heads=6), "set head_dim"),
        (dict(te_mha=True, qk_norm_type="per_head"), "te_mha"),
        (dict(te_fp8_mha=True, use_qk_layernorm=True), "te_mha"),
    ],
)
def test_refuses_what_a_kind_of_layer_cannot_do(monkeypatch, values, named):
    problems = load_placed(monkeypatch, "validation").head_dim_problems(configured(**values))
    assert len(problems) == 1 and named in problems[0]


@pytest.mark.parametrize(
    "values",
    [
        dict(head_dim=[[16, 1], [32, 1]]),
        dict(head_dim=dict(schedule="progressive", base=16, exponent=0.5, multiple_of=2)),
        dict(num_kv_heads=[4, 2]),
    ],
    ids=str,
)
def test_widths_by_layer_are_refused_by_name(monkeypatch, values):
    """What this project takes: tiny_args does not raise."""
    tiny_args(hidden_size=64, num_attention_heads=4, **values)
    ((name, value),) = values.items()
    (problem,) = load_placed(monkeypatch, "validation").head_dim_problems(configured(**values))
    assert problem.startswith(f"{name}={value}: widths by layer are not in GPT-NeoX")


@pytest.mark.parametrize(
    "values",
    [
        dict(hidden_size=80, num_attention_heads=6),  # GPT-NeoX refuses it, or has no such heads
        dict(rotary_pct=0.3),
        dict(num_attention_heads=3, model_parallel_size=2),
        dict(use_mup=True),
        dict(use_qk_layernorm=True),
        dict(hidden_size=None, num_attention_heads=None),
        dict(hidden_size=None, head_dim=24),
        dict(softmax_scale=0.1, hidden_size=80, num_attention_heads=6, attention_config=["mamba", "global"]),
        dict(head_dim=24, attention_config=["gmlp", "global"]),
        dict(head_dim=256, attention_config=["flash"]),
        dict(head_dim=12, attention_config=["local"]),
    ],
    ids=str,
)
def test_leaves_the_rest_to_gpt_neox(monkeypatch, values):
    load_placed(monkeypatch, "validation").check_head_dim(configured(**values))


def test_all_problems_in_one_error(monkeypatch):
    with pytest.raises(ConfigError) as error:
        load_placed(monkeypatch, "validation").check_head_dim(
            configured(head_dim=25, softmax_scale=0.1, use_mup=True, qk_norm_type="per_head", use_qk_layernorm=True)
        )
    assert len(error.value.problems) == 4


@pytest.mark.parametrize("name", geometries.ALL)
def test_geometry_and_scale_are_those_of_this_project(monkeypatch, name):
    config = load_placed(monkeypatch, "config")
    ours, theirs = tiny_args(**geometries.ALL[name]), configured(**geometries.ALL[name])
    assert config.head_geometry(theirs) == ours.head_geometry()
    assert config.softmax_scale(theirs) == ours.attention_scale(), "to the last bit: it is recorded"
    theirs.use_mup = True
    assert config.softmax_scale(theirs) == 1 / ours.head_geometry().head_dim
    theirs.softmax_scale = 0.3
    assert config.softmax_scale(theirs) == 0.3


def test_rotary_dimensions_are_as_ever_without_head_dim(monkeypatch):
    config = load_placed(monkeypatch, "config")
    for rotary_pct, rotated in ((0.01, 0), (0.2, 3), (1.0, 16)):
        plain = dict(hidden_size=64, num_attention_heads=4, pos_emb="rotary", rotary_pct=rotary_pct)
        assert config.head_geometry(configured(**plain)) == HeadGeometry(64, 4, 4, 16, rotated)
        if rotated < 16:
            with pytest.raises(ConfigError, match=f"rotates {rotated} dimensions"):
                config.head_geometry(configured(**plain, head_dim=16))


PUBLISHED = {"0.6B": (28, 1024, 16, 8, 128, 3072), "4B": (36, 2560, 32, 8, 128, 9728)}
"""Layers, hidden size, query heads, key/value heads, head width and MLP width of Qwen3."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_widths(name):
    path = FILES / f"configs/qwen3/{name}.yml"
    preset = yaml.safe_load(path.read_text())
    layers, hidden, heads, kv_heads, width, ffn = PUBLISHED[name]
    assert preset["num_layers"] == layers and preset["qk_norm_type"] == "per_head"
    # This project reads GPT-NeoX's keys by GPT-NeoX's rules.
    neox_args = NeoXArgs.from_ymls([str(path)], dict(global_num_gpus=1, vocab_file="tokenizer.json"))
    assert neox_args.head_geometry() == HeadGeometry(hidden, heads, kv_heads, width, width)
    assert neox_args.mlp_geometry() == MLPGeometry(hidden, ffn, gated=True)


def test_placed_files_are_python_3_8():
    files = [file.origin for file in arguments.FILES + documents.FILES if file.path.endswith(".py")]
    assert PROJECT / "megatron/geometry.py" in files and len(files) > 5
    for file in files:
        ast.parse(file.read_text(), feature_version=(3, 8))


def test_helper_arguments_are_valid():
    assert set(NEW) <= set(NeoXArgs.from_dict(tiny_values()).to_dict()), "the comparison is with the same names"
