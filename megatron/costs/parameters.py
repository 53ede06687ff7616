"""Trainable parameters, for the whole model however it is split over ranks."""

from typing import Dict, List

_NORM_VECTORS = {"layernorm": 2, "rmsnorm": 1, "non_parametric_layernorm": 0, "te_layernorm": 2, "te_rmsnorm": 1}
"""Parameter vectors of each norm; scalenorm has a single number instead."""


def num_parameters(neox_args) -> int:
    """Trainable parameters; a tied output layer counts once. Equals the sum of numel over the built model."""
    return sum(parameter_parts(neox_args).values())


def parameter_parts(neox_args) -> Dict[str, int]:
    """Parameters by part: embedding, positions (learned, or rpe's biases), attention, mlp, norms, head.

    attention and mlp include biases; norms are those of the residual stream, of queries and keys, and the last one.
    A tied head is part of the embedding.
    """
    hidden, rows = neox_args.hidden_size, neox_args.padded_vocab_size
    layers = range(neox_args.num_layers)
    head = rows * hidden if neox_args.no_weight_tying else 0
    return {
        "embedding": rows * hidden,
        "positions": _position_parameters(neox_args),
        "attention": sum(_attention_parameters(neox_args, number) for number in layers),
        "mlp": sum(_mlp_parameters(neox_args, number) for number in layers),
        "norms": sum(_layer_norm_parameters(neox_args, number) for number in layers)
        + _norm_parameters(neox_args, hidden),
        "head": head + (rows if neox_args.use_bias_in_output_layer else 0),
    }


def _position_parameters(neox_args) -> int:
    if neox_args.pos_emb == "learned":
        return neox_args.max_position_embeddings * neox_args.hidden_size
    if neox_args.pos_emb == "rpe":  # one bias, shared by all layers
        return neox_args.rpe_num_buckets * neox_args.head_geometry().num_attention_heads
    return 0


def _attention_parameters(neox_args, number: int) -> int:
    geometry = neox_args.head_geometry(number)
    total = geometry.hidden_size * (geometry.qkv_hidden_size + geometry.query_hidden_size)
    if neox_args.qkv_has_bias:
        total += geometry.qkv_hidden_size
    if neox_args.use_bias_in_attn_linear:
        total += geometry.hidden_size
    return total


def _mlp_parameters(neox_args, number: int) -> int:
    mlp = neox_args.mlp_geometry(number)
    biases = mlp.linear1_width + mlp.hidden_size if neox_args.use_bias_in_mlp else 0
    return mlp.hidden_size * (mlp.linear1_width + mlp.ffn_hidden_size) + biases


def _layer_norm_parameters(neox_args, number: int) -> int:
    norms = 4 if neox_args.norm_placement == "sandwich" else 2
    return norms * _norm_parameters(neox_args, neox_args.hidden_size) + sum(
        _norm_parameters(neox_args, width) for width in _qk_norm_widths(neox_args, number)
    )


def _qk_norm_widths(neox_args, number: int) -> List[int]:
    """The width of each norm on queries and keys, over all ranks."""
    geometry = neox_args.head_geometry(number)
    widths = {
        "joint": [geometry.query_hidden_size],
        "per_head": [geometry.head_dim] * 2,
        "full_width": [geometry.query_hidden_size, geometry.kv_hidden_size],
    }
    return widths.get(neox_args.layer_attention(number).qk_norm, [])


def _norm_parameters(neox_args, width: int) -> int:
    return 1 if neox_args.norm == "scalenorm" else _NORM_VECTORS[neox_args.norm] * width
