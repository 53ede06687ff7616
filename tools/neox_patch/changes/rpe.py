"""megatron/model/gpt2_model.py: the scale of T5's relative position bias."""

from typing import List, Optional

import libcst as cst

from tools.neox_patch import find
from tools.neox_patch.build import add_import
from tools.neox_patch.change import Change
from tools.neox_patch.source import Source

PATH = "megatron/model/gpt2_model.py"
WHERE = "GPT2ModelPipe.init_specs"


def _scale(source: Source) -> None:
    """sqrt(head_dim) in any case: the bias is added to scaled scores, and softmax_scale is none of its business."""
    function = find.method(source, "GPT2ModelPipe", "init_specs")
    width = find.only(source, f"hidden_size divided by num_attention_heads in {WHERE}", _head_widths(source, function))
    arguments = _arguments_of_width(source, width)
    if arguments is not None:
        add_import(source, "from megatron.head_dim.config import head_geometry")
        source.replace(width, f"head_geometry({arguments}).head_dim")


def _head_widths(source: Source, function: cst.FunctionDef) -> List[cst.BaseExpression]:
    """Each expression for the width of a head, as it was and as it will be."""
    return [
        node
        for node in find.every(function, (cst.Call, cst.BinaryOperation, cst.Attribute))
        if _is_new_width(node) or _arguments_of_width(source, node) is not None
    ]


def _is_new_width(node: cst.CSTNode) -> bool:
    if not (isinstance(node, cst.Attribute) and node.attr.value == "head_dim" and isinstance(node.value, cst.Call)):
        return False
    return isinstance(node.value.func, cst.Name) and node.value.func.value == "head_geometry"


def _arguments_of_width(source: Source, node: cst.CSTNode) -> Optional[str]:
    """The X of mpu.divide(X.hidden_size, X.num_attention_heads), or of X.hidden_size // X.num_attention_heads."""
    parts: List[cst.BaseExpression] = []
    if isinstance(node, cst.Call) and len(node.args) == 2:
        named = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
        if isinstance(named, cst.Name) and named.value == "divide":
            parts = [_value(node, "numerator", 0), _value(node, "denominator", 1)]
    elif isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.FloorDivide, cst.Divide)):
        parts = [node.left, node.right]
    for part, name in zip(parts, ("hidden_size", "num_attention_heads"), strict=False):
        if not (isinstance(part, cst.Attribute) and part.attr.value == name):
            return None
    owners = {source.code(part.value) for part in parts}
    return owners.pop() if len(owners) == 1 else None


def _value(call: cst.Call, name: str, place: int) -> cst.BaseExpression:
    named = find.keyword(call, name)
    return call.args[place].value if named is None else named.value


CHANGES = [Change(PATH, "the scale of relative position biases (pos_emb rpe) by the true head width", _scale)]
