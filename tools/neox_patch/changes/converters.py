"""tools/ckpts/convert_neox_to_hf.py: heads of any width in Hugging Face's Llama, Mistral and Qwen3 classes."""

import ast
from typing import List, Optional, Sequence, Set

import libcst as cst

from tools.neox_patch import find
from tools.neox_patch.build import add_import, set_keyword
from tools.neox_patch.change import Change, added
from tools.neox_patch.source import AnchorNotFound, Source

PATH = "tools/ckpts/convert_neox_to_hf.py"
KNOWN = ("neox", "llama", "mistral")


def _uses(source: Source) -> None:
    add_import(source, "from megatron.head_dim import hf, hf_export")


def _qwen3(source: Source) -> None:
    _uses(source)
    source.insert_after(
        source.statement(find.assignment_to(source.module, source, 'MODEL_KEYS["mistral"]', "the module")),
        'MODEL_KEYS["qwen3"] = MODEL_KEYS["llama"]',
    )
    for scope in ("convert", "main"):
        _add_choice(source, find.function_named(source, scope))
    create = find.function_named(source, "create_config")
    outer, inner = _branches(source, create)
    name = _architecture(source, create)
    if not find.where_is(outer.test, source, f'{name} == "qwen3"'):
        source.insert_text(source.span(outer.test)[1], f' or {name} == "qwen3"')
    if not find.calls_of(inner, source, "hf_export.qwen3_config"):
        _add_branch(source, inner, name)


def _add_choice(source: Source, function: cst.FunctionDef) -> None:
    """In each list of the architectures (of allowed values, or of a Literal) that lacks it."""
    where = f"def {function.name.value}"
    lists = [node for node in find.every(function, (cst.List, cst.Tuple, cst.Subscript, cst.Set)) if _strings(node)]
    lists = [node for node in lists if set(KNOWN) <= set(_strings(node))]
    if not lists:
        raise AnchorNotFound(f"{source.path}: a list of the architectures {', '.join(KNOWN)} in {where}")
    for node in lists:
        elements = _elements(node)
        if "qwen3" not in _strings(node):
            start, end = source.span(elements[-1])
            alone = source.begins_line(elements[-1])
            source.insert_text(end, f',\n{source.line_before(start)}"qwen3"' if alone else ', "qwen3"')
        _add_to_message(source, node)


def _add_to_message(source: Source, allowed: cst.CSTNode) -> None:
    """What an assertion about the list says of it."""
    while not isinstance(allowed, (cst.Assert, cst.FunctionDef)):
        allowed = source.parent(allowed)
    if isinstance(allowed, cst.Assert) and allowed.msg is not None:
        text = source.code(allowed.msg)
        if "'llama'" in text and "qwen3" not in text:
            source.replace(allowed.msg, text.replace("'llama'", "'llama', 'qwen3'"))


def _elements(node: cst.CSTNode) -> List[cst.BaseExpression]:
    if isinstance(node, cst.Subscript):
        return [part.slice.value for part in node.slice if isinstance(part.slice, cst.Index)]
    return [element.value for element in node.elements]


def _strings(node: cst.CSTNode) -> List[str]:
    """The values of a list of strings; empty for another one."""
    elements = _elements(node)
    plain = all(isinstance(element, cst.SimpleString) for element in elements)
    return [ast.literal_eval(element.value) for element in elements] if plain else []


def _branches(source: Source, create: cst.FunctionDef) -> Sequence[cst.If]:
    """The `if` that tells GPT-NeoX's class from the others, and in it the one that tells those apart."""
    tests = [node for node in find.every(create, cst.If) if node.orelse is not None]
    outer = [
        node
        for node in tests
        if _makes(source, node.body, "LlamaConfig")
        and isinstance(node.orelse, cst.Else)
        and _makes(source, node.orelse, "GPTNeoXConfig")
    ]
    found = find.only(source, "if that tells GPTNeoXConfig from LlamaConfig in create_config", outer)
    chains = [node for node in find.every(found.body, cst.If) if _chain_makes(source, node)]
    return found, find.only(source, "if that tells MistralConfig from LlamaConfig in create_config", chains)


def _makes(source: Source, scope: cst.CSTNode, name: str) -> bool:
    return bool(find.calls_of(scope, source, name))


def _chain_makes(source: Source, node: cst.If) -> bool:
    kinds = ("MistralConfig", "LlamaConfig")
    own = [name for name in kinds if _makes(source, node.body, name)]
    return len(own) == 1 and node.orelse is not None and all(_makes(source, node, name) for name in kinds)


def _architecture(source: Source, function: cst.FunctionDef) -> str:
    """The parameter is a keyword of calls, so its name is a public one."""
    if "architecture" not in find.parameter_names(function):
        raise AnchorNotFound(f"{source.path}: parameter architecture of def {function.name.value}")
    return "architecture"


def _add_branch(source: Source, chain: cst.If, name: str) -> None:
    """Behind the first branch, where an `elif` can be whatever follows."""
    call = next(node for kind in ("MistralConfig", "LlamaConfig") for node in find.calls_of(chain.body, source, kind))
    statement = source.statement(call)
    assigned = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    if not isinstance(assigned, cst.Assign) or assigned.value is not call:
        raise AnchorNotFound(f"{source.path}: hf_config = {source.code(call)} in create_config")
    target, arguments = source.code(assigned.targets[0].target), source.code(call).split("(", 1)[1]
    outside, inside = source.indentation(chain), source.indentation(statement)
    end = source.span(chain.body.body[-1])[0] + len(source.code(chain.body.body[-1]).rstrip().encode())
    end += len(source.line_after(end).encode())
    source.insert_text(
        end, f'\n{outside}elif {name} == "qwen3":\n{inside}{target} = hf_export.qwen3_config({arguments}'
    )


def _settings(source: Source) -> None:
    _uses(source)
    create = find.function_named(source, "create_config")
    outer, _ = _branches(source, create)
    config = find.parameter_names(create)[0]
    made = find.call_of(outer.orelse, source, "GPTNeoXConfig", "create_config")
    stars = [arg.value for arg in made.args if arg.star == "**"]
    name = source.code(find.only(source, "GPTNeoXConfig(**args) in create_config", stars))
    call = f"hf_export.attention_settings({config}, {_architecture(source, create)})"
    source.insert_before(outer, f"{name}.update({call})")


def _split(source: Source) -> None:
    _uses(source)
    function = find.function_named(source, "reshard_and_split_qkv")
    if find.calls_of(function, source, "hf.split_qkv"):
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
    {", ".join(parts)} = hf.split_qkv(
        {states},
        hf.hf_geometry({config}),
    )
    """
    _replace_computing(source, old, text)
    _return_after(source, loop)


def _three_parts(source: Source, loop: cst.For) -> List[str]:
    """The names of q, k and v, as they are handed on with the names that they get."""
    found = []
    for node in find.every(loop.body, (cst.List, cst.Tuple)):
        values = [element.value for element in node.elements]
        in_zip = isinstance(source.parent(node), cst.Arg) and source.code(source.parent(source.parent(node))) != ""
        if len(values) == 3 and all(isinstance(value, cst.Name) for value in values) and in_zip:
            call = source.parent(source.parent(node))
            if isinstance(call, cst.Call) and find.is_code(source, call.func, "zip"):
                found.append([value.value for value in values])
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


def _return_after(source: Source, loop: cst.For) -> None:
    """The loop ended with its first key: it returned what it had just begun to fill."""
    last = loop.body.body[-1]
    if not (isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[0], cst.Return)):
        raise AnchorNotFound(f"{source.path}: return at the end of the loop in def reshard_and_split_qkv")
    name = source.code(last.body[0].value)
    begun = find.only(
        source,
        f"{name} = {{}} in the loop of def reshard_and_split_qkv",
        [node for node in find.assignments_to(loop, source, name) if find.is_code(source, node.value, "{}")],
    )
    source.insert_before(loop, f"{name} = {{}}")
    source.remove_statement(source.statement(begun))
    source.move_out(last)


def _fit(source: Source) -> None:
    _uses(source)
    convert = find.function_named(source, "convert")
    made = find.call_of(convert, source, "create_config", "def convert")
    folder, loaded, *_ = find.parameter_names(convert)
    config = _target(source, made)
    find.function_named(source, "load_partitions")
    if "sequential" not in find.parameter_names(convert):
        raise AnchorNotFound(f"{source.path}: parameter sequential of def convert")
    source.insert_after(
        source.statement(made),
        f"""
        if {_architecture(source, convert)} != "neox":
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


def _target(source: Source, call: cst.Call) -> str:
    """The name that the value of a call is given."""
    assigned = source.parent(call)
    if isinstance(assigned, cst.Assign) and len(assigned.targets) == 1:
        return source.code(assigned.targets[0].target)
    raise AnchorNotFound(f"{source.path}: an assignment of {source.code(call).split('(')[0]}(...) in def convert")


def _keys(source: Source) -> None:
    _uses(source)
    convert = find.function_named(source, "convert")
    config = _target(source, find.call_of(convert, source, "create_config", "def convert"))
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


def _precision(source: Source) -> None:
    main = find.function_named(source, "main")
    parsed = [node for node in find.every(main, cst.Call) if source.code(node.func).endswith(".parse_args")]
    call = find.only(source, "parse_args(...) in def main", parsed)
    set_keyword(
        source, find.call_of(main, source, "convert", "def main"), "precision", f"{_target(source, call)}.precision"
    )


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
    Change(PATH, "export writes head_dim, and refuses what the class chosen cannot say", _settings),
    Change(PATH, "export as Qwen3 (--architecture qwen3), which has norms of queries and keys", _qwen3),
    Change(PATH, "export splits q, k and v by head_dim, and those of a model without GQA head by head", _split),
    Change(PATH, "export takes the MLP width and the attention biases from the weights", _fit),
    Change(PATH, "export names biases and norms of q and k, and refuses to leave a weight out", _keys),
    Change(PATH, "export does as --precision says", _precision),
    Change(PATH, "export finds the MLP's naming in layer files, too", _names_of_layer_files),
]

FILES = [
    added("megatron/head_dim/hf.py", "fused q, k and v <-> those of Hugging Face"),
    added("megatron/head_dim/hf_export.py", "what Hugging Face's classes can say"),
    added("megatron/head_dim/hf_import.py", "YAML keys and parameters of a model of Hugging Face"),
]
