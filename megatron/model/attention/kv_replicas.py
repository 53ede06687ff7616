"""From the QKV projection's output to this rank's heads, whether or not ranks share key/value heads."""

import torch

from megatron import mpu
from megatron.geometry import HeadGeometry
from megatron.model.attention.qkv import Heads, split_qkv


def own_heads(mixed: torch.Tensor, geometry: HeadGeometry) -> Heads:
    """mixed [s, b, this rank's rows] -> q [s, b, n, d], k and v [s, b, m, d] of this rank; geometry is the whole one.

    With fewer key/value heads than ranks, a rank projects onto its piece of the keys and values only, which are then
    gathered: m is 1, and ranks that share a head have equal k and v.
    """
    ranks = mpu.get_model_parallel_world_size()
    partition = geometry.shard(ranks)
    if geometry.kv_replicas(ranks) == 1:
        return split_qkv(mixed, partition, geometry.qkv_layout)
    q, kv = mixed.tensor_split([partition.query_hidden_size], dim=-1)
    kv = kv.unflatten(-1, (geometry.kv_parts, -1))  # [s, b, 2, piece of m·d]
    heads = mpu.gather_kv_head(kv, geometry).split(1, dim=-2)  # [s, b, 1, d] each
    return q.unflatten(-1, (-1, geometry.head_dim)), heads[0], heads[-1]
