"""The KV cache of `te_mha`: Transformer Engine's InferenceParams, one for each layer, behind what our caches offer."""

from collections import OrderedDict
from typing import Any, Dict

import torch

from megatron import mpu
from megatron.errors import BackendError
from megatron.geometry import HeadGeometry
from megatron.model.transformer_engine import api


def te_layer_cache(neox_args, layer_number: int, batch_size: int, max_tokens: int) -> "TELayerCache":
    """The cache of layer `layer_number` (0-based) on this rank, in params_dtype on the current device."""
    partition = neox_args.head_geometry(layer_number).shard(mpu.get_model_parallel_world_size())
    return TELayerCache(
        partition, layer_number + 1, batch_size, max_tokens, neox_args.params_dtype, mpu.current_device()
    )


class TELayerCache:
    """Keys (after rotation) and values of one layer, written and read by TE itself.

    A sliding window is honoured by the mask; the memory is that of all max_tokens tokens.
    """

    def __init__(
        self,
        geometry: HeadGeometry,
        te_layer_number: int,
        batch_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """geometry is this rank's share; te_layer_number counts from 1. All memory is allocated here."""
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        self.length = 0
        if api.STEPPED_INFERENCE:
            self._params = _stepped_params(geometry, batch_size, max_tokens, dtype)
            self._params.allocate_memory(te_layer_number)
            self._memory = self._params.cache_manager.cache[te_layer_number]
        else:
            self._params = api.InferenceParams(max_batch_size=batch_size, max_sequence_length=max_tokens)
            shape = (max_tokens, batch_size, geometry.num_kv_heads, geometry.head_dim)
            self._memory = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            self._params.key_value_memory_dict[te_layer_number] = self._memory

    def begin(self, tokens: int, batch_size: int) -> Dict[str, Any]:
        """What MultiheadAttention.forward is to be called with for the next `tokens` tokens; `end` follows it.

        Raises ValueError when they do not fit.
        """
        if self.length + tokens > self.max_tokens:
            raise ValueError(
                f"the KV cache holds max_tokens={self.max_tokens} tokens and was given {self.length + tokens}"
            )
        if batch_size != self.batch_size:
            raise ValueError(f"the KV cache was made for a batch of {self.batch_size} and was given {batch_size}")
        if not api.STEPPED_INFERENCE:
            self._params.sequence_len_offset = self.length
            return {"inference_params": self._params}
        self._params.pre_step(OrderedDict((row, tokens) for row in range(batch_size)))
        return {
            "inference_params": self._params,
            "attn_mask_type": "padding_causal",  # the only kind that this cache works with; no row is padded
            "cu_seqlens_q": self._params.cu_seqlens_q,
            "cu_seqlens_kv": self._params.cu_seqlens_kv,
            "max_seqlen_q": tokens,
            "max_seqlen_kv": self.max_tokens,
        }

    def end(self, tokens: int) -> None:
        """The step that `begin` announced is done."""
        self.length += tokens

    @property
    def largest_step(self) -> int:
        """How many tokens TE can take at once now: behind cached ones, a stepped cache counts one for each row."""
        return 1 if api.STEPPED_INFERENCE and self.length else self.max_tokens

    def reset(self) -> None:
        """Forget the tokens, keep the memory."""
        self.length = 0
        if api.STEPPED_INFERENCE:
            self._params.reset()

    def append(self, k, v):
        """Not for our own attention."""
        raise BackendError("te_mha=True: Transformer Engine fills this KV cache itself")

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(tensor.nbytes for tensor in self._memory)


def _stepped_params(geometry: HeadGeometry, batch_size: int, max_tokens: int, dtype: torch.dtype):
    return api.InferenceParams(
        max_batch_size=batch_size,
        max_sequence_length=max_tokens,
        num_heads_kv=geometry.num_kv_heads,
        head_dim_k=geometry.head_dim,
        dtype=dtype,
        qkv_format="sbhd",
    )
