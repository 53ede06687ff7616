"""The key/value cache of generation: allocated once, sized from the geometry, filled in place.

Batches of prompts of unequal length are the generator's business; the cache is rectangular and causal by position.
"""

from typing import Iterable, Tuple

import torch

from megatron import mpu
from megatron.geometry import HeadGeometry


def key_heads_per_partition(neox_args, layer_number: int = 0) -> int:
    """Heads in this rank's cached keys.

    The joint qk-layernorm has a scale per *query* head, so with grouped queries one kv head's keys differ from query
    head to query head after it, and all of them are cached. Otherwise the keys are those of the kv heads.
    """
    geometry = neox_args.head_geometry(layer_number).shard(mpu.get_model_parallel_world_size())
    joint = neox_args.layer_attention(layer_number).qk_norm == "joint"
    return geometry.num_attention_heads if joint else geometry.num_kv_heads


class LayerKVCache:
    """Keys (after norm and rotation) and values of one layer on one rank."""

    def __init__(
        self,
        geometry: HeadGeometry,
        batch_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        key_heads: int,
    ):
        """geometry is this rank's share. Allocates k [t, b, m', d] and v [t, b, m, d] for t = max_tokens."""
        self.max_tokens = max_tokens
        self.length = 0
        self._k = torch.empty(max_tokens, batch_size, key_heads, geometry.head_dim, dtype=dtype, device=device)
        self._v = self._k.new_empty(max_tokens, batch_size, geometry.num_kv_heads, geometry.head_dim)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Store k [s, b, m', d] and v [s, b, m, d] behind what is there; return all keys and values so far.

        Raises ValueError when they do not fit, or have another batch size or number of heads than the cache.
        """
        end = self.length + k.shape[0]
        if end > self.max_tokens:
            raise ValueError(f"the KV cache holds max_tokens={self.max_tokens} tokens and was given {end}")
        if k.shape[1:] != self._k.shape[1:] or v.shape[1:] != self._v.shape[1:]:
            raise ValueError(
                f"the KV cache was made for k {tuple(self._k.shape[1:])} and v {tuple(self._v.shape[1:])} "
                f"[batch, heads, head_dim] and was given {tuple(k.shape[1:])} and {tuple(v.shape[1:])}"
            )
        self._k[self.length : end] = k
        self._v[self.length : end] = v
        self.length = end
        return self._k[:end], self._v[:end]

    def reset(self) -> None:
        """Forget the tokens, keep the memory."""
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return self._k.nbytes + self._v.nbytes


class KVCache:
    """One LayerKVCache for each transformer layer of this rank's pipeline stage, by layer number (0-based)."""

    def __init__(self, neox_args, layer_numbers: Iterable[int], batch_size: int, max_tokens: int):
        """Allocates for this rank, in params_dtype on the current device."""
        world_size = mpu.get_model_parallel_world_size()
        self._layers = {
            number: LayerKVCache(
                neox_args.head_geometry(number).shard(world_size),
                batch_size,
                max_tokens,
                neox_args.params_dtype,
                mpu.current_device(),
                key_heads_per_partition(neox_args, number),
            )
            for number in layer_numbers
        }

    def __getitem__(self, layer_number: int) -> LayerKVCache:
        return self._layers[layer_number]

    @property
    def length(self) -> int:
        """Tokens stored, the same in every layer between two steps; 0 without layers."""
        return next((layer.length for layer in self._layers.values()), 0)

    @property
    def nbytes(self) -> int:
        """Allocated bytes over all layers."""
        return sum(layer.nbytes for layer in self._layers.values())

    def reset(self) -> None:
        """Forget the tokens of every layer, keep the memory."""
        for layer in self._layers.values():
            layer.reset()
