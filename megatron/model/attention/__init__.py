"""Self-attention: projections and their row orders, the KV cache, and the kernels."""

from megatron.model.attention.cache import KVCache, LayerKVCache, key_heads_per_partition
from megatron.model.attention.qkv import pack_qkv, split_qkv
from megatron.model.attention.self_attention import ParallelSelfAttention

__all__ = [
    "KVCache",
    "LayerKVCache",
    "ParallelSelfAttention",
    "key_heads_per_partition",
    "pack_qkv",
    "split_qkv",
]
