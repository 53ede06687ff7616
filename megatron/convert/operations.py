"""What is done to weights between Hugging Face's tensors and ours. Each operation has its exact inverse.

`merge` makes one of our whole (undivided) parameters from one or more tensors of theirs; `split` undoes it, bit for
bit. Only rows are moved, so an operation serves weights and biases alike, in any dtype, and on the meta device.
"""

from functools import lru_cache
from typing import List, Sequence

import torch

from megatron.convert.widths import LayerWidths
from megatron.geometry import HeadGeometry
from megatron.model.attention.qkv import pack_qkv


class Operation:
    """The base, and the operation that changes nothing."""

    def merge(self, tensors: Sequence[torch.Tensor], widths: LayerWidths) -> torch.Tensor:
        """Their tensors, in the rule's order -> our whole parameter."""
        (tensor,) = tensors
        return tensor

    def split(self, whole: torch.Tensor, widths: LayerWidths) -> List[torch.Tensor]:
        """Inverse of `merge`."""
        return [whole]

    def rows_added(self, widths: LayerWidths) -> int:
        """By `merge`, which may be given memory for them, right behind the last tensor's, as one tensor more."""
        return 0


class FuseQKV(Operation):
    """q [n·d, ...], k and v [m·d, ...] <-> query_key_value [(n + 2m)·d, ...] in the layout of the geometry.

    Without v where keys are values too.
    """

    def merge(self, tensors: Sequence[torch.Tensor], widths: LayerWidths) -> torch.Tensor:
        stacked = stack_rows(tensors)
        order = _rows_of_fused(widths.geometry)
        return stacked if _is_sorted(order) else stacked.index_select(0, order.to(stacked.device))

    def split(self, whole: torch.Tensor, widths: LayerWidths) -> List[torch.Tensor]:
        geometry = widths.geometry
        order = _rows_of_fused(geometry)
        stacked = whole if _is_sorted(order) else whole.index_select(0, order.argsort().to(whole.device))
        return list(stacked.split(geometry.qkv_parts))


class Stack(Operation):
    """Tensors of equal height stacked by rows, e.g. (up, gate) <-> linear1 [up; gate]."""

    def merge(self, tensors: Sequence[torch.Tensor], widths: LayerWidths) -> torch.Tensor:
        return stack_rows(tensors)

    def split(self, whole: torch.Tensor, widths: LayerWidths) -> List[torch.Tensor]:
        return list(whole.chunk(2))


class PadVocabulary(Operation):
    """[vocabulary, h] <-> [padded vocabulary, h].

    The rows added repeat the last one, and are cut off again: no padding token can then have a higher logit than
    every token has, as rows of zeros could.
    """

    def merge(self, tensors: Sequence[torch.Tensor], widths: LayerWidths) -> torch.Tensor:
        table, *room = tensors
        missing = widths.padded_vocabulary - table.shape[0]
        if missing <= 0:
            return table
        repeated = table[-1:].expand(missing, *table.shape[1:])
        return stack_rows([table, room[0].copy_(repeated) if room else repeated])

    def split(self, whole: torch.Tensor, widths: LayerWidths) -> List[torch.Tensor]:
        return [whole[: widths.vocabulary]]

    def rows_added(self, widths: LayerWidths) -> int:
        return max(0, widths.padded_vocabulary - widths.vocabulary)


COPY, QKV, STACK, VOCABULARY = Operation(), FuseQKV(), Stack(), PadVocabulary()


def stack_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """torch.cat, without a copy where the tensors lie one after the other in memory already.

    On the meta device torch.cat is written in Python, and its first call takes a second.
    """
    first = tensors[0]
    if first.is_meta:
        return first.new_empty((sum(tensor.shape[0] for tensor in tensors), *first.shape[1:]))
    end = first.storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        fits = tensor.dtype == first.dtype and tensor.shape[1:] == first.shape[1:] and tensor.is_contiguous()
        if not (same and fits and tensor.storage_offset() == end):
            return torch.cat(list(tensors))
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


@lru_cache(maxsize=8)
def _rows_of_fused(geometry: HeadGeometry) -> torch.Tensor:
    """Where in [q; k; v] each row of the fused parameter comes from, as the model itself packs heads."""
    rows = torch.arange(geometry.qkv_hidden_size).split(geometry.qkv_parts)
    q, *kv = (part.unflatten(0, (-1, geometry.head_dim)) for part in rows)
    return pack_qkv(q, kv[0], kv[-1], geometry.qkv_layout)


def _is_sorted(order: torch.Tensor) -> bool:
    return bool((order[1:] > order[:-1]).all())
