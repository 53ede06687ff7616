"""Parameters of a model without Transformer Engine as the same model with it holds them, written by hand."""

import re

import torch

from tests.helpers.model_runs import named_parameters
from tests.helpers.te_attention import NAMES, te_row_order

NATIVE_NAME = {
    "fc1_weight": "linear1.weight",
    "fc1_bias": "linear1.bias",
    "fc2_weight": "linear2.weight",
    "fc2_bias": "linear2.bias",
    "layer_norm_weight": "post_attention_layernorm.weight",
    "layer_norm_bias": "post_attention_layernorm.bias",
}
"""TE's name in the MLP -> that of the native layer; post_attention_layernorm is the MLP's neighbour."""

_ATTENTION = {te: native for native, te in NAMES.items()}


def native_layout(name, rows, gated):
    """fc1's [gate; up] as linear1's [up; gate]; the swap is its own inverse. Other parameters as they are."""
    if not gated or not name.startswith("fc1"):
        return rows
    half = rows.shape[0] // 2
    return torch.cat([rows[half:], rows[:half]])


def native_name(key, norm):
    """`layer index.name` with TE -> without."""
    key = key.replace(".norm.weight", ".weight").replace(".norm.bias", ".bias") if norm.startswith("te_") else key
    match = re.fullmatch(r"(\d+)\.mlp\.(\w+)", key)
    if match and match[2] in NATIVE_NAME:
        inner = NATIVE_NAME[match[2]]
        key = f"{match[1]}.{inner}" if inner.startswith("post_") else f"{match[1]}.mlp.{inner}"
    match = re.fullmatch(r"(\d+)\.attention\.(\w+\.\w+)", key)
    if match and match[2] in _ATTENTION:
        key = f"{match[1]}.attention.{_ATTENTION[match[2]]}"
    if "rmsnorm" in norm and re.search(r"norm\.weight$", key):
        key = key.removesuffix("weight") + "scale"
    return key


def copy_from_native(model, native, args):
    """Fill `model` from `native`, one rank each. Returns [(key, parameter, native parameter, native -> TE's rows)]."""
    gated = args.mlp_geometry().gated
    theirs, pairs = dict(named_parameters(native)), []
    for key, parameter in named_parameters(model):

        def translate(tensor, key=key):
            if ".attention.qkv." in key:
                return tensor[te_row_order(args.head_geometry())]
            return native_layout(key.rpartition(".")[2], tensor, gated)

        other = theirs.pop(native_name(key, args.norm))
        with torch.no_grad():
            parameter.copy_(translate(other))
        pairs.append((key, parameter, other, translate))
    assert not theirs, f"{list(theirs)} have no counterpart"
    return pairs
