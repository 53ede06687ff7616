"""What is done to weights between Hugging Face's tensors and ours. Each operation has its exact inverse.

`merge` makes one of our whole (undivided) parameters from one or more tensors of theirs; `split` undoes it, bit for
bit. Only rows are moved, so an operation serves weights and biases alike, in any dtype.
"""

from typing import List, Sequence

import torch

from megatron.convert.widths import LayerWidths
from megatron.model.attention.qkv import pack_qkv, split_qkv


class Operation:
    """The base, and the operation that changes nothing."""

    def merge(self, tensors: Sequence[torch.Tensor], widths: LayerWidths) -> torch.Tensor:
        """Their tensors, in the rule's order -> our whole parameter."""
        (tensor,) = tensors
        return tensor

    def split(self, whole: torch.Tensor, widths: LayerWidths) -> List[torch.Tensor]:
        """Inverse of `merge`."""
        return [whole]


class FuseQKV(Operation):
    """q [n·d, ...], k and v [m·d, ...] <-> query_key_value [(n + 2m)·d, ...] in the layout of the geometry."""

    def merge(self, tensors: Sequence[torch.Tensor], widths: LayerWidths) -> torch.Tensor:
        geometry = widths.geometry
        q, k, v = (_heads_last(tensor, geometry.head_dim) for tensor in tensors)
        return _rows_first(pack_qkv(q, k, v, geometry.qkv_layout))

    def split(self, whole: torch.Tensor, widths: LayerWidths) -> List[torch.Tensor]:
        geometry = widths.geometry
        heads = split_qkv(whole.movedim(0, -1), geometry, geometry.qkv_layout)
        return [_rows_first(x.flatten(-2)) for x in heads]


class Stack(Operation):
    """Tensors of equal height stacked by rows, e.g. (up, gate) <-> linear1 [up; gate]."""

    def merge(self, tensors: Sequence[torch.Tensor], widths: LayerWidths) -> torch.Tensor:
        return torch.cat(list(tensors))

    def split(self, whole: torch.Tensor, widths: LayerWidths) -> List[torch.Tensor]:
        return list(whole.chunk(2))


class PadVocabulary(Operation):
    """[vocabulary, h] <-> [padded vocabulary, h]; the rows added are zeros, and are cut off again."""

    def merge(self, tensors: Sequence[torch.Tensor], widths: LayerWidths) -> torch.Tensor:
        (table,) = tensors
        missing = widths.padded_vocabulary - table.shape[0]
        return table if missing == 0 else torch.cat([table, table.new_zeros(missing, *table.shape[1:])])

    def split(self, whole: torch.Tensor, widths: LayerWidths) -> List[torch.Tensor]:
        return [whole[: widths.vocabulary]]


COPY, QKV, STACK, VOCABULARY = Operation(), FuseQKV(), Stack(), PadVocabulary()


def _heads_last(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[heads·d, ...] -> [..., heads, d]"""
    return tensor.movedim(0, -1).unflatten(-1, (-1, head_dim))


def _rows_first(tensor: torch.Tensor) -> torch.Tensor:
    """[..., rows] -> [rows, ...], in memory order"""
    return tensor.movedim(-1, 0).contiguous()
