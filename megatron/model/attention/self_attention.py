"""Tensor-parallel self-attention with a head_dim of its own.

One path: project -> split -> qk norm -> position -> cache -> core -> dense.
Letters: s query tokens, t key tokens, b batch, h hidden, n query heads, m kv heads (of this rank), d head_dim.
"""

import math
from typing import Optional, Tuple

import torch
from torch import nn

from megatron import mpu
from megatron.geometry import HeadGeometry, QKVLayout
from megatron.model.attention.cache import LayerKVCache, key_heads_per_partition
from megatron.model.attention.core import AttentionRequest, select_kernel
from megatron.model.attention.kv_replicas import own_heads
from megatron.model.attention.qk_norm import build_qk_norms
from megatron.model.init_functions import get_init_methods
from megatron.model.linear import column_parallel, row_parallel
from megatron.model.positional_embeddings import AliBi, ParallelRelativePositionBias
from megatron.model.rotary import RotaryEmbedding


class ParallelSelfAttention(nn.Module):
    """Causal self-attention; heads are split over the model-parallel ranks.

    layer_number is 0-based. rpe is the relative position bias that all layers share. parallel_output True leaves the
    output projection unreduced, for a residual form that reduces once.

    Raises ConfigError if the heads cannot be split, BackendError if the kernel asked for cannot run this layer.
    """

    def __init__(
        self,
        neox_args,
        layer_number: int = 0,
        init_method=None,
        output_layer_init_method=None,
        rpe: Optional[ParallelRelativePositionBias] = None,
        parallel_output: bool = False,
    ):
        super().__init__()
        self.layer_number = layer_number
        self.geometry = neox_args.head_geometry(layer_number)
        self.partition = self.geometry.shard(mpu.get_model_parallel_world_size())
        self.function = neox_args.layer_attention(layer_number)
        self.dropout_p = neox_args.attention_dropout
        self.key_heads_per_partition = key_heads_per_partition(neox_args, layer_number)
        self._set_score_arithmetic(neox_args)
        self.attention_type = neox_args.attention_config[layer_number]
        request = AttentionRequest.of_layer(neox_args, layer_number, self.partition, mpu.current_device())
        self.kernel = select_kernel(self.attention_type, request)
        # In GPT-NeoX's order: an optimizer state in a checkpoint knows its parameters by their order only.
        default_init, default_output_init = get_init_methods(neox_args)
        self._build_qk_norm(neox_args)
        self._build_query_key_value(neox_args, init_method or default_init)
        self._build_positions(neox_args, rpe)
        self._build_dense(neox_args, output_layer_init_method or default_output_init, parallel_output)

    # GPT-NeoX's names for the widths.
    @property
    def hidden_size_per_attention_head(self) -> int:
        """d"""
        return self.geometry.head_dim

    @property
    def query_hidden_size(self) -> int:
        """Width of all query heads, over all ranks."""
        return self.geometry.query_hidden_size

    @property
    def kv_hidden_size(self) -> int:
        """Width of all key heads (and of all value heads), over all ranks."""
        return self.geometry.kv_hidden_size

    @property
    def query_hidden_size_per_partition(self) -> int:
        """n·d, the width of this rank's context."""
        return self.partition.query_hidden_size

    @property
    def kv_hidden_size_per_partition(self) -> int:
        """m·d"""
        return self.partition.kv_hidden_size

    @property
    def num_attention_heads_per_partition(self) -> int:
        """n"""
        return self.partition.num_attention_heads

    @property
    def num_kv_heads_per_partition(self) -> int:
        """m"""
        return self.partition.num_kv_heads

    @property
    def gqa(self) -> bool:
        """Fewer kv heads than query heads."""
        return self.geometry.is_gqa

    @property
    def rotary_ndims(self) -> int:
        """How many dimensions of a head are rotated; 0 without rotary positions."""
        return 0 if self.function.rotary is None else self.geometry.rotary_ndims

    def _set_score_arithmetic(self, neox_args) -> None:
        self.score_divisor = 1.0
        self.attention_softmax_in_fp32 = neox_args.attention_softmax_in_fp32
        if neox_args.apply_query_key_layer_scaling:
            self.score_divisor = float(max(1, self.layer_number))
            self.attention_softmax_in_fp32 = True

    def _build_query_key_value(self, neox_args, init_method) -> None:
        self.query_key_value = column_parallel(neox_args)(
            neox_args,
            self.geometry.hidden_size,
            self.geometry.qkv_hidden_size,
            bias=neox_args.qkv_has_bias,
            init_method=init_method,
            row_groups=qkv_row_groups(self.geometry),
            sequence_parallel=neox_args.sequence_parallel,
        )

    def _build_dense(self, neox_args, init_method, parallel_output) -> None:
        self.dense = row_parallel(neox_args)(
            neox_args,
            self.geometry.query_hidden_size,
            self.geometry.hidden_size,
            bias=neox_args.use_bias_in_attn_linear,
            init_method=init_method,
            skip_bias_add=True,
            parallel_output=parallel_output,
            sequence_parallel=neox_args.sequence_parallel,
        )

    def _build_qk_norm(self, neox_args) -> None:
        if self.function.qk_norm is None:
            return
        for name, norm in build_qk_norms(neox_args, self.function.qk_norm, self.geometry).items():
            self.add_module(name, norm)

    def _build_positions(self, neox_args, rpe) -> None:
        self.pos_emb = neox_args.pos_emb
        self.rpe = rpe
        if self.pos_emb == "rpe" and rpe is None:
            raise ValueError("pos_emb=rpe: pass the ParallelRelativePositionBias that all layers share")
        if self.pos_emb == "alibi":
            self.alibi_embed = AliBi(self.geometry.num_attention_heads)
        self.rotary_emb = None
        if self.function.rotary is not None:
            buffer_dtype = neox_args.params_dtype if neox_args.rotary_save_freqs_buffer else None
            self.rotary_emb = RotaryEmbedding(self.function.rotary, buffer_dtype)

    def forward(
        self, hidden_states: torch.Tensor, kv_cache: Optional[LayerKVCache] = None
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """hidden_states [s, b, h] -> (output [s, b, h] without bias, bias [h] or None).

        With a cache, the tokens continue the cached ones and are added to it. Under sequence_parallel, s of input
        and (unless parallel_output) output is this rank's part of the sequence.
        """
        mixed, _ = self.query_key_value(hidden_states)  # [s, b, (n + 2m)·d of all ranks / p]
        q, k, v = own_heads(mixed, self.geometry)
        q, k = self._normalise(q, k)
        offset = 0 if kv_cache is None else kv_cache.length
        q, k = self._rotate(q, k, offset)
        oldest_key = 0
        if kv_cache is not None:
            k, v = kv_cache.append(k, v)  # [t, b, m, d]: the tokens that these queries can see
            oldest_key = kv_cache.oldest
        context = self._attend(q, k, v, oldest_key)
        return self.dense(context.flatten(2))  # [s, b, n·d] -> [s, b, h]

    def _normalise(self, q: torch.Tensor, k: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        if self.function.qk_norm is None:
            return q, k
        if self.function.qk_norm != "joint":
            return self.q_layernorm(q), self.k_layernorm(k)
        # One norm over [n, d] for both, so grouped keys are first repeated to n heads.
        k = k.repeat_interleave(self.partition.queries_per_kv, dim=2)  # [s, b, m, d] -> [s, b, n, d]
        return self.qk_layernorm(q), self.qk_layernorm(k)

    def _rotate(self, q: torch.Tensor, k: torch.Tensor, offset: int) -> Tuple[torch.Tensor, torch.Tensor]:
        if self.rotary_emb is None:
            return q, k
        return self.rotary_emb(q, offset), self.rotary_emb(k, offset)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, oldest_key: int) -> torch.Tensor:
        offset = k.shape[0] - q.shape[0]  # in keys; the position in the text may be further on
        return self.kernel.attend(
            q,
            k,
            v,
            scale=self.function.softmax_scale,
            causal_offset=offset,
            window=self.function.window,
            softcap=self.function.logit_softcap,
            bias=self._score_bias(q.shape[0], k.shape[0], offset, oldest_key, q.device),
            dropout_p=self.dropout_p,
            training=self.training,
            softmax_in_fp32=self.attention_softmax_in_fp32,
            score_divisor=self.score_divisor,
        )

    def _score_bias(self, query_tokens, key_tokens, offset, oldest_key, device) -> Optional[torch.Tensor]:
        """[n, s, t]; the first of the keys by position is at index oldest_key, see LayerKVCache.append."""
        if self.pos_emb == "alibi":
            bias = self.alibi_embed(query_tokens, key_tokens, offset, device)
        elif self.rpe is not None:
            bias = self.rpe(query_tokens, key_tokens, offset, device)
        else:
            return None
        return bias.roll(oldest_key, dims=-1) if oldest_key else bias


def qkv_row_groups(geometry: HeadGeometry):
    """Row blocks of the whole QKV weight that are split over ranks one by one, or None for a plain row split.

    With fewer key/value heads than ranks, the ranks that share a head have a piece of its rows each: `own_heads`.
    """
    if geometry.qkv_layout is QKVLayout.PER_RANK:
        return [geometry.query_hidden_size, geometry.kv_hidden_size, geometry.kv_hidden_size]
    return None


def relative_position_scale(geometry: HeadGeometry) -> float:
    """sqrt(d): GPT-NeoX's factor on the relative position bias, which is added to scores already scaled."""
    return math.sqrt(geometry.head_dim)
