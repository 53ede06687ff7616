"""GPT-NeoX's fused query_key_value <-> the q, k and v of Hugging Face's models, for heads of any width.

The rows of a fused parameter are, on each tensor-parallel rank, all of q, then all of k, then all of v; if there are as
many key/value heads as query heads they are instead, for each head, its q, k and v. Shapes do not tell the two apart.
"""

from typing import Any, Dict, List, Sequence

import torch

from megatron.errors import ConversionError
from megatron.geometry import HeadGeometry, QKVLayout


def hf_geometry(hf_config) -> HeadGeometry:
    """The widths that a config object of transformers means. A head_dim that is absent or null is the quotient.

    Raises ConfigError if there is none, or the numbers do not fit together.
    """
    return HeadGeometry.from_config(
        hf_config.hidden_size,
        hf_config.num_attention_heads,
        getattr(hf_config, "num_key_value_heads", None),
        getattr(hf_config, "head_dim", None),
    )


def split_qkv(shards: Sequence[torch.Tensor], geometry: HeadGeometry) -> List[torch.Tensor]:
    """The fused parameter of each tensor-parallel rank [(n + 2m)d / p, ...] -> q [nd, ...], k [md, ...], v [md, ...].

    Weights and biases alike. Raises ConversionError if the rows are not those of the geometry.
    """
    local = _shard(geometry, len(shards))
    for shard in shards:
        if shard.shape[0] != local.qkv_hidden_size:
            raise ConversionError(
                f"query_key_value has {shard.shape[0]} rows on a rank; num_attention_heads="
                f"{geometry.num_attention_heads}, num_kv_heads={geometry.num_kv_heads} and head_dim="
                f"{geometry.head_dim} at model_parallel_size={len(shards)} make {local.qkv_hidden_size}; use the "
                "settings that the checkpoint was made with"
            )
    parts = [_split_rank(shard, local, geometry.qkv_layout) for shard in shards]
    return [torch.cat([rank[part] for rank in parts]) for part in range(3)]


def merge_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: HeadGeometry, model_parallel_size: int
) -> List[torch.Tensor]:
    """Inverse of split_qkv: one fused parameter for each tensor-parallel rank.

    Raises ConversionError if the tensors, or the number of ranks, do not fit the geometry.
    """
    local = _shard(geometry, model_parallel_size)
    rows = [geometry.query_hidden_size, geometry.kv_hidden_size, geometry.kv_hidden_size]
    if [len(part) for part in (q, k, v)] != rows:
        raise ConversionError(
            f"q, k and v have {len(q)}, {len(k)} and {len(v)} rows, but num_attention_heads="
            f"{geometry.num_attention_heads}, num_key_value_heads={geometry.num_kv_heads} and head_dim="
            f"{geometry.head_dim} make {rows[0]}, {rows[1]} and {rows[2]}"
        )
    split = q.split(local.query_hidden_size), k.split(local.kv_hidden_size), v.split(local.kv_hidden_size)
    ranks = ([part[rank] for part in split] for rank in range(model_parallel_size))
    return [_merge_rank(parts, local, geometry.qkv_layout) for parts in ranks]


def _shard(geometry: HeadGeometry, model_parallel_size: int) -> HeadGeometry:
    """GPT-NeoX gives no key/value head to two ranks."""
    for name, heads in (
        ("num_attention_heads", geometry.num_attention_heads),
        ("num_kv_heads", geometry.num_kv_heads),
    ):
        if heads % model_parallel_size:
            raise ConversionError(
                f"{name}={heads} does not divide by model_parallel_size={model_parallel_size}; use fewer ranks"
            )
    return geometry.shard(model_parallel_size)


def _split_rank(fused: torch.Tensor, local: HeadGeometry, layout: QKVLayout) -> List[torch.Tensor]:
    if layout is QKVLayout.PER_RANK:
        return list(fused.split([local.query_hidden_size, local.kv_hidden_size, local.kv_hidden_size]))
    heads = fused.reshape(local.num_attention_heads, 3, local.head_dim, *fused.shape[1:])
    return [heads[:, part].reshape(-1, *fused.shape[1:]) for part in range(3)]


def _merge_rank(parts: Sequence[torch.Tensor], local: HeadGeometry, layout: QKVLayout) -> torch.Tensor:
    if layout is QKVLayout.PER_RANK:
        return torch.cat(list(parts))
    heads = [part.reshape(local.num_attention_heads, local.head_dim, *part.shape[1:]) for part in parts]
    return torch.stack(heads, dim=1).reshape(-1, *parts[0].shape[1:])


def raw_head_dim(params: Dict[str, Any]) -> int:
    """Of the params.json of Meta's and Mistral's own checkpoints. Raises ConfigError if there is no such width."""
    return HeadGeometry.from_config(
        params["dim"], params["n_heads"], params.get("n_kv_heads"), params.get("head_dim")
    ).head_dim
