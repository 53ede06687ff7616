"""Trainable parameters, for the whole model however it is split over ranks."""

from typing import List

_NORM_VECTORS = {"layernorm": 2, "rmsnorm": 1, "non_parametric_layernorm": 0, "te_layernorm": 2, "te_rmsnorm": 1}
"""Parameter vectors of each norm; scalenorm has a single number instead."""


def num_parameters(neox_args) -> int:
    """Trainable parameters; a tied output layer counts once. Equals the sum of numel over the built model."""
    layers = sum(_layer_parameters(neox_args, number) for number in range(neox_args.num_layers))
    hidden = neox_args.hidden_size
    embedding = neox_args.padded_vocab_size * hidden
    total = layers + embedding + _norm_parameters(neox_args, hidden)
    if neox_args.no_weight_tying:
        total += embedding
    if neox_args.use_bias_in_output_layer:
        total += neox_args.padded_vocab_size
    if neox_args.pos_emb == "learned":
        total += neox_args.max_position_embeddings * hidden
    if neox_args.pos_emb == "rpe":  # one bias, shared by all layers
        total += neox_args.rpe_num_buckets * neox_args.head_geometry().num_attention_heads
    return total


def layer_matrices(neox_args, number: int) -> int:
    """Parameters of one layer that multiply activations."""
    geometry, mlp = neox_args.head_geometry(number), neox_args.mlp_geometry(number)
    attention = geometry.hidden_size * (geometry.qkv_hidden_size + geometry.query_hidden_size)
    return attention + mlp.hidden_size * (mlp.linear1_width + mlp.ffn_hidden_size)


def _layer_parameters(neox_args, number: int) -> int:
    geometry, mlp = neox_args.head_geometry(number), neox_args.mlp_geometry(number)
    total = layer_matrices(neox_args, number) + _layer_norms(neox_args) * _norm_parameters(
        neox_args, geometry.hidden_size
    )
    if neox_args.qkv_has_bias:
        total += geometry.qkv_hidden_size
    if neox_args.use_bias_in_attn_linear:
        total += geometry.hidden_size
    if neox_args.use_bias_in_mlp:
        total += mlp.linear1_width + mlp.hidden_size
    return total + sum(_norm_parameters(neox_args, width) for width in _qk_norm_widths(neox_args, number))


def _qk_norm_widths(neox_args, number: int) -> List[int]:
    """The width of each norm on queries and keys, over all ranks."""
    geometry = neox_args.head_geometry(number)
    widths = {
        "joint": [geometry.query_hidden_size],
        "per_head": [geometry.head_dim] * 2,
        "full_width": [geometry.query_hidden_size, geometry.kv_hidden_size],
    }
    return widths.get(neox_args.layer_attention(number).qk_norm, [])


def _layer_norms(neox_args) -> int:
    """Norms over the residual stream in one layer, one inside the MLP included."""
    return 4 if neox_args.norm_placement == "sandwich" else 2


def _norm_parameters(neox_args, width: int) -> int:
    return 1 if neox_args.norm == "scalenorm" else _NORM_VECTORS[neox_args.norm] * width
