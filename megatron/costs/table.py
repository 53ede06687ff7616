"""The widths of a model and what they cost, as a small table for the start of a run."""

from typing import List, Tuple

from megatron.costs.cache import kv_cache_bytes_per_token
from megatron.costs.flops import flops_per_token
from megatron.costs.parameters import num_parameters, num_trained_parameters
from megatron.geometry import HeadGeometry
from megatron.neox_arguments.lora import lora_settings
from megatron.neox_arguments.per_layer import layers_text


def geometry_table(neox_args) -> str:
    """The widths of the model as a small text table, for the start of a run."""
    rows = _geometry_rows(neox_args)
    left = max(len(name) for name, _ in rows)
    right = max(len(value) for _, value in rows)
    line = f"+-{'-' * left}-+-{'-' * right}-+"
    body = [f"| {name:<{left}} | {value:<{right}} |" for name, value in rows]
    return "\n".join([line, *body, line])


def _geometry_rows(neox_args) -> List[Tuple[str, str]]:
    """Where layers differ, one row for each kind of them takes the place of the rows of their widths."""
    cache_dtype = neox_args.kv_cache_dtype or neox_args.precision
    return [
        ("layers", str(neox_args.num_layers)),
        ("hidden_size", str(neox_args.hidden_size)),
        ("num_attention_heads", str(neox_args.num_attention_heads)),
        *(_width_rows(neox_args) if neox_args.has_uniform_heads else _rows_by_layer(neox_args)),
        ("MLP width", str(neox_args.mlp_geometry().ffn_hidden_size)),
        ("KV cache per token", f"{kv_cache_bytes_per_token(neox_args):,} bytes ({cache_dtype})"),
        ("parameters", _parameters(neox_args)),
        ("FLOPs per token", f"{flops_per_token(neox_args):.4g} (forward + backward)"),
    ]


def _parameters(neox_args) -> str:
    total, settings = num_parameters(neox_args), lora_settings(neox_args)
    if settings is None:
        return f"{total:,}"
    trained = num_trained_parameters(neox_args)
    return f"{total:,}, of which {trained:,} in adapters of rank {settings.rank} are trained ({trained / total:.2%})"


def _width_rows(neox_args) -> List[Tuple[str, str]]:
    geometry = neox_args.head_geometry()
    hidden, query, qkv = geometry.hidden_size, geometry.query_hidden_size, geometry.qkv_hidden_size
    ratio = "= hidden_size" if geometry.matches_hidden else f"{query / hidden:.3g} x hidden_size"
    return [
        ("num_kv_heads", str(geometry.num_kv_heads)),
        ("head_dim", str(geometry.head_dim)),
        ("query width", f"{query} ({ratio})"),
        ("key/value width", str(geometry.kv_hidden_size)),
        ("QKV projection", f"{hidden} -> {qkv}"),
        ("output projection", f"{query} -> {hidden}"),
        ("rotary dimensions", _rotary(geometry)),
        ("softmax scale", f"{neox_args.attention_scale():.6g}"),
    ]


def _rows_by_layer(neox_args) -> List[Tuple[str, str]]:
    return [
        (
            layers_text(numbers),
            f"{f'{heads.num_attention_heads} heads, ' if len(geometry.groups) > 1 else ''}"
            f"head_dim {heads.head_dim}, {heads.num_kv_heads} kv heads, "
            f"query width {heads.query_hidden_size}, QKV {heads.qkv_hidden_size}, rotary {_rotary(heads)}, "
            f"scale {neox_args.attention_scale(numbers[0], group):.6g}",
        )
        for geometry, numbers in neox_args.layers_by_geometry().items()
        for group, heads in enumerate(geometry.groups)
    ]


def _rotary(geometry: HeadGeometry) -> str:
    return f"{geometry.rotary_ndims} of {geometry.head_dim}" if geometry.rotary_ndims else "none"
