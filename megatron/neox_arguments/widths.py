"""From arguments to the geometry of a layer. The arithmetic itself is in megatron/geometry.py."""

from typing import Any

from megatron.geometry import HeadGeometry, MLPGeometry

GATED_ACTIVATIONS = ("geglu", "geglu_tanh", "reglu", "swiglu", "bilinear", "glu")
"""Activations whose MLP has an up and a gate branch, stacked in linear1."""


def head_geometry(args: Any, layer_number: int = 0) -> HeadGeometry:
    """The attention widths of layer `layer_number` (0-based); `args` needs GPT-NeoX's argument names as attributes.

    All layers are alike at present. Raises ConfigError if the numbers do not fit together.
    """
    return HeadGeometry.from_config(
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_kv_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        rotary_pct=args.rotary_pct if args.pos_emb == "rotary" else None,
    )


def mlp_geometry(args: Any, layer_number: int = 0) -> MLPGeometry:
    """The MLP widths of layer `layer_number` (0-based).

    Raises ConfigError if two ways of giving the width are used at once.
    """
    return MLPGeometry.from_config(
        hidden_size=args.hidden_size,
        gated=args.activation in GATED_ACTIVATIONS,
        ffn_hidden_size=args.ffn_hidden_size,
        intermediate_size=args.intermediate_size,
        expansion_factor=args.expansion_factor,
        mlp_multiple_of=args.mlp_multiple_of,
    )
