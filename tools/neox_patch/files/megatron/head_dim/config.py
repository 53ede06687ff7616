"""What the arguments say about attention heads, as `megatron.geometry` reads it. Nothing else divides a width."""

from dataclasses import replace

from megatron.geometry import HeadGeometry


def head_geometry(neox_args) -> HeadGeometry:
    """The widths of an attention layer of the whole model; `.shard(world_size)` gives those of one rank.

    Without head_dim the number of rotary dimensions is taken as it comes, as ever. Raises ConfigError
    (megatron.errors) with every problem.
    """
    rotary_pct = neox_args.rotary_pct if neox_args.pos_emb == "rotary" else None
    widths = (neox_args.hidden_size, neox_args.num_attention_heads, neox_args.num_kv_heads, neox_args.head_dim)
    if neox_args.head_dim is not None or rotary_pct is None:
        return HeadGeometry.from_config(*widths, rotary_pct)
    geometry = HeadGeometry.from_config(*widths)
    return replace(geometry, rotary_ndims=int(geometry.head_dim * rotary_pct))


def softmax_scale(neox_args) -> float:
    """What attention scores are multiplied by: `softmax_scale`, by default head_dim ** -0.5 (1 / head_dim with muP)."""
    if neox_args.softmax_scale is not None:
        return neox_args.softmax_scale
    geometry = head_geometry(neox_args)
    return 1.0 / geometry.head_dim if neox_args.use_mup else geometry.default_softmax_scale
