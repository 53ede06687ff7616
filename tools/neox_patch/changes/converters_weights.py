"""tools/ckpts/convert_neox_to_hf.py: how weights are taken from a checkpoint and split."""

from typing import List, Optional, Sequence, Set

import libcst as cst

from tools.neox_patch import find
from tools.neox_patch.change import Change
from tools.neox_patch.changes.converters import PATH, architecture_of, target_of, use_placed
from tools.neox_patch.source import AnchorNotFound, Source


def _split(source: Source) -> None:
    use_placed(source)
    function = find.function_named(source, "reshard_and_split_qkv")
    if find.calls_of(function, source, "hf_heads.split_qkv"):
        return
    where = "def reshard_and_split_qkv"
    _, config, ranks, *_ = find.parameter_names(function) + ["", ""]
    loops = [node for node in find.every(function, cst.For) if find.calls_of(node, source, "get_state")]
    loop = find.only(source, f"for that calls get_state in {where}", loops)
    states = source.code(find.call_of(loop, source, "get_state", where))
    if not ranks or ranks not in states:
        raise AnchorNotFound(f"{source.path}: get_state of the third parameter in {where}")
    parts = _three_parts(source, loop)
    old = _computing(source, loop, parts)
    _check_unused_elsewhere(source, loop, old, parts)
    text = f"""
    {", ".join(parts)} = hf_heads.split_qkv(
        {states},
        hf_heads.hf_geometry({config}),
    )
    """
    _replace_computing(source, old, text)
    _return_after(source, function, loop)


def _three_parts(source: Source, loop: cst.For) -> List[str]:
    """The names of q, k and v, as they are handed on with the names that they get."""
    handed = [arg.value for call in find.calls_of(loop.body, source, "zip") for arg in call.args]
    lists = [node for node in handed if isinstance(node, (cst.List, cst.Tuple)) and len(node.elements) == 3]
    values = [[element.value for element in node.elements] for node in lists]
    found = [[value.value for value in three] for three in values if all(isinstance(v, cst.Name) for v in three)]
    return find.only(source, "zip(names, [q, k, v]) in def reshard_and_split_qkv", found)


def _computing(source: Source, loop: cst.For, parts: Sequence[str]) -> List[cst.SimpleStatementLine]:
    """The assignments of the loop that q, k and v come from."""
    needed, found = set(parts), []
    for line in reversed(loop.body.body):
        targets = _assigned(line)
        if targets and targets <= needed | set(parts) and targets & needed:
            needed |= _names(source, line)
            found.append(line)
    if not any(find.calls_of(line, source, "get_state") for line in found):
        raise AnchorNotFound(f"{source.path}: {', '.join(parts)} made of get_state(...) in def reshard_and_split_qkv")
    return found[::-1]


def _assigned(line: cst.CSTNode) -> Set[str]:
    """Names that a statement assigns to, if that is all it does."""
    if not isinstance(line, cst.SimpleStatementLine) or not all(isinstance(part, cst.Assign) for part in line.body):
        return set()
    targets = [target.target for part in line.body for target in part.targets]
    names = [element.value for target in targets if isinstance(target, cst.Tuple) for element in target.elements]
    names += [target for target in targets if not isinstance(target, cst.Tuple)]
    return {name.value for name in names} if all(isinstance(name, cst.Name) for name in names) else set()


def _names(source: Source, node: cst.CSTNode) -> Set[str]:
    return {name.value for name in find.every(node, cst.Name)}


def _check_unused_elsewhere(source: Source, loop: cst.For, old: Sequence[cst.CSTNode], parts: Sequence[str]) -> None:
    """What stays must not use what goes, nor what q, k and v were on the way."""
    gone = {name for line in old for name in _assigned(line)} - set(parts)
    between = loop.body.body[_place(loop, old[0]) : _place(loop, old[-1])]
    for line in loop.body.body:
        used = _names(source, line) & (gone | (set(parts) if any(line is other for other in between) else set()))
        if used and not any(line is other for other in old):
            raise AnchorNotFound(
                f"{source.path}: def reshard_and_split_qkv without a statement of its own that uses "
                f"{', '.join(sorted(used))}: {source.code(line).strip().splitlines()[0]!r}"
            )


def _place(loop: cst.For, line: cst.CSTNode) -> int:
    return next(number for number, other in enumerate(loop.body.body) if other is line)


def _replace_computing(source: Source, old: Sequence[cst.SimpleStatementLine], text: str) -> None:
    """The first becomes `text`; the others go with the comments above them."""
    source.replace_statement(old[0], text)
    for line in old[1:]:
        source.remove_statement(line, with_comments=True)


def _return_after(source: Source, function: cst.FunctionDef, loop: cst.For) -> None:
    """The loop ended with its first key: it returned what it had just begun to fill."""
    where = "def reshard_and_split_qkv"
    returned = find.only(source, f"return in {where}", find.every(function, cst.Return))
    name, line = source.code(returned.value), source.statement(returned)
    begun = [node for node in find.assignments_to(function, source, name) if find.is_code(source, node.value, "{}")]
    begin = source.statement(find.only(source, f"{name} = {{}} in {where}", begun))
    if begin in loop.body.body:
        source.insert_before(loop, f"{name} = {{}}")
        source.remove_statement(begin)
    if line is loop.body.body[-1]:
        source.move_out(line)
    elif line not in function.body.body:
        raise AnchorNotFound(f"{source.path}: return at the end of the loop, or after it, in {where}")


def _fit(source: Source) -> None:
    use_placed(source)
    convert = find.function_named(source, "convert")
    made = find.call_of(convert, source, "create_config", "def convert")
    folder, loaded, *_ = find.parameter_names(convert)
    config = target_of(source, made)
    find.function_named(source, "load_partitions")
    if "sequential" not in find.parameter_names(convert):
        raise AnchorNotFound(f"{source.path}: parameter sequential of def convert")
    source.insert_after(
        source.statement(made),
        f"""
        if {architecture_of(source, convert)} != "neox":
            hf_export.fit_to_checkpoint(
                {config},
                {loaded},
                {folder},
                load_partitions(
                    {folder}, 1, layer_idx=2, sequential=sequential
                )[0],
            )
        """,
    )


def _keys(source: Source) -> None:
    use_placed(source)
    convert = find.function_named(source, "convert")
    config = target_of(source, find.call_of(convert, source, "create_config", "def convert"))
    name, naming = _chosen_keys(source, convert)
    source.replace(naming.value, f"hf_export.with_attention_keys({_inner_code(source, naming.value)}, {config})")
    block = find.only(
        source,
        f'if "GQA_QKV_KEYS" in {name} in def convert',
        [node for node in find.every(convert, cst.If) if find.is_code(source, node.test, f'"GQA_QKV_KEYS" in {name}')],
    )
    call = find.call_of(block, source, "reshard_and_split_qkv", "def convert")
    layer, ranks, sequential = (
        source.code(find.keyword_value(source, call, keyword, "reshard_and_split_qkv(...)"))
        for keyword in ("layer_idx", "loaded_tp_ranks", "sequential")
    )
    source.insert_before(source.statement(call), f"hf_export.refuse_unused({ranks}[0], {name}, {layer}, {sequential})")


def _chosen_keys(source: Source, convert: cst.FunctionDef):
    """The name of the dictionary of parameters, and the assignment that narrows it to the naming of the MLP."""
    found = []
    for node in find.every(convert, cst.Assign):
        name = source.code(node.targets[0].target)
        inner = _inner(source, node.value)
        if isinstance(inner, cst.Subscript) and find.is_code(source, inner.value, name):
            found.append(node)
    assigned = find.only(source, "ARCH = ARCH[mlp_naming] in def convert", found)
    return source.code(assigned.targets[0].target), assigned


def _inner(source: Source, value: cst.BaseExpression) -> cst.BaseExpression:
    """Without the call that is put around it."""
    if isinstance(value, cst.Call) and find.is_code(source, value.func, "hf_export.with_attention_keys"):
        return value.args[0].value
    return value


def _inner_code(source: Source, value: cst.BaseExpression) -> str:
    return source.code(_inner(source, value))


def _names_of_layer_files(source: Source) -> None:
    """Files of single layers have no "module"; the states of 2024 look for it there."""
    function = find.function_named(source, "get_mlp_naming_convention")
    found = [
        node
        for node in find.every(function, cst.Subscript)
        if find.is_code(source, node, f'{source.code(node.value)}["module"]') and not _guarded(source, node)
    ]
    if found:
        states = find.parameter_names(function)[0]
        first = function.body.body[1 if function.get_docstring() is not None else 0]
        source.insert_before(first, f'{states} = [state.get("module", state) for state in {states}]')
    for node in found:
        source.replace(node, source.code(node.value))


def _guarded(source: Source, node: cst.CSTNode) -> bool:
    """Whether it is looked whether there is one."""
    below: Optional[cst.CSTNode] = None
    while not isinstance(node, cst.FunctionDef):
        if isinstance(node, (cst.If, cst.IfExp)) and below is not node.test:
            return True
        below, node = node, source.parent(node)
    return False


CHANGES = [
    Change(PATH, "export splits q, k and v by head_dim, and those of a model without GQA head by head", _split),
    Change(PATH, "export takes the MLP width and the attention biases from the weights", _fit),
    Change(PATH, "export names biases and norms of q and k, and refuses to leave a weight out", _keys),
    Change(PATH, "export finds the MLP's naming in layer files, too", _names_of_layer_files),
]
