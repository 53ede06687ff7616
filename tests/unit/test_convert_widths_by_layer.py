"""Export and import of models whose layers differ in head_dim or num_kv_heads: classes with one head_dim refuse them by
name, and runs of one width are that width."""

import pytest

from megatron.convert.choose import choose_family
from megatron.convert.exporting import export_hf
from megatron.convert.families import FAMILIES
from megatron.convert.families.config_file import config_problems
from megatron.convert.rules import write_out
from megatron.errors import ConversionError
from megatron.neox_arguments import NeoXArgs
from tests.helpers.configs import tiny_args
from tests.helpers.convert_models import PADDED, VOCAB, hf_config
from tests.helpers.resharding import random_layers, settings_of, write_checkpoint

ONE_WIDTH = [name for name, family in FAMILIES.items() if not family.by_layer and name != "mixtral"]
EQUAL_HEADS = dict(gpt_neox=4)
"""Families without grouped queries."""


def args_of(name, **changes):
    """A tiny model that the family holds, with changes."""
    config = hf_config(name, num_key_value_heads=EQUAL_HEADS.get(name, 2))
    settings = {**FAMILIES[name].settings(config), "padded_vocab_size": PADDED}
    assert settings["num_layers"] == 2
    return tiny_args(**{**settings, **changes})


@pytest.mark.parametrize("name", ONE_WIDTH)
def test_a_class_with_one_head_dim_refuses_several(name):
    family = FAMILIES[name]
    assert family.refusals(args_of(name)) == []
    for changes, said in (
        (dict(head_dim=[16, 32]), "head_dim 16 with {m} kv heads in layer 0, head_dim 32 with {m} kv heads in layer 1"),
        (dict(num_kv_heads=[[1, 1], [4, 1]]), "head_dim {d} with 1 kv heads in layer 0, head_dim {d} with 4 kv heads"),
    ):
        geometry = args_of(name).head_geometry()
        args = args_of(name, **changes)
        (problem,) = family.refusals(args)
        (setting, value) = next(iter(changes.items()))
        assert problem.startswith(f"{setting}={value}: ")
        assert said.format(m=geometry.num_kv_heads, d=geometry.head_dim) in problem
        assert f"a {family.architecture} has the same heads in all layers" in problem
        able = [other for other in FAMILIES.values() if other.by_layer]
        assert all(other.model_type in problem for other in able)
        with pytest.raises(ConversionError, match=f"a {family.architecture} cannot hold this model"):
            choose_family(args, architecture=name)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mixtral"])
def test_no_class_has_heads_of_several_widths_in_a_layer(name):
    """Neither those whose layers may differ, even where all layers have the same groups."""
    for layers in (0, [0, 1]):
        args = tiny_args(
            hidden_size=64, num_attention_heads=4, head_dim=[[16, 2], dict(layer=layers, groups=[[16, 2], [32, 2]])]
        )
        problem = FAMILIES[name].refusals(args)[0]
        assert problem.startswith("head_dim=[[16, 2], {'layer': ")
        assert "head_dim 16 with 2 kv heads and head_dim 32 with 2 kv heads in layer" in problem
        assert f"a {FAMILIES[name].architecture} has heads of one width in a layer" in problem


@pytest.mark.parametrize("name", ONE_WIDTH)
def test_runs_of_one_width_are_that_width(name):
    family, plain = FAMILIES[name], args_of(name)
    geometry = plain.head_geometry()
    runs = args_of(name, head_dim=[[geometry.head_dim, 2]], num_kv_heads=[geometry.num_kv_heads] * 2)
    assert family.refusals(runs) == []
    assert family.config(runs, VOCAB) == family.config(plain, VOCAB)
    tables = [write_out(family.rules(args), args, VOCAB) for args in (runs, plain)]
    assert [[line._replace(operation=None) for line in table] for table in tables][0] == [
        line._replace(operation=None) for line in tables[1]
    ]


def test_an_export_leaves_nothing_behind(tmp_path):
    settings = settings_of("mha widths by layer, per_head", tokenizer_type="GPT2BPETokenizer")
    write_checkpoint(tmp_path / "ours", random_layers(NeoXArgs.from_dict(settings)), settings)
    with pytest.raises(ConversionError, match=r"head_dim 20 with 4 kv heads in layers 0, 2, head_dim 12"):
        export_hf(str(tmp_path / "ours"), str(tmp_path / "theirs"), architecture="qwen3", vocab_size=128)
    assert not (tmp_path / "theirs").exists()


def test_what_a_family_with_several_widths_lacks_is_said_first(tmp_path):
    args = NeoXArgs.from_dict(settings_of("mha widths by layer, per_head"))
    with pytest.raises(ConversionError) as error:
        choose_family(args)
    families = [line.rstrip(":") for line in str(error.value).splitlines() if line.endswith(":") and line[0] != " "]
    able = [name for name, family in FAMILIES.items() if family.by_layer]
    assert families[: len(able)] == able and "mixtral" not in families
    assert "norm_placement=pre: a Gemma4ForCausalLM has norm_placement=sandwich" in str(error.value)


@pytest.mark.parametrize(
    "key, value", [("global_head_dim", 512), ("head_dim", [16, 32]), ("num_key_value_heads", [1, 2])]
)
def test_an_import_says_which_families_can(key, value):
    (problem,) = config_problems(dict(model_type="llama", hidden_size=64, num_attention_heads=4, **{key: value}))
    assert problem.startswith(f"{key}={value}: the layers of a llama have the same widths here")
    assert all(name in problem for name, family in FAMILIES.items() if family.by_layer)
