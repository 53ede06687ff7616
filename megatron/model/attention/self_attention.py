"""Tensor-parallel self-attention with a head_dim of its own.

One path: project -> split -> norms -> position -> cache -> core -> dense; what is between the projections is in
heads.py.
Letters: s query tokens, b batch, h hidden, n query heads, m kv heads (of this rank), d head_dim.
"""

from typing import List, Optional, Sequence, Tuple

import torch
from torch import nn

from megatron import mpu
from megatron.geometry import HeadGeometry, QKVLayout
from megatron.mixed_geometry import AnyHeadGeometry
from megatron.model.attention.cache import LayerKVCache, key_heads_per_partition
from megatron.model.attention.heads import HeadGroup
from megatron.model.init_functions import get_init_methods
from megatron.model.linear import column_parallel, row_parallel
from megatron.model.positional_embeddings import ParallelRelativePositionBias


class ParallelSelfAttention(HeadGroup):
    """Causal self-attention; heads are split over the model-parallel ranks.

    Most layers have one group of heads, which is the attention itself: `head_groups`. Heads of several widths are in
    `groups`, each of which takes its own rows of the projection and has its own norms, positions, scale and cache; what
    all give, side by side, goes through one output projection. Such a layer has no head_dim, kernel or norms itself.

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
        self.key_heads_per_partition = key_heads_per_partition(neox_args, layer_number)
        several = self.geometry.groups if len(self.geometry.groups) > 1 else ()
        self.groups = nn.ModuleList(HeadGroup() for _ in several) if several else None
        for number, group in enumerate(self.head_groups):
            group._set_up_heads(neox_args, layer_number, number)
        # In GPT-NeoX's order: an optimizer state in a checkpoint knows its parameters by their order only.
        default_init, default_output_init = get_init_methods(neox_args)
        for group in self.head_groups:
            group._build_norms(neox_args)
        self._build_query_key_value(neox_args, init_method or default_init)
        self.rpe = rpe
        for group in self.head_groups:
            group._build_positions(neox_args, rpe)
        self._build_dense(neox_args, output_layer_init_method or default_output_init, parallel_output)

    @property
    def head_groups(self) -> Sequence[HeadGroup]:
        """The groups of heads of one width."""
        return (self,) if self.groups is None else self.groups

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
            column_groups=dense_column_groups(self.geometry),
            sequence_parallel=neox_args.sequence_parallel,
        )

    def forward(
        self, hidden_states: torch.Tensor, kv_cache: Optional[LayerKVCache] = None
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """hidden_states [s, b, h] -> (output [s, b, h] without bias, bias [h] or None).

        With a cache, the tokens continue the cached ones and are added to it. Under sequence_parallel, s of input
        and (unless parallel_output) output is this rank's part of the sequence.
        """
        rows, _ = self.query_key_value(hidden_states)  # [s, b, (n + 2m)·d of all ranks / p]
        if self.groups is None:
            return self.dense(self._context(rows, kv_cache))  # [s, b, n·d] -> [s, b, h]
        caches = [None] * len(self.groups) if kv_cache is None else kv_cache.groups
        parts = zip(self.groups, rows.split(self.rows_of_groups(), dim=-1), caches, strict=True)
        return self.dense(torch.cat([group._context(rows, cache) for group, rows, cache in parts], dim=-1))

    def rows_of_groups(self) -> List[int]:
        """How many rows of the QKV projection each group has on this rank."""
        rank, ranks = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
        return [sum(mpu.share_sizes(_row_groups(group), rank, ranks)) for group in self.geometry.groups]


def qkv_row_groups(geometry: AnyHeadGeometry) -> Optional[List[int]]:
    """Row blocks of the whole QKV weight that are split over ranks one by one, or None for a plain row split.

    With fewer key/value heads than ranks, the ranks that share a head have a piece of its rows each: `own_heads`.
    """
    blocks = [rows for group in geometry.groups for rows in _row_groups(group)]
    return blocks if len(blocks) > 1 else None


def _row_groups(group: HeadGeometry) -> List[int]:
    return group.qkv_parts if group.qkv_layout is QKVLayout.PER_RANK else [group.qkv_hidden_size]


def dense_column_groups(geometry: AnyHeadGeometry) -> Optional[List[int]]:
    """Column blocks of the whole output projection that are split one by one, or None for a plain split: a rank has
    whole heads of each group."""
    blocks = [group.query_hidden_size for group in geometry.groups]
    return blocks if len(blocks) > 1 else None
