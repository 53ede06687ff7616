"""What attention computes in one layer, apart from its widths: scale, window, cap, positions and norm."""

from dataclasses import dataclass
from typing import Any, Optional

from megatron.neox_arguments.layer_types import is_by_layer_type, of_layer_type
from megatron.neox_arguments.rope_scaling import RopeScaling, parse_rope_scaling
from megatron.neox_arguments.widths import head_geometry


@dataclass(frozen=True)
class RotarySettings:
    """What a rotary table is made from. `positions`: how many there are (seq_length); those beyond are refused, with a
    scaling too: a text may be as long as seq_length says, and max_position_embeddings bounds that. `base`: with
    rotary_denominator_scale in it, so base^(-2i/ndims) are the frequencies, and all that is made from a base follows.
    """

    ndims: int
    base: float
    positions: int
    scaling: Optional[RopeScaling] = None


@dataclass(frozen=True)
class LayerAttention:
    """One layer's function. `window` is in tokens beside the query itself, None for all tokens before it; `rotary` is
    None without rotary positions."""

    layer_type: str
    softmax_scale: float
    window: Optional[int] = None
    logit_softcap: Optional[float] = None
    rotary: Optional[RotarySettings] = None
    qk_norm: Optional[str] = None
    v_norm: bool = False


def layer_attention(args: Any, layer_number: int = 0, group: int = 0) -> LayerAttention:
    """The attention of layer `layer_number` (0-based), in one of its groups of heads; `args` needs the arguments' names
    as attributes.

    Raises ConfigError for a rope_scaling that is not a known one.
    """
    geometry = head_geometry(args, layer_number).groups[group]
    layer_type = args.layer_types[layer_number]
    return LayerAttention(
        layer_type=layer_type,
        softmax_scale=geometry.default_softmax_scale if args.softmax_scale is None else args.softmax_scale,
        window=args.sliding_window_width if layer_type == "sliding_attention" else None,
        logit_softcap=args.attn_logit_softcap,
        rotary=_rotary(args, geometry.rotary_ndims, layer_type) if has_rotary(args, layer_number) else None,
        qk_norm=args.qk_norm_type or ("joint" if args.use_qk_layernorm else None),
        v_norm=args.v_norm,
    )


def has_rotary(args: Any, layer_number: int) -> bool:
    """Whether queries and keys of a layer are rotated by their positions."""
    return args.pos_emb == "rotary" and (args.no_rope_layers is None or bool(args.no_rope_layers[layer_number]))


def rope_scaling_of_layer_type(args: Any, ndims: int, layer_type: str) -> Optional[RopeScaling]:
    """The scaling of the layers of one type. Raises ConfigError with every problem of its mapping."""
    by_type = is_by_layer_type(args.rope_scaling)
    return parse_rope_scaling(
        of_layer_type(args.rope_scaling, layer_type),
        ndims,
        args.max_position_embeddings,
        base=of_layer_type(args.rotary_emb_base, layer_type),
        rotary_pct=args.rotary_pct,
        name=f"rope_scaling.{layer_type}" if by_type else "rope_scaling",
    )


def _rotary(args: Any, ndims: int, layer_type: str) -> RotarySettings:
    return RotarySettings(
        ndims=ndims,
        base=float(of_layer_type(args.rotary_emb_base, layer_type)) ** (1 / (args.rotary_denominator_scale or 1.0)),
        positions=args.seq_length,
        scaling=rope_scaling_of_layer_type(args, ndims, layer_type),
    )
