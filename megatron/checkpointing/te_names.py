"""The weights of a layer with Transformer Engine and without: the one table of names, read in both directions.

Every operation works on one tensor-parallel rank's share and only moves rows, so it is exact and has an inverse.
"""

import pickle
import re
from functools import cache
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple

import torch

from megatron.checkpointing.legacy import is_extra_state
from megatron.errors import CheckpointError
from megatron.geometry import HeadGeometry, MLPGeometry, QKVLayout
from megatron.model.attention.qkv import pack_qkv, split_qkv

State = Dict[str, torch.Tensor]

NOTHING = pickle.dumps(None)
"""The bytes of an `_extra_state` that every version of Transformer Engine takes for an empty one."""


class Form(NamedTuple):
    """Which parts of a model have Transformer Engine's weights. Those of its linear layers are the native ones."""

    mha: bool = False
    layernorm_mlp: bool = False
    norms: bool = False


SWITCHES = {
    "mha": ("te_mha",),
    "layernorm_mlp": ("te_layernorm_mlp",),
    "norms": ("norm",),
    "linears": ("te_columnparallel", "te_rowparallel"),
}
"""Part -> the settings that decide. Linear layers have the same weights in both forms."""


class Share(NamedTuple):
    """What decides the order of the rows of one rank's share of a transformer layer."""

    heads: HeadGeometry
    mlp: MLPGeometry
    layout: QKVLayout
    """The native order of the fused QKV rows, which is the whole layer's."""


class Operation(NamedTuple):
    """What happens to the rows of a weight or bias in the two directions."""

    to_te: Callable[[torch.Tensor, Share], torch.Tensor]
    to_native: Callable[[torch.Tensor, Share], torch.Tensor]
    rows: Callable[[Share], int]
    """How many rows there have to be."""


class Rule(NamedTuple):
    """One module of a part: {} in its names stands for the parameter's own name. operation None: rows stay."""

    part: str
    native: str
    te: str
    parameters: Mapping[str, str]
    """Native name of the parameter -> Transformer Engine's."""
    operation: Operation | None = None


def _group_heads(rows: torch.Tensor, share: Share) -> torch.Tensor:
    """GPT-NeoX's row order of QKV to PER_GROUP."""
    return pack_qkv(*split_qkv(rows.t(), share.heads, share.layout), QKVLayout.PER_GROUP).t().contiguous()


def _ungroup_heads(rows: torch.Tensor, share: Share) -> torch.Tensor:
    return pack_qkv(*split_qkv(rows.t(), share.heads, QKVLayout.PER_GROUP), share.layout).t().contiguous()


def _swap_branches(rows: torch.Tensor, share: Share) -> torch.Tensor:
    """[up; gate] to [gate; up], or back."""
    return torch.cat(rows.chunk(2)[::-1]) if share.mlp.gated else rows


_HEADS = Operation(_group_heads, _ungroup_heads, lambda share: share.heads.qkv_hidden_size)
_BRANCHES = Operation(_swap_branches, _swap_branches, lambda share: share.mlp.linear1_width)

_LINEAR = {"weight": "weight", "bias": "bias"}
_NORM = {"weight": "weight", "bias": "bias", "scale": "weight"}
"""Of a layer norm; `scale` is the one parameter of an rms norm."""

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "attention_output_layernorm",
    "mlp_output_layernorm",
    "attention.q_layernorm",
    "attention.k_layernorm",
    "norm",
)

TABLE = (
    Rule("mha", "attention.query_key_value.{}", "attention.qkv.{}", _LINEAR, _HEADS),
    Rule("mha", "attention.dense.{}", "attention.proj.{}", _LINEAR),
    Rule("layernorm_mlp", "post_attention_layernorm.{}", "mlp.layer_norm_{}", _NORM),
    Rule("layernorm_mlp", "mlp.linear1.{}", "mlp.fc1_{}", _LINEAR, _BRANCHES),
    Rule("layernorm_mlp", "mlp.linear2.{}", "mlp.fc2_{}", _LINEAR),
    *(Rule("norms", f"{name}.{{}}", f"{name}.norm.{{}}", _NORM) for name in _NORMS),
)
"""An earlier rule has precedence: with te_layernorm_mlp the MLP's norm is the module's, whatever the others are."""

_EXTRA_STATES = {
    "attention.qkv.weight": ("attention.qkv", "attention.core_attention", "attention.proj"),
    "mlp.fc1_weight": ("mlp",),
}
"""A weight -> the modules of Transformer Engine that come with it, each of which has an `_extra_state`."""
_COLUMNS = ("attention.query_key_value", "mlp.linear1", "final_linear")
_ROWS = ("attention.dense", "mlp.linear2")


_OF_GROUP = re.compile(r"attention\.(groups\.\d+\.)")


def _renamed(name: str, rules: Dict[str, tuple]) -> tuple:
    """(rule, new name) of a weight; (None, name) where no rule is. What a group of heads has for itself is renamed as
    the same thing of an attention without groups."""
    group = _OF_GROUP.match(name)
    if group is None:
        return rules.get(name, (None, name))
    rule, new = rules.get(_without_group(name), (None, None))
    return (None, name) if rule is None else (rule, f"{group[0]}{new.removeprefix('attention.')}")


def _without_group(name: str) -> str:
    return _OF_GROUP.sub("attention.", name)


def form_of(names: Iterable[str]) -> Form:
    """The form of a model or layer whose weights have these names; a part of which there are none counts as native.

    Raises CheckpointError if a part has both.
    """
    names = set(map(_without_group, names))
    found: Dict[str, List[bool]] = {}
    for rule in TABLE:
        for native, te in rule.parameters.items():
            if rule.native.startswith("post_attention_layernorm") and rule.part == "layernorm_mlp":
                continue  # a native one can as well be a Transformer Engine model's: the MLP's linear layers decide
            found.setdefault(rule.part, [])
            found[rule.part] += [True] * (rule.te.format(te) in names) + [False] * (rule.native.format(native) in names)
    mixed = [part for part, kinds in found.items() if len(set(kinds)) > 1]
    if mixed:
        raise CheckpointError(f"some weights are Transformer Engine's and some are not, in one part: {mixed[0]}")
    return Form(**{part: bool(kinds) and kinds[0] for part, kinds in found.items()})


def as_native(state: State, share: Share, is_rms: bool) -> State:
    """One layer on one rank with the names and rows of a model without Transformer Engine; no `_extra_state`.

    is_rms: the norms are rms norms. Raises CheckpointError if the rows do not fit, or if a weight is there twice.
    """
    rules = _by_te_name(is_rms)
    native: State = {}
    for name, tensor in state.items():
        if is_extra_state(name):
            continue
        rule, new = _renamed(name, rules)
        if new in native or (new != name and new in state):
            raise CheckpointError(f"{new} is there twice, under Transformer Engine's name ({name}) too")
        if rule is not None and rule.operation is not None:
            _check_rows(name, tensor, rule.operation, share)
            tensor = rule.operation.to_native(tensor, share)
        native[new] = tensor
    return native


def as_te(state: State, share: Share, form: Form) -> State:
    """Native weights with the names and rows of a model of that form: inverse of `as_native`."""
    rules = _by_native_name(form)
    converted: State = {}
    for name, tensor in state.items():
        rule, new = _renamed(name, rules)
        if rule is not None and rule.operation is not None:
            _check_rows(name, tensor, rule.operation, share)
            tensor = rule.operation.to_te(tensor, share)
        converted[new] = tensor
    return converted


def empty_extra_states(names: Iterable[str], columns: bool = False, rows: bool = False) -> State:
    """What Transformer Engine keeps beside the weights of these names, with nothing in it.

    columns, rows: te_columnparallel, te_rowparallel. Our models need no such entries; GPT-NeoX's do.
    """
    names = set(names)
    modules = [module for name, those in _EXTRA_STATES.items() if name in names for module in those]
    linears = (_COLUMNS if columns else ()) + (_ROWS if rows else ())
    modules += [module for module in linears if f"{module}.weight" in names]
    return {f"{module}._extra_state": torch.frombuffer(bytearray(NOTHING), dtype=torch.uint8) for module in modules}


def conversion_hints(saved: Iterable[str], wanted: Iterable[str]) -> List[str]:
    """Lines on how to bring a checkpoint and a model together that differ in Transformer Engine's parts."""
    try:
        theirs, ours = form_of(saved), form_of(wanted)
    except CheckpointError:
        return []
    hints = []
    for is_te, kind, direction in ((True, "Transformer Engine's", "native"), (False, "native", "te")):
        parts = [part for part in Form._fields if getattr(theirs, part) == is_te != getattr(ours, part)]
        if parts:
            settings = ", ".join(name for part in parts for name in SWITCHES[part])
            hints.append(
                f"{', '.join(parts)}: {kind} in the checkpoint and not in this model; set {settings} as in the run "
                f"that saved, or convert it: python tools/ckpts/convert_te.py IN OUT --to {direction} "
                f"{' '.join(map(option, parts))}"
            )
    return hints


def option(part: str) -> str:
    """The converter's option for a part."""
    return f"--{part.replace('_', '-')}"


@cache
def _by_te_name(is_rms: bool) -> Dict[str, tuple]:
    """TE's name -> (rule, native name)."""
    other = "weight" if is_rms else "scale"  # the native name that such norms do not have
    return {
        rule.te.format(te): (rule, rule.native.format(native))
        for rule in TABLE
        for native, te in rule.parameters.items()
        if not (rule.parameters is _NORM and native == other)
    }


@cache
def _by_native_name(form: Form) -> Dict[str, tuple]:
    """Native name -> (rule, TE's name), for the parts that are TE's."""
    return {
        rule.native.format(native): (rule, rule.te.format(te))
        for rule in reversed(TABLE)
        if getattr(form, rule.part)
        for native, te in rule.parameters.items()
    }


def _check_rows(name: str, tensor: torch.Tensor, operation: Operation, share: Share) -> None:
    wanted, found = operation.rows(share), tensor.shape[0]
    if found == wanted:
        return
    message = f"{name} has {found} rows on a rank, and {wanted} by the config"
    if operation is _BRANCHES and share.mlp.gated:
        message += (
            "; GPT-NeoX's te_layernorm_mlp has branches of the whole intermediate_size: name a config with "
            f"ffn_hidden_size instead, which is {found // 2} times the number of ranks"
        )
    raise CheckpointError(message)
