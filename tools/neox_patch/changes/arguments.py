"""megatron/neox_arguments: the three arguments, and what is checked about them."""

import re
from dataclasses import dataclass
from typing import List, Optional

import libcst as cst

from tools.neox_patch import find
from tools.neox_patch.build import add_import
from tools.neox_patch.change import PROJECT, AddedFile, Change, added
from tools.neox_patch.source import AnchorNotFound, Source, same_code

FIELDS_PATH = "megatron/neox_arguments/neox_args.py"
CHECKS_PATH = "megatron/neox_arguments/arguments.py"
CLASS = "NeoXArgsModel"
LINE_LENGTH = 88
"""What black, as GPT-NeoX uses it, keeps lines within."""

ADVICE = "; set head_dim to the width of one attention head"


@dataclass(frozen=True)
class Field:
    """An argument: a field of NeoXArgsModel. after: the field behind which it is put."""

    name: str
    annotation: str
    after: str
    doc: str


HEAD_DIM = Field(
    "head_dim",
    "int",
    "num_kv_heads",
    """
    Width of one attention head.

    If set to None, it is hidden_size / num_attention_heads, which must then be a whole number.
    If set, it is used as it is: the query width num_attention_heads * head_dim may be smaller or larger than
    hidden_size, and the output projection leads back to hidden_size.
    """,
)
SOFTMAX_SCALE = Field(
    "softmax_scale",
    "float",
    "head_dim",
    """
    Factor on the query-key products before the softmax. Not for the sparse kinds of attention.

    If set to None, it is head_dim ** -0.5 (1 / head_dim with use_mup).
    """,
)
QK_NORM_TYPE = Field(
    "qk_norm_type",
    'Literal["joint", "per_head"]',
    "use_qk_layernorm",
    """
    How queries and keys are normalised (before rotary embeddings), with norms of the kind `norm`.

    joint: what use_qk_layernorm does, one norm for both with a weight for each query head and each of its dimensions.
    per_head: a norm for queries and one for keys, each with head_dim weights that all heads share (as in Qwen3).
    If set to None: joint if use_qk_layernorm is set, no norm otherwise.
    """,
)
FIELDS = (HEAD_DIM, SOFTMAX_SCALE, QK_NORM_TYPE)


def doc_lines(field: Field) -> List[str]:
    """The text of an argument, each line indented as in the class, which its page in configs/ keeps."""
    return ["    " + line.strip() if line.strip() else "" for line in field.doc.strip().split("\n")]


def _add_field(field: Field):
    def edit(source: Source) -> None:
        _check_no_other(source, field)
        scope = find.class_named(source, CLASS)
        if _fields(scope, field.name):
            return
        anchor = find.only(source, f"field {field.after} in class {CLASS}", _fields(scope, field.after))
        last = _docstring(source, anchor) or anchor
        end = source.span(last)[0] + len(source.code(last).rstrip().encode())
        end += len(source.line_after(end).encode())  # a comment stays on its line
        space = source.indentation(anchor)
        body = [f"{field.name}: {field.annotation} = None", '"""', *(line[4:] for line in doc_lines(field)), '"""']
        source.insert_text(end, "\n\n" + "\n".join(space + line if line else "" for line in body))

    return edit


def _check_no_other(source: Source, field: Field) -> None:
    """A field of the same name in another group, or of another meaning, is somebody's own."""
    for scope in (node for node in source.module.body if isinstance(node, cst.ClassDef)):
        for found in _fields(scope, field.name):
            wanted = f"{field.name}: {field.annotation} = None"
            if scope.name.value != CLASS or not same_code(source.code(found).strip(), wanted):
                code = source.code(found).strip()
                raise AnchorNotFound(f"{source.path}: {wanted}; {scope.name.value} has a field of its own, {code!r}")


def _fields(scope: cst.ClassDef, name: str) -> List[cst.SimpleStatementLine]:
    return [
        line
        for line in scope.body.body
        if isinstance(line, cst.SimpleStatementLine)
        and isinstance(line.body[0], cst.AnnAssign)
        and isinstance(line.body[0].target, cst.Name)
        and line.body[0].target.value == name
    ]


def _docstring(source: Source, field: cst.SimpleStatementLine) -> Optional[cst.SimpleStatementLine]:
    """The string under a field."""
    body = source.parent(field).body
    place = next(number for number, line in enumerate(body) if line is field)
    following = body[place + 1] if place + 1 < len(body) else None
    if isinstance(following, cst.SimpleStatementLine) and isinstance(following.body[0], cst.Expr):
        if isinstance(following.body[0].value, (cst.SimpleString, cst.ConcatenatedString)):
            return following
    return None


def _check(source: Source) -> None:
    """Between the derived values, which it needs, and the types, whose check does not survive a wrong one."""
    start = find.method(source, "NeoXArgs", "__post_init__")
    this = find.parameter_names(start)[0]
    derived = find.call_of(start, source, f"{this}.calculate_derived", "NeoXArgs.__post_init__")
    add_import(source, "from megatron.head_dim.validation import check_head_dim")
    source.insert_after(source.statement(derived), f"check_head_dim({this})")


def _divisibility(source: Source) -> None:
    """The remainder is only of interest if head_dim is the quotient."""
    condition = _remainder_condition(source)
    this = find.parameter_names(find.method(source, "NeoXArgs", "validate_values"))[0]
    derived = f"{this}.head_dim is None"
    if find.where_is(condition.test, source, derived):
        return
    operand = _truth_value(source, find.where_is(condition.test, source, _remainder(this))[0])
    rewritten = _as_lines(source, condition, derived, operand)
    if rewritten is not None:
        source.replace(condition.test, rewritten)
        return
    text = source.code(operand)
    alone = _is_and(source.parent(operand)) or operand is condition.test
    source.replace(operand, f"{derived} and {text}" if alone else f"({derived} and {text})")


def _remainder(this: str) -> str:
    return f"{this}.hidden_size % {this}.num_attention_heads"


def _remainder_condition(source: Source) -> cst.If:
    function = find.method(source, "NeoXArgs", "validate_values")
    remainder = _remainder(find.parameter_names(function)[0])
    found = [node for node in find.every(function, cst.If) if find.where_is(node.test, source, remainder)]
    return find.only(source, f"if {remainder} in NeoXArgs.validate_values", found)


def _truth_value(source: Source, node: cst.BaseExpression) -> cst.BaseExpression:
    """The comparison (or negation) that an expression is compared in."""
    parent = source.parent(node)
    while isinstance(parent, (cst.Comparison, cst.ComparisonTarget, cst.UnaryOperation)):
        node = parent if not isinstance(parent, cst.ComparisonTarget) else node
        parent = source.parent(parent)
    return node


def _is_and(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.BooleanOperation) and isinstance(node.operator, cst.And)


def _as_lines(source: Source, condition: cst.If, derived: str, operand: cst.BaseExpression) -> Optional[str]:
    """The condition as black writes it when it is long; None if it is short enough, or not a plain `and`."""
    operands = _operands(condition.test)
    length = len(source.code(condition).split("\n")[0]) + len(source.indentation(condition)) + len(derived + " and ")
    if length <= LINE_LENGTH or operand not in operands or condition.test.lpar:
        return None
    texts = [_in_one_line(source.code(node)) for node in operands]
    if any("#" in text or "\n" in text for text in texts):
        return None
    return "(\n    " + "\n    and ".join([derived, *texts]) + "\n)"


def _operands(test: cst.BaseExpression) -> List[cst.BaseExpression]:
    if _is_and(test) and not test.lpar:
        return [*_operands(test.left), *_operands(test.right)]
    return [test]


def _in_one_line(code: str) -> str:
    joined = re.sub(r"\s*\n\s*", " ", code)
    return joined.replace("( ", "(").replace(" )", ")")


def _message(source: Source) -> None:
    """The error of the remainder says what can be done, as far as it has a text that can be told to be its own."""
    texts = find.every(_remainder_condition(source).body, (cst.SimpleString, cst.FormattedString))
    for text in texts:
        code, quote = source.code(text), text.end if isinstance(text, cst.FormattedString) else text.quote
        if "num_attention_heads" in code and "head_dim" not in code:
            source.replace(text, code[: -len(quote)] + ADVICE + quote)


CHANGES = [
    *(Change(FIELDS_PATH, f"the argument {field.name}", _add_field(field)) for field in FIELDS),
    Change(CHECKS_PATH, "head_dim, softmax_scale and qk_norm_type are checked, all problems at once", _check),
    Change(CHECKS_PATH, "hidden_size need not divide by num_attention_heads if head_dim is set", _divisibility),
    Change(CHECKS_PATH, "the error about hidden_size and num_attention_heads names head_dim", _message),
]
FILES = [
    AddedFile("megatron/geometry.py", "the widths of attention heads, in one place", PROJECT / "megatron/geometry.py"),
    AddedFile("megatron/errors.py", "errors that list every problem", PROJECT / "megatron/errors.py"),
    added("megatron/head_dim/__init__.py", "what GPT-NeoX's own files ask for, so that little is changed in them"),
    added("megatron/head_dim/config.py", "the widths and the scale that the arguments mean"),
    added("megatron/head_dim/validation.py", "what cannot work is refused when the arguments are read"),
]
