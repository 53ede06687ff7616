"""tools/ckpts/convert_neox_to_hf.py: what Hugging Face's classes are told of heads of any width."""

import ast
from typing import List, Sequence

import libcst as cst

from tools.neox_patch import find
from tools.neox_patch.build import add_import, set_keyword
from tools.neox_patch.change import Change, added
from tools.neox_patch.source import AnchorNotFound, Source

PATH = "tools/ckpts/convert_neox_to_hf.py"
KNOWN = ("neox", "llama", "mistral")


def use_placed(source: Source) -> None:
    """Import what the patch places."""
    add_import(source, "from megatron.head_dim import hf_export, hf_heads")


def _qwen3(source: Source) -> None:
    use_placed(source)
    source.insert_after(
        source.statement(find.assignment_to(source.module, source, 'MODEL_KEYS["mistral"]', "the module")),
        'MODEL_KEYS["qwen3"] = MODEL_KEYS["llama"]',
    )
    _add_choice(source, find.function_named(source, "main"))
    _add_choice(source, find.function_named(source, "convert"), optional=True)
    create = find.function_named(source, "create_config")
    outer, inner = _branches(source, create)
    name = architecture_of(source, create)
    taken = (f'{name} == "qwen3"', f'{name} != "neox"')
    if not any(find.where_is(outer.test, source, test) for test in taken):
        source.insert_text(source.span(outer.test)[1], f' or {name} == "qwen3"')
    if not find.calls_of(inner, source, "hf_export.qwen3_config"):
        _add_branch(source, inner, name)


def _add_choice(source: Source, function: cst.FunctionDef, optional: bool = False) -> None:
    """In each list of the architectures (of allowed values, or of a Literal) that lacks it."""
    lists = [node for node in find.every(function, (cst.List, cst.Tuple, cst.Subscript, cst.Set)) if _strings(node)]
    lists = [node for node in lists if set(KNOWN) <= set(_strings(node))]
    if not lists and not optional:
        where = f"def {function.name.value}"
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


def architecture_of(source: Source, function: cst.FunctionDef) -> str:
    """The parameter is a keyword of calls, so its name is a public one."""
    if "architecture" not in find.parameter_names(function):
        raise AnchorNotFound(f"{source.path}: parameter architecture of def {function.name.value}")
    return "architecture"


def _add_branch(source: Source, chain: cst.If, name: str) -> None:
    """Behind the first branch, where an `elif` can be whatever follows."""
    call = next(node for kind in ("MistralConfig", "LlamaConfig") for node in find.calls_of(chain.body, source, kind))
    statement = source.statement(call)
    assigned = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    stars = [source.code(arg.value) for arg in call.args if arg.star == "**"]
    if not isinstance(assigned, cst.Assign) or assigned.value is not call or len(stars) != 1:
        kind = source.code(call.func)
        raise AnchorNotFound(f"{source.path}: hf_config = {kind}(**args), not {source.code(call)}, in create_config")
    target = source.code(assigned.targets[0].target)
    outside, inside = source.indentation(chain), source.indentation(statement)
    comments = [line.comment for line in chain.body.footer if line.comment is not None]
    last = comments[-1] if comments else chain.body.body[-1]
    end = source.span(last)[0] + len(source.code(last).rstrip().encode())
    end += len(source.line_after(end).encode())
    text = f"{target} = hf_export.qwen3_config(**{stars[0]})"
    source.insert_text(end, f'\n{outside}elif {name} == "qwen3":\n{inside}{text}')


def _settings(source: Source) -> None:
    use_placed(source)
    create = find.function_named(source, "create_config")
    outer, _ = _branches(source, create)
    config = find.parameter_names(create)[0]
    made = find.call_of(outer.orelse, source, "GPTNeoXConfig", "create_config")
    stars = [arg.value for arg in made.args if arg.star == "**"]
    name = source.code(find.only(source, "GPTNeoXConfig(**args) in create_config", stars))
    call = f"hf_export.attention_settings({config}, {architecture_of(source, create)})"
    source.insert_before(outer, f"{name}.update({call})")


def _precision(source: Source) -> None:
    main = find.function_named(source, "main")
    parsed = [node for node in find.every(main, cst.Call) if source.code(node.func).endswith(".parse_args")]
    call = find.only(source, "parse_args(...) in def main", parsed)
    set_keyword(
        source, find.call_of(main, source, "convert", "def main"), "precision", f"{target_of(source, call)}.precision"
    )


def target_of(source: Source, call: cst.Call) -> str:
    """The name that the value of a call is given."""
    assigned = source.parent(call)
    if isinstance(assigned, cst.Assign) and len(assigned.targets) == 1:
        return source.code(assigned.targets[0].target)
    raise AnchorNotFound(f"{source.path}: an assignment of {source.code(call).split('(')[0]}(...) in def convert")


CHANGES = [
    Change(PATH, "export writes head_dim, and refuses what the class chosen cannot say", _settings),
    Change(PATH, "export as Qwen3 (--architecture qwen3), which has norms of queries and keys", _qwen3),
    Change(PATH, "export does as --precision says", _precision),
]

FILES = [
    added("megatron/head_dim/hf_heads.py", "fused q, k and v <-> those of Hugging Face"),
    added("megatron/head_dim/hf_export.py", "what Hugging Face's classes can say"),
    added("megatron/head_dim/hf_import.py", "YAML keys and parameters of a model of Hugging Face"),
]
