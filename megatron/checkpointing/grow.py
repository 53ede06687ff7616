"""A checkpoint read as if its heads were wider, with the same function: new rows and columns that change nothing.

Letters: n query heads, m key/value heads, d the old head_dim, D the new one.

The new dimensions stand at the end of each head, behind those that are rotated, so the rotary pairs stay. Keys and the
columns of the output projection are zero there, whatever queries and values are, so scores and outputs stay. A norm on
queries and keys has its mean over more numbers then: RMSNorm's mean square becomes d / D of what it was, whatever the
new zeros. Weights of q and k times sqrt(D / d) undo that exactly, epsilon included, and the norm's scale is divided by
it. A layer norm subtracts a mean too, which no weight can undo. Rotary frequencies, windows and caps do not change.
"""

import math
import re
from typing import Any, Dict, List

import torch
import torch.nn.functional as F

from megatron.checkpointing.reader import CheckpointReader, LayerState
from megatron.checkpointing.resharded import FromCheckpoint, ReshardedReader
from megatron.checkpointing.shards import Shards
from megatron.errors import ConversionError
from megatron.geometry import HeadGeometry, QKVLayout
from megatron.model.attention.heads import relative_position_scale
from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER

_CHANGED = re.compile(
    r"attention\.(query_key_value\.(weight|bias)|dense\.weight|(q|k|qk)_layernorm\.scale|rpe\.weight)"
)


def check_growth(neox_args, head_dim: int) -> None:
    """Raises ConversionError with every reason why the model's heads cannot become `head_dim` wide."""
    geometry, qk_norm = neox_args.head_geometry(), neox_args.layer_attention().qk_norm
    problems = []
    if head_dim <= geometry.head_dim:
        problems.append(f"--head-dim {head_dim}: the checkpoint's is {geometry.head_dim}; it can only become wider")
    if neox_args.te_mha:
        problems.append("te_mha=True: first convert it with tools/ckpts/convert_te.py --to native --mha")
    if qk_norm is not None and neox_args.norm.startswith("te_"):
        problems.append(f"norm={neox_args.norm}: first convert it with tools/ckpts/convert_te.py --to native --norms")
    elif qk_norm is not None and neox_args.norm not in ("rmsnorm", "scalenorm"):
        problems.append(
            f"norm={neox_args.norm} on queries and keys (qk_norm_type {qk_norm}): it subtracts the mean over a head, "
            "which more dimensions change; only rmsnorm and scalenorm can stay the same function"
        )
    if problems:
        raise ConversionError(problems)


def grown_settings(neox_args, head_dim: int) -> Dict[str, Any]:
    """The settings that change with the width: all others stay."""
    settings = {"head_dim": head_dim, "softmax_scale": neox_args.attention_scale()}
    if neox_args.pos_emb == "rotary":
        settings["rotary_pct"] = _rotary_share(neox_args.head_geometry().rotary_ndims, head_dim)
    return settings


def _rotary_share(ndims: int, head_dim: int) -> float:
    """The share of head_dim that rotates exactly `ndims`: rounding may leave the quotient below it."""
    share = ndims / head_dim
    while int(head_dim * share) < ndims:
        share = math.nextafter(share, 1.0)
    return share


class GrownReader(FromCheckpoint):
    """The weights of a CheckpointReader with heads as wide as those of `grown_args`, layer by layer, rank by rank.

    neox_args: the model as saved, at the checkpoint's number of ranks. learnable: new rows of q and v are random, as
    large as the trained ones; with zeros everywhere no gradient would ever reach a new dimension. Where q and k are
    normed, their new rows are zero in any case.
    """

    def __init__(self, reader: CheckpointReader, neox_args, grown_args, learnable: bool = True):
        self.reader = reader
        self.model_parallel_size = reader.model_parallel_size
        self.vocabulary_rows = neox_args.padded_vocab_size
        self._saved = ReshardedReader(reader, Shards(neox_args), reader.model_parallel_size, self.vocabulary_rows)
        self._shards = Shards(grown_args)
        self._neox_args, self._grown_args, self._learnable = neox_args, grown_args, learnable
        self._index, self._whole = None, {}

    @property
    def nbytes(self) -> int:
        """As FromCheckpoint.nbytes, with what becomes wider."""
        growth = self._grown_args.head_geometry().head_dim / self._neox_args.head_geometry().head_dim
        ranks = range(self.model_parallel_size)
        states = (self.reader.layer_shapes(index, rank) for index in self.layer_indices() for rank in ranks)
        tensors = (item for state in states for item in state.items())
        return int(sum(tensor.nbytes * (growth if _CHANGED.fullmatch(name) else 1) for name, tensor in tensors))

    def layer_state(self, index: int, tp_rank: int = 0) -> LayerState:
        """{name: tensor} of one layer on one rank. Raises CheckpointError for weights that do not fit the config."""
        if self._index != index:
            self._index, self._whole = index, {}
        saved = self.reader.layer_state(index, tp_rank)
        return {
            name: self._piece(index, name, tp_rank) if _CHANGED.fullmatch(name) else tensor
            for name, tensor in saved.items()
        }

    def _piece(self, index: int, name: str, tp_rank: int) -> torch.Tensor:
        if name not in self._whole:
            self._whole[name] = self._grown(index, name, self._saved.whole_tensor(index, name))
        return self._shards.piece(index, name, self._whole[name], tp_rank, self.model_parallel_size)

    def _grown(self, index: int, name: str, whole: torch.Tensor) -> torch.Tensor:
        number = index - FIRST_TRANSFORMER_LAYER
        old, new = (args.head_geometry(number) for args in (self._neox_args, self._grown_args))
        normed = self._neox_args.layer_attention(number).qk_norm is not None
        factor = math.sqrt(new.head_dim / old.head_dim) if normed and self._neox_args.norm == "rmsnorm" else 1.0
        if "query_key_value" in name:
            random = ("v" if normed else "qv") if self._learnable and name.endswith("weight") else ""
            generator = torch.Generator().manual_seed(self._neox_args.seed + index)
            return grown_qkv(whole, old, new.head_dim, factor, random, generator)
        if name.endswith("dense.weight"):
            return _wider_heads(whole, old.head_dim, new.head_dim, 0.0)
        if name.endswith("rpe.weight"):
            return _times(whole, relative_position_scale(old) / relative_position_scale(new))
        zero = 1.0 if self._neox_args.zero_centered_gamma else 0.0
        scale = _times(whole, 1 / factor, zero)
        return _wider_heads(scale, old.head_dim, new.head_dim, 1.0 - zero)


def grown_qkv(
    fused: torch.Tensor, old: HeadGeometry, head_dim: int, factor: float, random: str, generator: torch.Generator
) -> torch.Tensor:
    """[(n + 2m)·d, ...] -> [(n + 2m)·D, ...] over all ranks, in the same order of rows.

    factor: on the rows of q and k. random: those of "q", "k", "v" whose new rows are random.
    """
    blocks = fused.unflatten(0, (-1, old.head_dim))  # [n + 2m, d, ...]
    kinds = _kinds(old)
    if factor != 1.0:
        scaled = torch.tensor([kind != "v" for kind in kinds])
        blocks = torch.where(scaled.view(-1, *[1] * fused.dim()), _times(blocks, factor), blocks)
    new = torch.zeros(len(kinds), head_dim - old.head_dim, *fused.shape[1:], dtype=fused.dtype)
    for kind in random:
        chosen = [i for i, each in enumerate(kinds) if each == kind]
        size = blocks[chosen].float().square().mean().sqrt()
        new[chosen] = (size * torch.randn(new[chosen].shape, generator=generator)).to(fused.dtype)
    return torch.cat([blocks, new], dim=1).flatten(0, 1)


def _kinds(geometry: HeadGeometry) -> List[str]:
    """What each block of d rows of the fused weight belongs to."""
    if geometry.qkv_layout is QKVLayout.PER_HEAD:
        return ["q", "k", "v"] * geometry.num_attention_heads
    return ["q"] * geometry.num_attention_heads + ["k"] * geometry.num_kv_heads + ["v"] * geometry.num_kv_heads


def _wider_heads(tensor: torch.Tensor, old: int, new: int, fill: float) -> torch.Tensor:
    """[..., heads·d] -> [..., heads·D], each head continued with `fill`."""
    return F.pad(tensor.unflatten(-1, (-1, old)), (0, new - old), value=fill).flatten(-2)


def _times(tensor: torch.Tensor, factor: float, zero: float = 0.0) -> torch.Tensor:
    """The product, rounded once; zero: what is to be added before and taken off after it."""
    if factor == 1.0:
        return tensor
    return ((tensor.double() + zero) * factor - zero).to(tensor.dtype)
