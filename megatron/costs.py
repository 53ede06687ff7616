"""What a model costs: parameters, floating-point operations and KV-cache bytes, all from the geometry.

Every number is for the whole model, however it is split over ranks.
"""

from typing import List, Tuple

from megatron.model.attention.cache import layer_cache_bytes

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


def flops_per_token(neox_args, seq_length: int | None = None) -> float:
    """Floating-point operations per token of a training step, forward and backward, at `seq_length` tokens.

    6 per matrix parameter (2 forward, 4 backward; the output layer counts, the embedding lookup does not) plus
    12 * query width * seq_length per layer for scores and their use; the causal half is not taken off. As Narayanan
    et al. 2021 (arXiv:2104.04473, appendix) and Chowdhery et al. 2022 (PaLM, appendix B) count, with the true
    projection widths. Recomputed activations do not count: these are the model's operations, not the hardware's.
    """
    seq_length = neox_args.seq_length if seq_length is None else seq_length
    head = neox_args.padded_vocab_size * neox_args.hidden_size
    total = 6.0 * head
    for number in range(neox_args.num_layers):
        query_width = neox_args.head_geometry(number).query_hidden_size
        total += 6.0 * _layer_matrices(neox_args, number) + 12.0 * query_width * seq_length
    return total


def kv_cache_bytes(neox_args, batch_size: int, tokens: int) -> int:
    """Bytes of the KV caches of all layers on all ranks for `batch_size` texts of `tokens` tokens, as allocated.

    In kv_cache_dtype, scales included. A layer with a window keeps no more tokens than that. Key/value heads that
    are replicated over model_parallel_size ranks are cached on each of them.
    """
    ranks = neox_args.model_parallel_size
    layers = range(neox_args.num_layers)
    return ranks * sum(layer_cache_bytes(neox_args, number, ranks, batch_size, tokens) for number in layers)


def kv_cache_bytes_per_token(neox_args) -> int:
    """Bytes that one token of one text takes in the KV caches, as long as it is within the windows of all layers."""
    return kv_cache_bytes(neox_args, batch_size=1, tokens=1)


def geometry_table(neox_args) -> str:
    """The widths of the model as a small text table, for the start of a run."""
    rows = _geometry_rows(neox_args)
    left = max(len(name) for name, _ in rows)
    right = max(len(value) for _, value in rows)
    line = f"+-{'-' * left}-+-{'-' * right}-+"
    body = [f"| {name:<{left}} | {value:<{right}} |" for name, value in rows]
    return "\n".join([line, *body, line])


def _geometry_rows(neox_args) -> List[Tuple[str, str]]:
    geometry = neox_args.head_geometry()
    hidden, query, qkv = geometry.hidden_size, geometry.query_hidden_size, geometry.qkv_hidden_size
    rotary = f"{geometry.rotary_ndims} of {geometry.head_dim}" if geometry.rotary_ndims else "none"
    ratio = "= hidden_size" if geometry.matches_hidden else f"{query / hidden:.3g} x hidden_size"
    cache_dtype = neox_args.kv_cache_dtype or neox_args.precision
    return [
        ("layers", str(neox_args.num_layers)),
        ("hidden_size", str(hidden)),
        ("num_attention_heads", str(geometry.num_attention_heads)),
        ("num_kv_heads", str(geometry.num_kv_heads)),
        ("head_dim", str(geometry.head_dim)),
        ("query width", f"{query} ({ratio})"),
        ("key/value width", str(geometry.kv_hidden_size)),
        ("QKV projection", f"{hidden} -> {qkv}"),
        ("output projection", f"{query} -> {hidden}"),
        ("MLP width", str(neox_args.mlp_geometry().ffn_hidden_size)),
        ("rotary dimensions", rotary),
        ("softmax scale", f"{neox_args.attention_scale():.6g}"),
        ("KV cache per token", f"{kv_cache_bytes_per_token(neox_args):,} bytes ({cache_dtype})"),
        ("parameters", f"{num_parameters(neox_args):,}"),
        ("FLOPs per token", f"{flops_per_token(neox_args):.4g} (forward + backward)"),
    ]


def _layer_matrices(neox_args, number: int) -> int:
    """Parameters of one layer that multiply activations."""
    geometry, mlp = neox_args.head_geometry(number), neox_args.mlp_geometry(number)
    attention = geometry.hidden_size * (geometry.qkv_hidden_size + geometry.query_hidden_size)
    return attention + mlp.hidden_size * (mlp.linear1_width + mlp.ffn_hidden_size)


def _layer_parameters(neox_args, number: int) -> int:
    geometry, mlp = neox_args.head_geometry(number), neox_args.mlp_geometry(number)
    total = _layer_matrices(neox_args, number) + _layer_norms(neox_args) * _norm_parameters(
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
