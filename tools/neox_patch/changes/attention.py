"""megatron/model/transformer.py: widths, score scale and norms of `ParallelSelfAttention`."""

from typing import List, Optional, Tuple

import libcst as cst

from tools.neox_patch import find
from tools.neox_patch.build import add_import, set_keyword
from tools.neox_patch.change import Change
from tools.neox_patch.source import AnchorNotFound, Source

PATH = "megatron/model/transformer.py"
CLASS = "ParallelSelfAttention"
CONSTRUCTOR = f"{CLASS}.__init__"
LINE_LENGTH = 88
QUERY = "query_hidden_size"
NOTATION = (("hp: ", "h/p", "np * hn, by default "), ("hn: ", "h/n", "head_dim, by default "))
"""Letters of the notes on shapes at the top of the file, what they say of them, and what goes before that."""


class Constructor:
    """`__init__` of the class, its names for itself and for the arguments object, and what hidden_size is called."""

    def __init__(self, source: Source):
        self.source = source
        self.node = find.method(source, CLASS, "__init__")
        self.this = find.parameter_names(self.node)[0]
        self.config = find.config_name(source, self.node)
        self.hidden = f"{self.config}.hidden_size"
        self.query = f"{self.this}.{QUERY}"

    def set(self, name: str) -> cst.Assign:
        """The only assignment to an attribute."""
        return find.assignment_to(self.node, self.source, f"{self.this}.{name}", CONSTRUCTOR)

    def all_set(self, name: str) -> List[cst.Assign]:
        """All assignments to an attribute, at least one."""
        found = find.assignments_to(self.node, self.source, f"{self.this}.{name}")
        if not found:
            raise AnchorNotFound(f"{self.source.path}: {self.this}.{name} = ... in {CONSTRUCTOR}")
        return found

    def hidden_sizes(self, scope: cst.CSTNode) -> List[cst.BaseExpression]:
        """Where the residual width is used, under its own name or under that of a local variable that is set to it."""
        found = find.where_is(scope, self.source, self.hidden)
        for name in variables(scope):
            values = find.assignments_to(self.node, self.source, name.value)
            if len(values) == 1 and find.is_code(self.source, values[0].value, self.hidden):
                found.append(name)
        return found

    def widen(self, value: cst.BaseExpression, what: str) -> None:
        """Where `value` is computed from the residual width, it is computed from that of all query heads.

        A local variable is followed to what it is set to. `what` names the value in the error.
        """
        widths = self.hidden_sizes(value)
        for width in widths:
            self.source.replace(width, self.query)
        if widths or find.where_is(value, self.source, self.query):
            return
        sources = find.assignments_to(self.node, self.source, value.value) if isinstance(value, cst.Name) else []
        if not sources:
            raise AnchorNotFound(f"{self.source.path}: {self.hidden} in {what}")
        for assignment in sources:
            self.widen(assignment.value, f"{value.value} = ... in {CONSTRUCTOR}")


def _widths(source: Source) -> None:
    """Every width of the projections is that of the heads; what hangs on the width of a head follows from it."""
    constructor = Constructor(source)
    add_import(source, "from megatron.head_dim.config import head_geometry")
    _head_width(constructor)
    for assignment in constructor.all_set("kv_hidden_size"):
        if not _is_product_of_heads(constructor, assignment.value):
            constructor.widen(assignment.value, f"{constructor.this}.kv_hidden_size = ... in {CONSTRUCTOR}")
    for assignment in constructor.all_set("query_key_value"):
        constructor.widen(*_argument(source, assignment, "output_size", 2))
    constructor.widen(*_argument(source, constructor.set("dense"), "input_size", 1))


def _head_width(constructor: Constructor) -> None:
    source = constructor.source
    per_partition = constructor.set("hidden_size_per_partition")
    constructor.widen(per_partition.value, f"{constructor.this}.hidden_size_per_partition = ... in {CONSTRUCTOR}")
    geometry = f"head_geometry({constructor.config})"
    if not is_set(constructor, constructor.query, f"{geometry}.query_hidden_size"):
        source.insert_before(source.statement(per_partition), f"{constructor.query} = {geometry}.query_hidden_size")
    width = constructor.set("hidden_size_per_attention_head")
    quotient = [constructor.hidden_sizes(width.value), _attributes(constructor, width.value, "num_attention_heads")]
    if not find.is_code(source, width.value, f"{geometry}.head_dim") and not all(quotient):
        what = f"{constructor.hidden} and {constructor.config}.num_attention_heads"
        raise AnchorNotFound(f"{source.path}: {what} in hidden_size_per_attention_head = ... in {CONSTRUCTOR}")
    source.replace(width.value, f"{geometry}.head_dim")


def is_set(constructor: Constructor, attribute: str, value: str) -> bool:
    """Whether an attribute of ours is there already. One of that name that is set to something else is another's."""
    found = find.assignments_to(constructor.node, constructor.source, attribute)
    for assignment in found:
        if not find.is_code(constructor.source, assignment.value, value):
            code = constructor.source.code(assignment)
            raise AnchorNotFound(f"{constructor.source.path}: {attribute} = {value} in {CONSTRUCTOR}; it has {code!r}")
    return bool(found)


def _is_product_of_heads(constructor: Constructor, value: cst.BaseExpression) -> bool:
    """num_kv_heads times the width of one head, which needs no change."""
    width = find.where_is(value, constructor.source, f"{constructor.this}.hidden_size_per_attention_head")
    return bool(width) and not constructor.hidden_sizes(value)


def _attributes(constructor: Constructor, scope: cst.CSTNode, name: str) -> List[cst.BaseExpression]:
    return find.where_is(scope, constructor.source, f"{constructor.config}.{name}")


def _argument(source: Source, assignment: cst.Assign, name: str, place: int) -> Tuple[cst.BaseExpression, str]:
    """(value, where it is) of an argument of the constructor of a parallel linear layer."""
    target = source.code(assignment.targets[0].target)
    what = f"{name}=... of {target} in {CONSTRUCTOR}"
    given = given_argument(assignment.value, name, place) if isinstance(assignment.value, cst.Call) else None
    if given is None:
        raise AnchorNotFound(f"{source.path}: {what}")
    return given.value, what


def given_argument(call: cst.Call, name: str, place: int) -> Optional[cst.Arg]:
    """The argument of a call that has this name, or this place."""
    positional = [arg for arg in call.args if arg.keyword is None and not arg.star]
    return find.keyword(call, name) or (positional[place] if len(positional) > place else None)


def _scale(source: Source) -> None:
    """The divisor of scores; GPT-NeoX's own expression stays, so that nothing changes without softmax_scale."""
    constructor = Constructor(source)
    this, width = constructor.this, f"{constructor.this}.hidden_size_per_attention_head"
    roots = [
        assignment
        for assignment in constructor.all_set("norm_factor")
        if find.where_is(assignment.value, source, f"math.sqrt({width})")
        or find.where_is(assignment.value, source, f"{width} ** 0.5")
    ]
    root = find.only(source, f"{this}.norm_factor = math.sqrt({width}) in {CONSTRUCTOR}", roots)
    scale = f"{this}.softmax_scale"
    if not is_set(constructor, scale, f"{constructor.config}.softmax_scale"):
        text = f"{scale} = {constructor.config}.softmax_scale\nif {scale} is not None:\n"
        source.insert_after(source.statement(root), f"{text}    {this}.norm_factor = 1.0 / {scale}")


def _flash_scale(source: Source) -> None:
    """Flash attention's own default, head_dim ** -0.5, is what None means."""
    scope = find.class_named(source, CLASS)
    for name, required, positions in (
        ("flash_qkv_fn", True, 4),
        ("flash_varlen_qkv_fn", True, 8),
        ("flash_triton_fn", False, 5),
    ):
        calls = _calls_of_attribute(source, scope, name)
        if required and not calls:
            raise AnchorNotFound(f"{source.path}: call of {name} in class {CLASS}")
        for call in calls:
            _set_scale(source, call, name, positions)


def _set_scale(source: Source, call: cst.Call, name: str, positions: int) -> None:
    wanted = f"{source.code(call.func.value)}.softmax_scale"
    given = given_argument(call, "softmax_scale", positions)
    if given is None:
        _add_scale(source, call, wanted)
    elif any(find.is_code(source, given.value, code) for code in ("None", wanted)):
        source.replace(given.value, wanted)
    else:
        code = source.code(given.value)
        raise AnchorNotFound(f"{source.path}: softmax_scale=None in the call of {name} in {CLASS}; it is {code}")


def _add_scale(source: Source, call: cst.Call, value: str) -> None:
    """As the last argument; a line that would be too long becomes a line for each argument, as black has it."""
    start, end = source.span(call.args[0])[0], source.span(call.args[-1])[1]
    line = source.line_before(start) + source.line_after(start)
    if "\n" in source.text.encode()[start:end].decode() or len(line + f", softmax_scale={value}") <= LINE_LENGTH:
        set_keyword(source, call, "softmax_scale", value)
        return
    arguments = [source.code(arg).rstrip().rstrip(",") for arg in call.args] + [f"softmax_scale={value}"]
    source.replace(call, f"{source.code(call.func)}(\n    " + ",\n    ".join(arguments) + ",\n)")


def _calls_of_attribute(source: Source, scope: cst.CSTNode, name: str) -> List[cst.Call]:
    """Calls of a method, or of a function that is kept in an attribute, of the object itself."""
    return [
        call
        for call in find.every(scope, cst.Call)
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == name
    ]


def variables(scope: cst.CSTNode) -> List[cst.Name]:
    """Variables inside an expression, not the names of attributes and keywords."""
    hidden = {id(node.attr) for node in find.every(scope, cst.Attribute)}
    hidden |= {id(node.keyword) for node in find.every(scope, cst.Arg)}
    return [node for node in find.every(scope, cst.Name) if id(node) not in hidden]


def _notation(source: Source) -> None:
    """The notes on shapes, where they are as GPT-NeoX has them."""
    for line in source.module.body:
        text = line.body[0].value if isinstance(line, cst.SimpleStatementLine) and _is_text(line) else None
        if text is not None:
            code = source.code(text)
            for letters, meaning, addition in NOTATION:
                place = code.find(letters + meaning)
                if place >= 0:
                    source.insert_text(source.span(text)[0] + len((code[:place] + letters).encode()), addition)


def _is_text(line: cst.SimpleStatementLine) -> bool:
    return isinstance(line.body[0], cst.Expr) and isinstance(line.body[0].value, cst.SimpleString)


CHANGES = [
    Change(PATH, "the widths of attention are those of its heads, whatever hidden_size is", _widths),
    Change(PATH, "the notes on shapes name head_dim", _notation),
    Change(PATH, "scores are scaled by softmax_scale", _scale),
    Change(PATH, "flash attention is told softmax_scale", _flash_scale),
]
