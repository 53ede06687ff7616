"""Every argument keeps GPT-NeoX's name, type and default, is documented, and is classified exactly once."""

import ast
import inspect
import json
import subprocess
import sys
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import List, Literal, Optional, Union, get_args, get_origin

import pytest

from megatron.neox_arguments import render, support
from megatron.neox_arguments.fields import GROUPS, NeoXArgsAttention, defaults

UPSTREAM = json.loads((Path(__file__).parent / "data" / "upstream_args.json").read_text())["args"]
NEW_IN_OLD_GROUPS = {
    "head_dim": Union[int, list, dict, None],
    "softmax_scale": Optional[float],
    "ffn_hidden_size": Optional[int],
    "eod_token": Optional[str],
    "kv_cache_dtype": Optional[Literal["fp8_e4m3", "int8"]],
    "prefill_chunk_size": Optional[int],
    "fused_loss_chunk": Optional[int],
    "log_head_diagnostics": Optional[int],
    "eval_task_folder": Optional[str],
    "eval_num_fewshot": Optional[int],
    "eval_limit": Optional[int],
    "eval_batch_size": Optional[int],
    "perplexity_file": Optional[str],
    "perplexity_stride": Optional[int],
    "compile": Literal[True, False, "auto"],
}
WIDENED = {"rotary_emb_base": "Union[int, float, dict]", "num_kv_heads": "Union[int, list]"}
"""Arguments that take more than GPT-NeoX's do; their old values mean what they meant."""
NEW_CHOICES = {"activation": ["geglu_tanh"]}
"""Choices that GPT-NeoX does not have."""
IN_DEEPSPEED_BLOCKS = """
    loss_scale_window initial_scale_power min_loss_scale grad_accum_dtype tag_validation profile_step module_depth
    top_modules output_file prof_all
""".split()
REPOSITORY = Path(__file__).resolve().parents[2]
CLASSES = {
    "HONOURED": support.HONOURED,
    "NO_EFFECT_ON_RESULTS": support.NO_EFFECT_ON_RESULTS,
    "REFUSED": support.REFUSED,
    "DERIVED": support.DERIVED,
}


def all_fields():
    return {field.name: (group, field) for group in GROUPS for field in fields(group)}


def upstream_type(annotation):
    """Our annotation in the notation of the recorded list, which leaves null out of plain types."""
    if get_origin(annotation) is Union:
        return "Union[" + ", ".join(sorted(upstream_type(kind) for kind in get_args(annotation))) + "]"
    if get_origin(annotation) is Literal:
        return "Literal"
    if get_origin(annotation) is list:
        return f"List[{get_args(annotation)[0].__name__}]"
    return getattr(annotation, "__name__", str(annotation))


def without_null(name):
    """'Union[int, NoneType]' -> 'int'; the order inside a Union does not matter."""
    if not name.startswith("Union["):
        return name
    kinds = sorted(kind for kind in name[len("Union[") : -1].split(", ") if kind != "NoneType")
    return kinds[0] if len(kinds) == 1 else "Union[" + ", ".join(kinds) + "]"


def choices(annotation):
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    literals = [kind for kind in get_args(annotation) if get_origin(kind) is Literal]
    return list(get_args(literals[0])) if literals and get_args(annotation)[-1] is type(None) else None


@pytest.mark.parametrize("name, kind, default, allowed, group", UPSTREAM, ids=[row[0] for row in UPSTREAM])
def test_argument_is_as_in_gpt_neox(name, kind, default, allowed, group):
    owner, field = all_fields()[name]
    assert owner.__name__ == group
    assert field.default == default and type(field.default) is type(default)
    assert without_null(upstream_type(field.type)) == without_null(WIDENED.get(name, kind))
    if allowed is not None:
        assert sorted(choices(field.type)) == sorted([*allowed, *NEW_CHOICES.get(name, [])])


def test_no_argument_is_missing_repeated_or_unexpected():
    names = [field.name for group in GROUPS for field in fields(group)]
    assert len(names) == len(set(names))
    added = set(NEW_IN_OLD_GROUPS) | set(NeoXArgsAttention.__dataclass_fields__)
    assert set(names) == {row[0] for row in UPSTREAM} | added
    for name, kind in NEW_IN_OLD_GROUPS.items():
        assert all_fields()[name][1].type == kind and not all_fields()[name][1].default


def test_groups_are_in_the_order_of_gpt_neox():
    assert [group.__name__ for group in GROUPS if group is not NeoXArgsAttention] == list(
        dict.fromkeys(row[4] for row in UPSTREAM)
    )


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_field_has_a_docstring_of_its_own(group):
    docs = render.field_docstrings(group)
    assert set(docs) == {field.name for field in fields(group)}
    assert all(len(text) > 15 and "TODO" not in text for text in docs.values()), docs
    assert all(text.endswith(".") for text in docs.values()), docs
    assert len(set(docs.values())) == len(docs), "two fields share one text"
    assert inspect.getdoc(group) and "TODO" not in inspect.getdoc(group)


def test_docstrings_name_only_arguments_that_exist():
    known = {*defaults(), *IN_DEEPSPEED_BLOCKS}
    for group in GROUPS:
        for name, text in render.field_docstrings(group).items():
            quoted = [word for word in text.split("`")[1::2] if word.isidentifier() and "_" in word]
            assert set(quoted) <= known, (name, quoted)


def test_the_four_classes_partition_the_arguments():
    assert sum(map(len, CLASSES.values())) == len(defaults())
    assert set().union(*CLASSES.values()) == set(defaults())
    for (first, left), (second, right) in combinations(CLASSES.items(), 2):
        assert not set(left) & set(right), f"{first} and {second} share arguments"


def test_docstrings_agree_with_the_classification():
    for group in GROUPS:
        for name, text in render.field_docstrings(group).items():
            only_default = "Refused unless" in text or "Refused:" in text or "Only true is accepted" in text
            partly = name in ("train_impl", "dataset_impl", "communication_data_type")
            assert only_default == (name in support.REFUSED) or partly, name


def test_reference_is_fresh():
    assert render.REFERENCE.read_text(encoding="utf-8") == render.render(), f"run: {render.COMMAND}"
    assert render.main(["--check"]) == 0


def test_check_finds_a_stale_or_missing_reference(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(render, "REFERENCE", tmp_path / "neox_arguments.md")
    assert render.main(["--check"]) == 1
    assert render.main([]) == 0 and render.main(["--check"]) == 0
    render.REFERENCE.write_text(render.render().replace("head_dim", "head_size"))
    assert render.main(["--check"]) == 1
    assert render.COMMAND in capsys.readouterr().err


def test_reference_shows_every_argument_with_its_status():
    text = render.render()
    for name in defaults():
        entry = text.split(f"### {name}\n")[1].split("\n### ")[0]
        assert f"Status: {support.status(name)}." in entry


def test_rendering_imports_nothing_heavy():
    code = (
        "import sys, megatron.neox_arguments.render as r; r.render(); print({'torch', 'deepspeed'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "set()", run.stderr


def test_types_in_words():
    assert render.type_name(Union[int, List[int]]) == "int or list of int"
    assert render.type_name(Optional[float]) == "float"
    assert render.type_name(Literal["a", "b"]) == "one of `a`, `b`"


def test_sources_of_the_fields_hold_only_declarations():
    """Derived values and checks belong elsewhere: no methods in the group classes."""
    for group in GROUPS:
        body = ast.parse(inspect.getsource(group)).body[0].body
        assert all(isinstance(node, (ast.AnnAssign, ast.Expr)) for node in body)
