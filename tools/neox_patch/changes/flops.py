"""megatron/logging.py: the operations per second that are logged."""

from typing import List, Set

import libcst as cst

from tools.neox_patch import find
from tools.neox_patch.build import add_import
from tools.neox_patch.change import Change, Features, added
from tools.neox_patch.source import AnchorNotFound, Source, same_statements

PATH = "megatron/logging.py"
ACTUAL, MODEL = "get_actual_flops", "get_forward_backward_flops"
ACTUAL_BEFORE = "get_flops"
"""The name of get_actual_flops before there were two."""
LINE_LENGTH = 88
"""What black, as GPT-NeoX uses it, keeps lines within."""


def _has_model_flops(features: Features) -> bool:
    return f"def {MODEL}(" in features.text(PATH)


def _actual(source: Source) -> None:
    old = [
        node for node in source.module.body if isinstance(node, cst.FunctionDef) and node.name.value == ACTUAL_BEFORE
    ]
    function = old[0] if len(old) == 1 else find.function_named(source, ACTUAL)
    arguments = _arguments(source, function)
    _add_branch(source, function, f"{arguments}, recomputed={arguments}.checkpoint_activations")


def _model(source: Source) -> None:
    function = find.function_named(source, MODEL)
    _add_branch(source, function, _arguments(source, function))


def _arguments(source: Source, function: cst.FunctionDef) -> str:
    names = find.parameter_names(function)
    if not names:
        raise AnchorNotFound(f"{source.path}: parameter of def {function.name.value}, the arguments object")
    return names[0]


def _add_branch(source: Source, function: cst.FunctionDef, given: str) -> None:
    """One more branch before the last one, which counts every model of attention layers."""
    branches = _branches(source, function)
    last = branches[-1]
    target = _counted_name(source, function, branches)
    condition, statement = f"other_query_width({_arguments(source, function)})", f"{target} = head_dim_flops({given})"
    add_import(source, "from megatron.head_dim.flops import head_dim_flops, other_query_width")
    present = [branch for branch in branches[:-1] if find.is_code(source, branch.test, condition)]
    if present:
        body = present[0].body.body
        if not (len(body) == 1 and same_statements([source.code(body[0]).strip()], statement)):
            raise AnchorNotFound(f"{source.path}: {statement} under {condition} in def {function.name.value}")
        return
    space = source.line_before(source.span(last)[0])
    inside = space + source.module.default_indent
    if len(inside + statement) > LINE_LENGTH:
        inner = inside + source.module.default_indent
        statement = f"{target} = head_dim_flops(\n{inner}{given}\n{inside})"
    source.insert_text(_above(source, last), f"{space}elif {condition}:\n{inside}{statement}\n")


def _above(source: Source, last: cst.Else) -> int:
    """The byte position of the line of `else`, or of the comments above it, which are about it."""
    start, _ = source.span(last)
    lines = source.text.encode()[:start].split(b"\n")[: -1 - len(last.leading_lines)]
    return sum(len(line) + 1 for line in lines)


def _branches(source: Source, function: cst.FunctionDef) -> List[cst.CSTNode]:
    """if, elif ... and else of the choice by attention_config."""
    asked = f"{_arguments(source, function)}.attention_config"
    choices = [
        statement
        for statement in function.body.body
        if isinstance(statement, cst.If) and find.where_is(statement.test, source, asked)
    ]
    branch = find.only(source, f"if ... in {asked} in def {function.name.value}", choices)
    branches: List[cst.CSTNode] = [branch]
    while isinstance(branch, cst.If) and branch.orelse is not None:
        branch = branch.orelse
        branches.append(branch)
    if isinstance(branch, cst.If):
        raise AnchorNotFound(f"{source.path}: else of the choice by {asked} in def {function.name.value}")
    return branches


def _counted_name(source: Source, function: cst.FunctionDef, branches: List[cst.CSTNode]) -> str:
    """The local name of the operations per iteration: what every branch gives a value."""
    names: Set[str] = set.intersection(*(_assigned(branch) for branch in branches))
    if len(names) > 1:
        returned = [name.value for node in find.every(function, cst.Return) for name in find.every(node, cst.Name)]
        names &= set(returned)
    if len(names) != 1:
        raise AnchorNotFound(f"{source.path}: the name that each branch of def {function.name.value} gives a value")
    return names.pop()


def _assigned(branch: cst.CSTNode) -> Set[str]:
    return {
        target.target.value
        for node in find.every(branch.body, cst.Assign)
        for target in node.targets
        if isinstance(target.target, cst.Name)
    }


CHANGES = [
    Change(PATH, "operations per second with the widths that head_dim gives", _actual),
    Change(PATH, "the model's operations per second (MFU) likewise", _model, _has_model_flops),
]
FILES = [added("megatron/head_dim/flops.py", "operations of an iteration with the widths that head_dim gives")]
