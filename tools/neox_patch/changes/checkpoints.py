"""megatron/checkpointing.py: the record of the head geometry beside each checkpoint."""

from typing import Optional

import libcst as cst

from tools.neox_patch import find
from tools.neox_patch.build import add_import
from tools.neox_patch.change import Change, added
from tools.neox_patch.source import AnchorNotFound, Source

PATH = "megatron/checkpointing.py"
SAVE, LOAD = "save_ds_checkpoint", "load_checkpoint"
IMPORT = "from megatron.head_dim.stamp import check_head_geometry, write_head_geometry"


def _write(source: Source) -> None:
    """Behind DeepSpeed's own saving: it makes the folder."""
    function = find.function_named(source, SAVE)
    call = _engine_call(source, function, "save_checkpoint")
    folder, tag = _argument(call, "save_dir", 0), _argument(call, "tag", 1)
    if folder is None or tag is None:
        raise AnchorNotFound(f"{source.path}: folder and tag in {source.code(call)} in def {SAVE}")
    add_import(source, IMPORT)
    arguments = _arguments(source, function, "save")
    text = f"write_head_geometry({arguments}, {source.code(folder)}, {source.code(tag)})"
    source.insert_after(source.statement(call), text)


def _check(source: Source) -> None:
    """Before DeepSpeed's own loading: another model's tensors are not read at all."""
    function = find.function_named(source, LOAD)
    call = _engine_call(source, function, "load_checkpoint")
    folder, tag = _argument(call, "load_dir", 0), _argument(call, "tag", 1)
    if folder is None:
        raise AnchorNotFound(f"{source.path}: folder in {source.code(call)} in def {LOAD}")
    add_import(source, IMPORT)
    arguments = _arguments(source, function, "load")
    named = [source.code(node) for node in (folder, tag) if node is not None]
    text = f"check_head_geometry({', '.join([arguments, *named])})"
    source.insert_before(source.statement(call), text)


def _arguments(source: Source, function: cst.FunctionDef, setting: str) -> str:
    """The parameter that is the arguments object: the one that is asked for `setting`."""
    names = [name for name in find.parameter_names(function) if find.where_is(function, source, f"{name}.{setting}")]
    if len(names) != 1:
        raise AnchorNotFound(f"{source.path}: parameter of def {function.name.value} with .{setting}")
    return names[0]


def _engine_call(source: Source, function: cst.FunctionDef, method: str) -> cst.Call:
    """engine.save_checkpoint(...) or engine.load_checkpoint(...), engine being a parameter."""
    found = [
        call for name in find.parameter_names(function) for call in find.calls_of(function, source, f"{name}.{method}")
    ]
    return find.only(source, f"model.{method}(...) in def {function.name.value}", found)


def _argument(call: cst.Call, name: str, place: int) -> Optional[cst.BaseExpression]:
    """An argument that is given by its name or, if all before it are too, by its place."""
    named = find.keyword(call, name)
    if named is not None:
        return named.value
    plain = [arg for arg in call.args if arg.keyword is None and not arg.star]
    return plain[place].value if len(plain) > place else None


CHANGES = [
    Change(PATH, "head_geometry.json is written beside each checkpoint", _write),
    Change(PATH, "a checkpoint of another head geometry is refused before it is read", _check),
]
FILES = [added("megatron/head_dim/stamp.py", "the record of the head geometry beside a checkpoint, and its check")]
