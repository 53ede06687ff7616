"""megatron/model/transformer_engine.py: `TEMultiheadAttention`, which te_mha builds in the place of attention."""

from dataclasses import replace
from typing import List

import libcst as cst

from tools.neox_patch import find
from tools.neox_patch.build import add_import, set_keyword
from tools.neox_patch.change import Change, Features, added
from tools.neox_patch.source import AnchorNotFound, Source

PATH = "megatron/model/transformer_engine.py"
CLASS = "TEMultiheadAttention"
IN_INIT, IN_FORWARD = f"{CLASS}.__init__", f"{CLASS}.forward"


def _wanted(features: Features) -> bool:
    return features.te_attention


def _constructor(source: Source) -> cst.FunctionDef:
    return find.method(source, CLASS, "__init__")


def _named_parameter(source: Source, function: cst.FunctionDef, name: str) -> str:
    """A parameter that the layer gives by its name."""
    keywords = [parameter.name.value for parameter in function.params.kwonly_params]
    if name not in [*find.parameter_names(function), *keywords]:
        raise AnchorNotFound(f"{source.path}: parameter {name} of {CLASS}.{function.name.value}")
    return name


def _base_calls(source: Source, scope: cst.FunctionDef, name: str) -> List[cst.Call]:
    """Calls of the method `name` of the base class, which `super` says with or without arguments."""
    spellings = (f"super().{name}", f"super({CLASS}, self).{name}", f"te.pytorch.MultiheadAttention.{name}")
    return [call for spelling in spellings for call in find.calls_of(scope, source, spelling)]


def _base_constructor(source: Source) -> cst.Call:
    calls = _base_calls(source, _constructor(source), "__init__")
    return find.only(source, f"super().__init__(...) in {IN_INIT}", calls)


def _head_width(source: Source) -> None:
    constructor = _constructor(source)
    arguments, call = find.config_name(source, constructor), _base_constructor(source)
    width = find.assignment_to(constructor, source, "self.hidden_size_per_attention_head", IN_INIT)
    add_import(source, "from megatron.head_dim import te_attention")
    source.insert_before(source.statement(call), f"geometry = te_attention.geometry({arguments})")
    set_keyword(source, call, "kv_channels", "geometry.head_dim")
    source.replace(width.value, "geometry.head_dim")


def _bias(source: Source) -> None:
    call = _base_constructor(source)
    find.keyword_value(source, call, "bias", IN_INIT)
    arguments = find.config_name(source, _constructor(source))
    set_keyword(source, call, "bias", f"{arguments}.use_bias_in_attn_linear")


def _window(source: Source) -> None:
    call = _base_constructor(source)
    find.keyword_value(source, call, "window_size", IN_INIT)
    arguments = find.config_name(source, _constructor(source))
    set_keyword(source, call, "window_size", f"te_attention.window_size({arguments})")


def _norm(source: Source) -> None:
    constructor = _constructor(source)
    arguments = find.config_name(source, constructor)
    wanted = f"self.normalization, self.eps = te_attention.normalization({arguments})"
    if find.assignments_to(constructor, source, "self.normalization, self.eps"):
        return
    choices = [
        statement
        for statement in constructor.body.body
        if isinstance(statement, cst.If)
        and find.assignments_to(statement, source, "self.normalization")
        and find.assignments_to(statement, source, "self.eps")
    ]
    choice = find.only(source, f"if that chooses self.normalization and self.eps in {IN_INIT}", choices)
    source.replace_statement(choice, wanted)


def _rest_of_constructor(source: Source) -> None:
    constructor = _constructor(source)
    arguments, call = find.config_name(source, constructor), _base_constructor(source)
    output = _named_parameter(source, constructor, "parallel_output")
    cache = _named_parameter(source, constructor, "use_cache")
    source.insert_after(source.statement(call), f"te_attention.configure(self, {arguments}, {output}, {cache})")


def _rotary_angles(source: Source) -> None:
    constructor = _constructor(source)
    tables = find.assignments_to(constructor, source, "self.rope_emb")
    table = find.only(
        source,
        f"self.rope_emb = ... in {IN_INIT}",
        [assign for assign in tables if not find.is_code(source, assign.value, "None")],
    )
    value = table.value
    if isinstance(value, cst.Call) and source.code(value).endswith(".get_emb()"):
        source.replace(value, source.code(value)[: -len("get_emb()")] + "emb")
    elif not (isinstance(value, cst.Attribute) and value.attr.value == "emb"):
        raise AnchorNotFound(f"{source.path}: self.rope_emb = ....get_emb() in {IN_INIT}")
    branch = source.parent(source.parent(source.statement(table)))
    if not isinstance(branch, cst.If):
        raise AnchorNotFound(f"{source.path}: if pos_emb is rotary around self.rope_emb = ... in {IN_INIT}")
    source.insert_before(branch, "self.rope_emb = None")


def _forward(source: Source) -> None:
    forward = find.method(source, CLASS, "forward")
    past = _named_parameter(source, forward, "layer_past")
    wrapped = f"te_attention.cached(self, super().forward, {past})"
    if find.calls_of(forward, source, wrapped):
        return
    call = find.only(source, f"super().forward(...) in {IN_FORWARD}", _base_calls(source, forward, "forward"))
    find.keyword_value(source, call, "rotary_pos_emb", f"super().forward(...) in {IN_FORWARD}")
    source.replace(call.func, wrapped)


CHANGES = [
    Change(PATH, "te_mha: heads of head_dim; what Transformer Engine would ignore is refused", _head_width, _wanted),
    Change(PATH, "te_mha: bias as use_bias_in_attn_linear says", _bias, _wanted),
    Change(PATH, "te_mha: sliding_window_width as the pair that Transformer Engine takes", _window, _wanted),
    Change(PATH, "te_mha: every norm of the model can be used with it", _norm, _wanted),
    Change(PATH, "te_mha: softmax_scale; no second sum over ranks with gpt_j_residual", _rest_of_constructor, _wanted),
    Change(PATH, "te_mha: rotary angles in fp32, on the device of the input, or none", _rotary_angles, _wanted),
    Change(PATH, "te_mha: cached generation", _forward, _wanted),
]

FILES = [
    replace(
        added("megatron/head_dim/te_attention.py", "widths, scale and cache of Transformer Engine's attention"),
        wanted=_wanted,
    )
]
