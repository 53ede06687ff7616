"""From the fused QKV projection to heads and back, in each of the three row orders of QKVLayout.

The functions work on the last axis, so they serve activations [s, b, (n + 2m)·d] and, transposed, weights.
"""

from typing import Tuple

import torch

from megatron.geometry import HeadGeometry, QKVLayout

Heads = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def split_qkv(mixed: torch.Tensor, geometry: HeadGeometry, layout: QKVLayout) -> Heads:
    """[..., (n + 2m)·d] -> q [..., n, d], k [..., m, d], v [..., m, d]; geometry is that of one rank.

    Where keys are values too, mixed is [..., (n + m)·d], and v is k.
    """
    if layout is QKVLayout.PER_RANK:
        return _split_blocks(mixed, geometry)
    return _split_groups(mixed, geometry)


def pack_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: QKVLayout) -> torch.Tensor:
    """Inverse of split_qkv: q [..., n, d], k and v [..., m, d] -> [..., (n + 2m)·d]; v is k -> [..., (n + m)·d]."""
    kv = (k,) if v is k else (k, v)
    if layout is QKVLayout.PER_RANK:
        return torch.cat([x.flatten(-2) for x in (q, *kv)], dim=-1)
    q = q.unflatten(-2, (k.shape[-2], -1))  # [..., m, n/m, d]
    groups = torch.cat([q, *(x.unsqueeze(-2) for x in kv)], dim=-2)  # [..., m, n/m + 2, d]
    return groups.flatten(-3)


def _split_blocks(mixed: torch.Tensor, geometry: HeadGeometry) -> Heads:
    """PER_RANK: all q, all k, all v."""
    q, *kv = (x.unflatten(-1, (-1, geometry.head_dim)) for x in mixed.split(geometry.qkv_parts, dim=-1))
    return q, kv[0], kv[-1]


def _split_groups(mixed: torch.Tensor, geometry: HeadGeometry) -> Heads:
    """PER_GROUP: for each kv head its q heads, its k, its v. PER_HEAD is the case of one q head per kv head."""
    heads = geometry.queries_per_kv
    groups = mixed.unflatten(-1, (geometry.num_kv_heads, heads + geometry.kv_parts, geometry.head_dim))
    q = groups[..., :heads, :].flatten(-3, -2)  # [..., n, d]
    k = groups[..., heads, :]
    return q, k, k if geometry.shared_key_value else groups[..., heads + 1, :]
