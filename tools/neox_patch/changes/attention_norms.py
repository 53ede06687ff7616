"""megatron/model/transformer.py: norms of queries and keys in `ParallelSelfAttention`, for each head or joint."""

from typing import Tuple

import libcst as cst

from tools.neox_patch import find
from tools.neox_patch.build import add_import
from tools.neox_patch.change import Change, added
from tools.neox_patch.changes.attention import CLASS, CONSTRUCTOR, PATH, Constructor, given_argument, is_set, variables
from tools.neox_patch.source import AnchorNotFound, Source


def _norm_kinds(source: Source) -> None:
    """The norms are built where GPT-NeoX's is, before the projections: an optimizer's state knows them by order."""
    constructor = Constructor(source)
    this, config = constructor.this, constructor.config
    flag, kind = constructor.set("use_qk_layernorm"), f"{this}.qk_norm_type"
    joint = source.statement(_enclosing_if(source, constructor.set("qk_layernorm"), f"{this}.use_qk_layernorm"))
    add_import(source, "from megatron.head_dim.qk_norm import per_head_norms, qk_norm_type")
    values = [f"{config}.use_qk_layernorm", f'{kind} == "joint"']
    if not any(find.is_code(source, flag.value, value) for value in values):
        raise AnchorNotFound(f"{source.path}: {this}.use_qk_layernorm = {values[0]} in {CONSTRUCTOR}")
    source.replace(flag.value, values[1])
    if not is_set(constructor, kind, f"qk_norm_type({config})"):
        source.insert_before(source.statement(flag), f"{kind} = qk_norm_type({config})")
    _refuse_others(constructor, "q_layernorm", "k_layernorm")
    norms = f"{this}.q_layernorm, {this}.k_layernorm"
    if not is_set(constructor, norms, f"per_head_norms({config})"):
        source.insert_after(joint, f'if {kind} == "per_head":\n    {norms} = per_head_norms({config})')


def _refuse_others(constructor: Constructor, *names: str) -> None:
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
        given = [given_argument(call, parameters[place + 1], place) for place in range(2)]
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
        tensors = [name.value for name in variables(node) if name.value in names[1:]]
        if not isinstance(node, cst.Call) or len(set(tensors)) != 1:
            raise AnchorNotFound(
                f"{source.path}: the tensor that {source.code(number)} is of in {CLASS}.flash_attention"
            )
        source.replace(number, f"{tensors[0]}.size(2)")


CHANGES = [
    Change(PATH, "norms of queries and keys for each head, as in Qwen3: qk_norm_type", _norm_kinds),
    Change(PATH, "those norms are applied before the rotary embedding", _norms_applied),
    Change(PATH, "the joint norm works with grouped queries and flash attention too", _joint_norm_of_groups),
]
FILES = [added("megatron/head_dim/qk_norm.py", "the norms on queries and keys that qk_norm_type asks for")]
