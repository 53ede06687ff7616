"""megatron/model/transformer.py: widths, score scale and norms of `ParallelSelfAttention`."""

from typing import List, Optional, Tuple

import libcst as cst

from tools.neox_patch import find
from tools.neox_patch.build import add_import, set_keyword
from tools.neox_patch.change import Change, added
from tools.neox_patch.source import AnchorNotFound, Source

PATH = "megatron/model/transformer.py"
CLASS = "ParallelSelfAttention"
CONSTRUCTOR = f"{CLASS}.__init__"
LINE_LENGTH = 88
QUERY = "query_hidden_size"
NOTATION = (("hp: ", "h/p", "np * hn, by default "), ("hn: ", "h/n", "head_dim, by default "))
"""Letters of the notes on shapes at the top of the file, what they say of them, and what goes before that."""


class _Constructor:
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
        for name in _names(scope):
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
    constructor = _Constructor(source)
    add_import(source, "from megatron.head_dim.config import head_geometry")
    _head_width(constructor)
    for assignment in constructor.all_set("kv_hidden_size"):
        if not _is_product_of_heads(constructor, assignment.value):
            constructor.widen(assignment.value, f"{constructor.this}.kv_hidden_size = ... in {CONSTRUCTOR}")
    for assignment in constructor.all_set("query_key_value"):
        constructor.widen(*_argument(source, assignment, "output_size", 2))
    constructor.widen(*_argument(source, constructor.set("dense"), "input_size", 1))


def _head_width(constructor: _Constructor) -> None:
    source = constructor.source
    per_partition = constructor.set("hidden_size_per_partition")
    constructor.widen(per_partition.value, f"{constructor.this}.hidden_size_per_partition = ... in {CONSTRUCTOR}")
    geometry = f"head_geometry({constructor.config})"
    if not _is_set(constructor, constructor.query, f"{geometry}.query_hidden_size"):
        source.insert_before(source.statement(per_partition), f"{constructor.query} = {geometry}.query_hidden_size")
    width = constructor.set("hidden_size_per_attention_head")
    quotient = [constructor.hidden_sizes(width.value), _attributes(constructor, width.value, "num_attention_heads")]
    if not find.is_code(source, width.value, f"{geometry}.head_dim") and not all(quotient):
        what = f"{constructor.hidden} and {constructor.config}.num_attention_heads"
        raise AnchorNotFound(f"{source.path}: {what} in hidden_size_per_attention_head = ... in {CONSTRUCTOR}")
    source.replace(width.value, f"{geometry}.head_dim")


def _is_set(constructor: _Constructor, attribute: str, value: str) -> bool:
    """Whether an attribute of ours is there already. One of that name that is set to something else is another's."""
    found = find.assignments_to(constructor.node, constructor.source, attribute)
    for assignment in found:
        if not find.is_code(constructor.source, assignment.value, value):
            code = constructor.source.code(assignment)
            raise AnchorNotFound(f"{constructor.source.path}: {attribute} = {value} in {CONSTRUCTOR}; it has {code!r}")
    return bool(found)


def _is_product_of_heads(constructor: _Constructor, value: cst.BaseExpression) -> bool:
    """num_kv_heads times the width of one head, which needs no change."""
    width = find.where_is(value, constructor.source, f"{constructor.this}.hidden_size_per_attention_head")
    return bool(width) and not constructor.hidden_sizes(value)


def _attributes(constructor: _Constructor, scope: cst.CSTNode, name: str) -> List[cst.BaseExpression]:
    return find.where_is(scope, constructor.source, f"{constructor.config}.{name}")


def _argument(source: Source, assignment: cst.Assign, name: str, place: int) -> Tuple[cst.BaseExpression, str]:
    """(value, where it is) of an argument of the constructor of a parallel linear layer."""
    target = source.code(assignment.targets[0].target)
    what = f"{name}=... of {target} in {CONSTRUCTOR}"
    given = _given(assignment.value, name, place) if isinstance(assignment.value, cst.Call) else None
    if given is None:
        raise AnchorNotFound(f"{source.path}: {what}")
    return given.value, what


def _given(call: cst.Call, name: str, place: int) -> Optional[cst.Arg]:
    """The argument of a call that has this name, or this place."""
    positional = [arg for arg in call.args if arg.keyword is None and not arg.star]
    return find.keyword(call, name) or (positional[place] if len(positional) > place else None)


def _scale(source: Source) -> None:
    """The divisor of scores; GPT-NeoX's own expression stays, so that nothing changes without softmax_scale."""
    constructor = _Constructor(source)
    this, width = constructor.this, f"{constructor.this}.hidden_size_per_attention_head"
    roots = [
        assignment
        for assignment in constructor.all_set("norm_factor")
        if find.where_is(assignment.value, source, f"math.sqrt({width})")
        or find.where_is(assignment.value, source, f"{width} ** 0.5")
    ]
    root = find.only(source, f"{this}.norm_factor = math.sqrt({width}) in {CONSTRUCTOR}", roots)
    scale = f"{this}.softmax_scale"
    if not _is_set(constructor, scale, f"{constructor.config}.softmax_scale"):
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
    given = _given(call, "softmax_scale", positions)
    if given is None:
        _add_scale(source, call, wanted)
    elif any(find.is_code(source, given.value, code) for code in ("None", wanted)):
        source.replace(given.value, wanted)
    else:
        code = source.code(given.value)
        raise AnchorNotFound(f"{source.path}: softmax_scale=None in the call of {name} in {CLASS}; it is {code}")


def _norm_kinds(source: Source) -> None:
    """The norms are built where GPT-NeoX's is, before the projections: an optimizer's state knows them by order."""
    constructor = _Constructor(source)
    this, config = constructor.this, constructor.config
    flag, kind = constructor.set("use_qk_layernorm"), f"{this}.qk_norm_type"
    joint = source.statement(_enclosing_if(source, constructor.set("qk_layernorm"), f"{this}.use_qk_layernorm"))
    add_import(source, "from megatron.head_dim.qk_norm import per_head_norms, qk_norm_type")
    values = [f"{config}.use_qk_layernorm", f'{kind} == "joint"']
    if not any(find.is_code(source, flag.value, value) for value in values):
        raise AnchorNotFound(f"{source.path}: {this}.use_qk_layernorm = {values[0]} in {CONSTRUCTOR}")
    source.replace(flag.value, values[1])
    if not _is_set(constructor, kind, f"qk_norm_type({config})"):
        source.insert_before(source.statement(flag), f"{kind} = qk_norm_type({config})")
    _refuse_others(constructor, "q_layernorm", "k_layernorm")
    norms = f"{this}.q_layernorm, {this}.k_layernorm"
    if not _is_set(constructor, norms, f"per_head_norms({config})"):
        source.insert_after(joint, f'if {kind} == "per_head":\n    {norms} = per_head_norms({config})')


def _refuse_others(constructor: _Constructor, *names: str) -> None:
    """Norms of these names that are not ours."""
    for name in names:
        for own in find.assignments_to(constructor.node, constructor.source, f"{constructor.this}.{name}"):
            code = constructor.source.code(own)
            raise AnchorNotFound(f"{constructor.source.path}: no {name} yet in {CONSTRUCTOR}; it has {code!r}")


def _enclosing_if(source: Source, node: cst.CSTNode, test: str) -> cst.If:
    """The `if test` (not its `else`) that a node is in."""
    inside = node
    while not isinstance(node, (cst.If, cst.FunctionDef)):
        inside, node = node, source.parent(node)
    if not isinstance(node, cst.If) or inside is not node.body or not find.is_code(source, node.test, test):
        raise AnchorNotFound(f"{source.path}: if {test}: around {source.code(inside).strip()!r} in class {CLASS}")
    return node


def _norms_applied(source: Source) -> None:
    """Behind the norm that GPT-NeoX has, on the same variables."""
    function = find.method(source, CLASS, "forward")
    this, where = find.parameter_names(function)[0], f"{CLASS}.forward"
    calls = find.calls_of(function, source, f"{this}.qk_layernorm")
    normed = [source.code(call.args[0].value) for call in calls if len(call.args) == 1]
    query, key = _query_and_key(source, function)
    if sorted(normed) != sorted([query, key]):
        raise AnchorNotFound(f"{source.path}: {this}.qk_layernorm of {query} and of {key} in {where}")
    blocks = {id(node): node for node in (_enclosing_if(source, call, f"{this}.use_qk_layernorm") for call in calls)}
    block = find.only(source, f"if {this}.use_qk_layernorm in {where}", list(blocks.values()))
    if find.calls_of(function, source, f"{this}.q_layernorm"):
        return
    source.insert_after(
        source.statement(block),
        f"""
        if {this}.qk_norm_type == "per_head":
            {query} = {this}.q_layernorm({query}.contiguous())
            {key} = {this}.k_layernorm({key}.contiguous())
        """,
    )


def _query_and_key(source: Source, function: cst.FunctionDef) -> Tuple[str, str]:
    """What `forward` calls queries and keys: the first arguments of the attention itself."""
    this = find.parameter_names(function)[0]
    parameters = find.parameter_names(find.method(source, CLASS, "attention"))
    pairs = set()
    for call in find.calls_of(function, source, f"{this}.attention"):
        given = [_given(call, parameters[place + 1], place) for place in range(2)]
        pairs.add(tuple("" if arg is None else source.code(arg.value) for arg in given))
    if len(pairs) != 1 or not all(name.isidentifier() for name in min(pairs)):
        raise AnchorNotFound(
            f"{source.path}: {this}.attention(QUERIES, KEYS, ...) in {CLASS}.forward, with two variables"
        )
    return min(pairs)


def _joint_norm_of_groups(source: Source) -> None:
    """The joint norm has weights for each query head, so for flash too a key is repeated for each of its queries."""
    function = find.method(source, CLASS, "gqa_project")
    this = find.parameter_names(function)[0]
    plain = f"not {this}.use_flash_attention"
    wanted = f"{plain} or {this}.use_qk_layernorm"
    tests = [
        node
        for node in find.every(function, cst.If)
        if any(find.is_code(source, node.test, code) for code in (plain, wanted))
    ]
    repeating = find.only(source, f"if {plain} in {CLASS}.gqa_project", tests)
    if find.is_code(source, repeating.test, plain):
        source.replace(repeating.test, wanted)
        start, space = source.span(repeating)[0], source.indentation(repeating)
        line = start - len(source.line_before(start).encode())
        source.insert_text(line, f"{space}# (and with the joint QK norm, which has weights for each query head)\n")
    _heads_as_given(source)


def _heads_as_given(source: Source) -> None:
    """flash_attention takes the number of key heads from the tensors."""
    function = find.method(source, CLASS, "flash_attention")
    names = find.parameter_names(function)
    for number in find.where_is(function, source, f"{names[0]}.num_kv_heads_per_partition"):
        node = source.parent(number)
        while not isinstance(node, (cst.Call, cst.BaseStatement)):
            node = source.parent(node)
        tensors = [name.value for name in _names(node) if name.value in names[1:]]
        if not isinstance(node, cst.Call) or len(set(tensors)) != 1:
            raise AnchorNotFound(
                f"{source.path}: the tensor that {source.code(number)} is of in {CLASS}.flash_attention"
            )
        source.replace(number, f"{tensors[0]}.size(2)")


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


def _names(scope: cst.CSTNode) -> List[cst.Name]:
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
    Change(PATH, "norms of queries and keys for each head, as in Qwen3: qk_norm_type", _norm_kinds),
    Change(PATH, "those norms are applied before the rotary embedding", _norms_applied),
    Change(PATH, "the joint norm works with grouped queries and flash attention too", _joint_norm_of_groups),
]
FILES = [added("megatron/head_dim/qk_norm.py", "the norms on queries and keys that qk_norm_type asks for")]
