"""Finders of constructs, by structure. Each raises AnchorNotFound, saying what it looked for and where.

Expressions are compared as syntax trees: formatting, quotes and line breaks do not matter.
"""

import ast
from typing import List, Optional, Sequence, Type, TypeVar

import libcst as cst

from tools.neox_patch.source import AnchorNotFound, Source, same_code

Node = TypeVar("Node", bound=cst.CSTNode)


def every(scope: cst.CSTNode, kind: Type[Node]) -> List[Node]:
    """All nodes of a kind inside a node (itself included), in the order of the text."""
    found: List[Node] = []

    def visit(node: cst.CSTNode) -> None:
        if isinstance(node, kind):
            found.append(node)
        for child in node.children:
            visit(child)

    visit(scope)
    return found


def class_named(source: Source, name: str) -> cst.ClassDef:
    """The class `name`, at the top of the file."""
    return _one(source, f"class {name}", [node for node in source.module.body if _is_named(node, cst.ClassDef, name)])


def function_named(source: Source, name: str, scope: Optional[cst.ClassDef] = None) -> cst.FunctionDef:
    """The function `name` at the top of the file, or the method of a class."""
    body = source.module.body if scope is None else scope.body.body
    where = "" if scope is None else f"{scope.name.value}."
    return _one(source, f"def {where}{name}", [node for node in body if _is_named(node, cst.FunctionDef, name)])


def method(source: Source, class_name: str, name: str) -> cst.FunctionDef:
    """The method `name` of the class `class_name`."""
    return function_named(source, name, class_named(source, class_name))


def parameter_names(function: cst.FunctionDef) -> List[str]:
    """Names of the positional parameters; for a method the first is self."""
    return [parameter.name.value for parameter in function.params.params]


def config_name(source: Source, function: cst.FunctionDef) -> str:
    """What a constructor calls the arguments object (GPT-NeoX: neox_args): its first parameter after self."""
    names = parameter_names(function)
    if len(names) < 2:
        raise AnchorNotFound(f"{source.path}: def {function.name.value} has no parameter for the arguments object")
    return names[1]


def assignments_to(scope: cst.CSTNode, source: Source, target: str) -> List[cst.Assign]:
    """All plain assignments to `target` (say "self.dense") inside a node, in order."""
    return [
        node
        for node in every(scope, cst.Assign)
        if len(node.targets) == 1 and is_code(source, node.targets[0].target, target)
    ]


def assignment_to(scope: cst.CSTNode, source: Source, target: str, where: str) -> cst.Assign:
    """The only assignment to `target` inside a node."""
    return _one(source, f"{target} = ... in {where}", assignments_to(scope, source, target))


def calls_of(scope: cst.CSTNode, source: Source, function: str) -> List[cst.Call]:
    """All calls of `function` (say "mpu.divide") inside a node."""
    return [node for node in every(scope, cst.Call) if is_code(source, node.func, function)]


def call_of(scope: cst.CSTNode, source: Source, function: str, where: str) -> cst.Call:
    """The only call of `function` inside a node."""
    return _one(source, f"{function}(...) in {where}", calls_of(scope, source, function))


def keyword(call: cst.Call, name: str) -> Optional[cst.Arg]:
    """The keyword argument `name` of a call, or None."""
    return next((arg for arg in call.args if arg.keyword is not None and arg.keyword.value == name), None)


def keyword_value(source: Source, call: cst.Call, name: str, where: str) -> cst.BaseExpression:
    """The value of the keyword argument `name` of a call."""
    found = keyword(call, name)
    if found is None:
        raise AnchorNotFound(f"{source.path}: {name}=... in {where}")
    return found.value


def where_is(scope: cst.CSTNode, source: Source, code: str) -> List[cst.BaseExpression]:
    """All expressions inside a node that are the expression `code`."""
    wanted = ast.dump(ast.parse(code, mode="eval").body)
    return [
        node
        for node in every(scope, cst.BaseExpression)
        if _may_be(source, node, code) and _dump(source, node) == wanted
    ]


def the_one_that_is(scope: cst.CSTNode, source: Source, code: str, where: str) -> cst.BaseExpression:
    """The only expression inside a node that is the expression `code`."""
    return _one(source, f"{code} in {where}", where_is(scope, source, code))


def is_code(source: Source, node: cst.CSTNode, code: str) -> bool:
    """Whether a node is the expression `code`."""
    return same_code(f"({source.code(node)})", f"({code})")


def only(source: Source, what: str, found: Sequence[Node]) -> Node:
    """The only one of `found`; `what` names it in the error, with the place, e.g. "if rotary in X.__init__"."""
    return _one(source, what, found)


def _one(source: Source, what: str, found: Sequence[Node]) -> Node:
    if len(found) == 1:
        return found[0]
    raise AnchorNotFound(f"{source.path}: {what}" + (f" ({len(found)} of them, one was expected)" if found else ""))


def _is_named(node: cst.CSTNode, kind: type, name: str) -> bool:
    return isinstance(node, kind) and node.name.value == name


def _may_be(source: Source, node: cst.CSTNode, code: str) -> bool:
    """Whether a comparison of trees is worth its time: the node's text is not far longer than `code`."""
    start, end = source.span(node)
    return end - start < 40 * len(code)


def _dump(source: Source, node: cst.CSTNode) -> Optional[str]:
    try:
        return ast.dump(ast.parse(f"({source.code(node)})", mode="eval").body)
    except SyntaxError:
        return None
