"""Bytes of the KV caches, as they are allocated."""

from megatron.costs.stages import stages
from megatron.model.attention.cache import layer_cache_bytes


def kv_cache_bytes(neox_args, batch_size: int, tokens: int) -> int:
    """Bytes of the KV caches of all layers on all ranks for `batch_size` texts of `tokens` tokens, as allocated.

    In kv_cache_dtype, scales included. A layer with a window keeps no more tokens than that. Key/value heads that
    are replicated over model_parallel_size ranks are cached on each of them.
    """
    ranks = neox_args.model_parallel_size
    layers = range(neox_args.num_layers)
    return ranks * sum(layer_cache_bytes(neox_args, number, ranks, batch_size, tokens) for number in layers)


def kv_cache_bytes_per_rank(neox_args, batch_size: int, tokens: int) -> int:
    """As kv_cache_bytes, on one rank: that of the pipeline stage whose layers take the most."""
    ranks = neox_args.model_parallel_size
    return max(
        sum(layer_cache_bytes(neox_args, number, ranks, batch_size, tokens) for number in stage.layers)
        for stage in stages(neox_args)
    )


def kv_cache_bytes_per_token(neox_args) -> int:
    """Bytes that one token of one text takes in the KV caches, as long as it is within the windows of all layers."""
    return kv_cache_bytes(neox_args, batch_size=1, tokens=1)
