"""The key/value cache of generation: allocated once, sized from the geometry, filled in place.

A layer with a window keeps no more tokens than a query can see. Batches of prompts of unequal length are the
generator's business; the cache is rectangular and causal by position.
"""

from typing import Iterable, Optional, Sequence, Tuple, Union

import torch

from megatron import mpu
from megatron.geometry import HeadGeometry
from megatron.model.attention.cache_formats import TokenRing, bytes_per_head, cache_format


def cached_key_heads(neox_args, layer_number: int, partition: HeadGeometry) -> int:
    """Heads in the cached keys of one rank, whose share of the layer's geometry (or of a group's) is `partition`.

    The joint qk-layernorm has a scale per *query* head, so with grouped queries one kv head's keys differ from query
    head to query head after it, and all of them are cached. Otherwise the keys are those of the kv heads.
    """
    joint = neox_args.layer_attention(layer_number).qk_norm == "joint"
    return partition.num_attention_heads if joint else partition.num_kv_heads


def key_heads_per_partition(neox_args, layer_number: int = 0) -> int:
    """Heads in this rank's cached keys: see cached_key_heads."""
    partition = neox_args.head_geometry(layer_number).shard(mpu.get_model_parallel_world_size())
    return cached_key_heads(neox_args, layer_number, partition)


def cached_tokens(max_tokens: int, window: Optional[int]) -> int:
    """Tokens that a layer keeps of a text of max_tokens: with a window, the query itself and those it can see."""
    return max_tokens if window is None else min(max_tokens, window + 1)


def is_te_attention(neox_args) -> bool:
    """Transformer Engine attends and keeps its own cache, of all tokens even under a window."""
    return neox_args.te_mha or neox_args.te_fp8_mha


def layer_cache_bytes(neox_args, layer_number: int, model_parallel_size: int, batch_size: int, max_tokens: int) -> int:
    """Bytes of one layer's cache on one of model_parallel_size ranks."""
    partition = neox_args.head_geometry(layer_number).shard(model_parallel_size)
    form = cache_format(neox_args.kv_cache_dtype, neox_args.params_dtype)
    window = None if is_te_attention(neox_args) else neox_args.layer_attention(layer_number).window
    tokens = cached_tokens(max_tokens, window) * batch_size
    heads = [cached_key_heads(neox_args, layer_number, group) + group.num_kv_heads for group in partition.groups]
    widths = [bytes_per_head(form, group.head_dim) for group in partition.groups]
    return tokens * sum(count * width for count, width in zip(heads, widths, strict=True))


class LayerKVCache:
    """Keys (after norm and rotation) and values of one layer on one rank.

    What `append` returns went through the cache's number format, the new tokens too, so that a result does not depend
    on the pieces in which the tokens came.
    """

    def __init__(
        self,
        geometry: HeadGeometry,
        batch_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        key_heads: int,
        window: Optional[int] = None,
        kv_cache_dtype: Optional[str] = None,
    ):
        """geometry is this rank's share, dtype that of the model, window in tokens beside the query itself.

        Allocates k [t, b, m', d] and v [t, b, m, d] for t = cached_tokens(max_tokens, window).
        """
        self.max_tokens = max_tokens
        self.window = window
        self.length = 0
        self.oldest = 0
        self._capacity = cached_tokens(max_tokens, window)
        form = cache_format(kv_cache_dtype, dtype)
        self._k, self._v = (
            TokenRing(form, self._capacity, (batch_size, heads, geometry.head_dim), device)
            for heads in (key_heads, geometry.num_kv_heads)
        )

    @property
    def groups(self) -> Tuple["LayerKVCache", ...]:
        """The caches of the layer's groups of heads: itself."""
        return (self,)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Store k [s, b, m', d] and v [s, b, m, d] behind what is there; return every key and value a query may see.

        Returned are all tokens so far; or, with a window, those that one of the s queries sees, so query i stands
        behind i + t - s of the t returned. They are in order but for one case: a single token in a full window, whose
        query sees all of them. Then the oldest is at index `oldest` and the others follow in a circle. What is
        returned may be a view of the cache, good until the next call.

        Raises ValueError when they do not fit, or have another batch size or number of heads than the cache.
        """
        start, end = self.length, self.length + k.shape[0]
        self._check(k, v, end)
        self.length, self.oldest = end, 0
        if end <= self._capacity:
            return self._k.put(start, k), self._v.put(start, v)
        if k.shape[0] == 1:  # overwrites the one token that its query cannot see
            self.oldest = end % self._capacity
            return self._k.put(start, k), self._v.put(start, v)
        first_seen = max(0, start - self.window)
        return self._k.extend(first_seen, start, k), self._v.extend(first_seen, start, v)

    def advance(self) -> Tuple[int, int]:
        """Make room for one more token -> (slot, stored): where it goes, and how many slots are then in use.

        `put` must follow. Together they are `append` for a single token, whose query sees every key, in parts of which
        one is the same work for every token. Raises ValueError when the cache is full.
        """
        start, end = self.length, self.length + 1
        self._check_room(end)
        self.length = end
        self.oldest = end % self._capacity if end > self._capacity else 0
        return start % self._capacity, min(end, self._capacity)

    def put(
        self, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, stored: int
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Store k [1, b, m', d] and v [1, b, m, d] in a slot, int64 [1]; return the first `stored` keys and values."""
        return self._k.put_one(slot, k, stored), self._v.put_one(slot, v, stored)

    def _check(self, k: torch.Tensor, v: torch.Tensor, end: int) -> None:
        self._check_room(end)
        if k.shape[0] != v.shape[0]:
            raise ValueError(f"the KV cache was given {k.shape[0]} tokens of keys and {v.shape[0]} of values")
        if tuple(k.shape[1:]) != self._k.shape or tuple(v.shape[1:]) != self._v.shape:
            raise ValueError(
                f"the KV cache was made for k {self._k.shape} and v {self._v.shape} [batch, heads, head_dim] and was "
                f"given {tuple(k.shape[1:])} and {tuple(v.shape[1:])}"
            )

    def _check_room(self, end: int) -> None:
        if end > self.max_tokens:
            raise ValueError(f"the KV cache holds max_tokens={self.max_tokens} tokens and was given {end}")

    def reset(self) -> None:
        """Forget the tokens, keep the memory."""
        self.length = self.oldest = 0

    @property
    def parts(self) -> Tuple[torch.Tensor, ...]:
        """What is allocated, each tensor [t, b, heads, width]."""
        return *self._k.parts, *self._v.parts

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return self._k.nbytes + self._v.nbytes


class GroupsKVCache:
    """The caches of a layer whose heads are of several widths, one for each group; all are given the same tokens."""

    def __init__(self, groups: Sequence[LayerKVCache]):
        self.groups = tuple(groups)

    @property
    def length(self) -> int:
        """Tokens fed so far."""
        return self.groups[0].length

    @property
    def parts(self) -> Tuple[torch.Tensor, ...]:
        """What is allocated, as LayerKVCache.parts."""
        return tuple(part for group in self.groups for part in group.parts)

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all groups."""
        return sum(group.nbytes for group in self.groups)

    def reset(self) -> None:
        """Forget the tokens, keep the memory."""
        for group in self.groups:
            group.reset()


AnyLayerCache = Union[LayerKVCache, GroupsKVCache]


class KVCache:
    """The cache of each transformer layer of this rank's pipeline stage, by layer number (0-based)."""

    def __init__(self, neox_args, layer_numbers: Iterable[int], batch_size: int, max_tokens: int):
        """Allocates for this rank, as kv_cache_dtype (default params_dtype) on the current device."""
        self._layers = {number: _layer_cache(neox_args, number, batch_size, max_tokens) for number in layer_numbers}

    def __getitem__(self, layer_number: int) -> LayerKVCache:
        return self._layers[layer_number]

    @property
    def length(self) -> int:
        """Tokens fed so far, the same in every layer between two steps; 0 without layers."""
        return next((layer.length for layer in self._layers.values()), 0)

    @property
    def nbytes(self) -> int:
        """Allocated bytes over all layers."""
        return sum(layer.nbytes for layer in self._layers.values())

    def reset(self) -> None:
        """Forget the tokens of every layer, keep the memory."""
        for layer in self._layers.values():
            layer.reset()


def _layer_cache(neox_args, number: int, batch_size: int, max_tokens: int):
    """The cache of one layer: ours, or Transformer Engine's behind the same properties."""
    if is_te_attention(neox_args):
        from megatron.model.transformer_engine.inference import te_layer_cache

        return te_layer_cache(neox_args, number, batch_size, max_tokens)
    partition = neox_args.head_geometry(number).shard(mpu.get_model_parallel_world_size())
    groups = [
        LayerKVCache(
            group,
            batch_size,
            max_tokens,
            neox_args.params_dtype,
            mpu.current_device(),
            cached_key_heads(neox_args, number, group),
            neox_args.layer_attention(number).window,
            neox_args.kv_cache_dtype,
        )
        for group in partition.groups
    ]
    return GroupsKVCache(groups) if len(groups) > 1 else groups[0]
