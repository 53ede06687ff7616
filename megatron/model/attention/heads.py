"""Heads of one width, from projected rows to the context: split -> norms -> position -> cache -> core.

A layer has one group of such heads, or several of different widths: see ParallelSelfAttention.
Letters: s query tokens, t key tokens, b batch, n query heads, m kv heads (of this rank), d head_dim.
"""

import math
from typing import Optional, Tuple

import torch
from torch import nn

from megatron import mpu
from megatron.geometry import HeadGeometry
from megatron.model.attention.cache import LayerKVCache
from megatron.model.attention.core import AttentionRequest, select_kernel
from megatron.model.attention.kv_replicas import own_heads
from megatron.model.attention.qk_norm import build_qk_norms, build_v_norm
from megatron.model.positional_embeddings import AliBi, ParallelRelativePositionBias
from megatron.model.rotary import RotaryEmbedding


class HeadGroup(nn.Module):
    """What a group of heads computes between the two projections, with the modules that belong to it.

    Built in three steps by the attention, which has modules between them.
    """

    def _set_up_heads(self, neox_args, layer_number: int, number: int) -> None:
        """The numbers and the kernel of a layer's group `number`.

        Raises ConfigError if the heads cannot be split, BackendError if the kernel asked for cannot run them.
        """
        groups = neox_args.head_geometry(layer_number).groups
        first = sum(group.num_attention_heads for group in groups[:number])
        self.layer_number = layer_number
        self.geometry = groups[number]
        self.heads_of_layer = range(first, first + self.geometry.num_attention_heads)
        self.partition = self.geometry.shard(mpu.get_model_parallel_world_size())
        self.function = neox_args.layer_attention(layer_number, number)
        self.dropout_p = neox_args.attention_dropout
        self._set_score_arithmetic(neox_args)
        self.attention_type = neox_args.attention_config[layer_number]
        request = AttentionRequest.of_layer(neox_args, layer_number, self.partition, mpu.current_device())
        self.kernel = select_kernel(self.attention_type, request)

    def _set_score_arithmetic(self, neox_args) -> None:
        self.score_divisor = 1.0
        self.attention_softmax_in_fp32 = neox_args.attention_softmax_in_fp32
        if neox_args.apply_query_key_layer_scaling:
            self.score_divisor = float(max(1, self.layer_number))
            self.attention_softmax_in_fp32 = True

    def _build_norms(self, neox_args) -> None:
        if self.function.qk_norm is not None:
            for name, norm in build_qk_norms(neox_args, self.function.qk_norm, self.geometry).items():
                self.add_module(name, norm)
        self.v_norm = build_v_norm(neox_args, self.geometry) if self.function.v_norm else None

    def _build_positions(self, neox_args, rpe: Optional[ParallelRelativePositionBias]) -> None:
        """rpe is a module of the attention's, of which this is a group."""
        self.pos_emb = neox_args.pos_emb
        self._rpe = [rpe]  # in a list, which does not make it a module of this one
        if self.pos_emb == "rpe" and rpe is None:
            raise ValueError("pos_emb=rpe: pass the ParallelRelativePositionBias that all layers share")
        if self.pos_emb == "alibi":
            self.alibi_embed = AliBi(neox_args.num_attention_heads, self.heads_of_layer)
        self.rotary_emb = None
        if self.function.rotary is not None:
            buffer_dtype = neox_args.params_dtype if neox_args.rotary_save_freqs_buffer else None
            self.rotary_emb = RotaryEmbedding(self.function.rotary, buffer_dtype)

    @property
    def rotary_ndims(self) -> int:
        """How many dimensions of a head are rotated; 0 without rotary positions."""
        return 0 if self.function.rotary is None else self.geometry.rotary_ndims

    def _context(self, rows: torch.Tensor, kv_cache: Optional[LayerKVCache]) -> torch.Tensor:
        """The heads' projected rows [s, b, (n + 2m)·d of all ranks / p] -> what they attend to, [s, b, n·d]."""
        q, k, v = own_heads(rows, self.geometry)
        q, k = self._normalise(q, k)
        v = v if self.v_norm is None else self.v_norm(v)
        offset = 0 if kv_cache is None else kv_cache.length
        q, k = self._rotate(q, k, offset)
        oldest_key = 0
        if kv_cache is not None:
            k, v = kv_cache.append(k, v)  # [t, b, m, d]: the tokens that these queries can see
            oldest_key = kv_cache.oldest
        return self._attend(q, k, v, oldest_key).flatten(2)

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
        elif self.pos_emb == "rpe":
            bias = self._rpe[0](query_tokens, key_tokens, offset, device) * relative_position_scale(self.geometry)
            if len(bias) > self.partition.num_attention_heads:  # of all the layer's heads, which are all on this rank
                bias = bias[self.heads_of_layer.start : self.heads_of_layer.stop]
        else:
            return None
        return bias.roll(oldest_key, dims=-1) if oldest_key else bias


def relative_position_scale(geometry: HeadGeometry) -> float:
    """sqrt(d): GPT-NeoX's factor on the relative position bias, which is added to scores already scaled; T5 itself
    does not scale its scores."""
    return math.sqrt(geometry.head_dim)
