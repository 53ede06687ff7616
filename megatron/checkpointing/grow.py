"""A checkpoint read as if its heads were wider, with the same function: new rows and columns that change nothing.

Letters: n query heads, m key/value heads, d the old head_dim, D the new one.

The new dimensions stand at the end of each head, behind those that are rotated, so the rotary pairs stay. Keys and the
columns of the output projection are zero there, whatever queries and values are, so scores and outputs stay. A norm on
queries and keys has its mean over more numbers then: RMSNorm's mean square becomes d / D of what it was, whatever the
new zeros. Weights of q and k times sqrt(D / d) undo that exactly, epsilon included, and the norm's scale is divided by
it. A layer norm subtracts a mean too, which no weight can undo. Rotary frequencies, windows and caps do not change.

Layers may grow to different widths, or some stay, as far as one softmax_scale and one rotary_pct say for all of them
what each had before.
"""

import copy
import math
import re
from typing import Any, Dict, List, NamedTuple, Optional

import torch
import torch.nn.functional as F

from megatron.checkpointing.reader import CheckpointReader, LayerState
from megatron.checkpointing.resharded import FromCheckpoint, ReshardedReader
from megatron.checkpointing.shards import Shards
from megatron.errors import ConversionError
from megatron.geometry import HeadGeometry, QKVLayout
from megatron.model.attention.heads import relative_position_scale
from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER
from megatron.neox_arguments.equal_widths import layers_by_value
from megatron.neox_arguments.per_layer import layers_text
from megatron.neox_arguments.widths import layers_by_geometry, mixed_layers

_CHANGED = re.compile(
    r"attention\.(query_key_value\.(weight|bias)|dense\.weight|(q|k|qk)_layernorm\.scale|rpe\.weight)"
)


def check_growth(neox_args, head_dim: Any) -> None:
    """Raises ConversionError with every reason why the model's heads cannot become `head_dim` wide, which is what the
    setting may be: a number, or widths by layer. Raises ConfigError if it is none of them."""
    qk_norm = neox_args.layer_attention().qk_norm
    _refuse_groups(neox_args, head_dim)
    problems = _width_problems(_growths(neox_args, head_dim), head_dim)
    problems += _scale_problems(neox_args) + _rotary_problems(neox_args, head_dim) + _rpe_problems(neox_args, head_dim)
    if neox_args.v_norm:
        problems.append("v_norm=True: it divides by the root mean square of a head, which more dimensions change")
    if neox_args.shared_key_value:
        problems.append(
            f"shared_key_value={neox_args.shared_key_value}: new rows of keys have to be zero, and those of values "
            "random to be trained; here they are the same rows"
        )
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


def _refuse_groups(neox_args, head_dim: Any) -> None:
    """Raises ConversionError for heads of several widths in a layer, before or after."""
    for what, args in (("the checkpoint's head_dim", neox_args), ("--head-dim", _asking_for(neox_args, head_dim))):
        layers = mixed_layers(args)
        if layers:
            raise ConversionError(
                f"{what}={args.head_dim} gives {layers_text(layers)} heads of several widths; only layers whose heads "
                "are alike can grow"
            )


def _asking_for(neox_args, head_dim: Any) -> Any:
    """The arguments with another head_dim, and without a share of it that is rotated, which will be another one too."""
    asked = copy.copy(neox_args)
    asked.head_dim, asked.pos_emb = head_dim, "none"
    return asked


class Growth(NamedTuple):
    """Layers of one geometry that become equally wide. old: their geometry; width: the new head_dim."""

    old: HeadGeometry
    width: int
    layers: List[int]


def _growths(neox_args, head_dim: Any) -> List[Growth]:
    """Of all layers, those alike together. Raises ConfigError for a head_dim that does not describe them."""
    asked = layers_by_geometry(_asking_for(neox_args, head_dim))
    wide = {number: geometry.head_dim for geometry, layers in asked.items() for number in layers}
    pairs = layers_by_value([(neox_args.head_geometry(number), wide[number]) for number in range(len(wide))])
    return [Growth(old, width, layers) for (old, width), layers in pairs.items()]


def _width_problems(growths: List[Growth], head_dim: Any) -> List[str]:
    if len(growths) == 1 and growths[0].width <= growths[0].old.head_dim:
        old = growths[0].old.head_dim
        return [f"--head-dim {head_dim}: the checkpoint's is {old}; it can only become wider"]
    problems = [
        f"--head-dim {head_dim}: {layers_text(each.layers)} would get {each.width}, and the checkpoint's are "
        f"{each.old.head_dim} wide; they can only become wider"
        for each in growths
        if each.width < each.old.head_dim
    ]
    if all(each.width == each.old.head_dim for each in growths):
        problems.append(f"--head-dim {head_dim}: these are the checkpoint's widths; nothing would grow")
    return problems


def _scale_problems(neox_args) -> List[str]:
    scales = layers_by_value([neox_args.attention_scale(number) for number in range(neox_args.num_layers)])
    if len(scales) == 1:
        return []
    listed = ", ".join(f"{scale:.6g} in {layers_text(layers)}" for scale, layers in scales.items())
    return [
        f"softmax_scale={neox_args.softmax_scale}: the scores' scale is {listed}; wider heads have to keep it, and one "
        "softmax_scale can only say the same for all layers. Such a model cannot grow"
    ]


def _rotary_problems(neox_args, head_dim: Any) -> List[str]:
    growths = _growths(neox_args, head_dim)
    if neox_args.pos_emb != "rotary" or _rotary_share(growths) is not None:
        return []
    listed = ", ".join(f"{each.old.rotary_ndims} of {each.width} in {layers_text(each.layers)}" for each in growths)
    return [
        f"--head-dim {head_dim}: the rotated dimensions have to stay as many ({listed}), and there is no one "
        "rotary_pct that says so; widths in the same proportion to each other as the checkpoint's have one"
    ]


def _rpe_problems(neox_args, head_dim: Any) -> List[str]:
    ratios = {each.width / each.old.head_dim for each in _growths(neox_args, head_dim)}
    if neox_args.pos_emb != "rpe" or len(ratios) == 1:
        return []
    return [f"--head-dim {head_dim}: pos_emb=rpe has one table for all layers, so all have to grow alike"]


def grown_settings(neox_args, head_dim: Any) -> Dict[str, Any]:
    """The settings that change with the width: all others stay. Only called for what check_growth lets pass."""
    settings = {"head_dim": head_dim, "softmax_scale": neox_args.attention_scale(0)}
    if neox_args.pos_emb == "rotary":
        settings["rotary_pct"] = _rotary_share(_growths(neox_args, head_dim))
    return settings


def _rotary_share(growths: List[Growth]) -> Optional[float]:
    """The share of the new widths that rotates as many dimensions as before; None if there is no one share.

    The smallest that is enough in every layer: rounding may leave the quotient below it.
    """
    share = max(each.old.rotary_ndims / each.width for each in growths)
    while any(int(each.width * share) < each.old.rotary_ndims for each in growths):
        share = math.nextafter(share, 1.0)
    return share if all(int(each.width * share) == each.old.rotary_ndims for each in growths) else None


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
        return int(sum(self._layer_bytes(index, rank) for index in self.layer_indices() for rank in self._ranks))

    @property
    def _ranks(self) -> range:
        return range(self.model_parallel_size)

    def _layer_bytes(self, index: int, rank: int) -> float:
        shapes = self.reader.layer_shapes(index, rank)
        changed = sum(tensor.nbytes for name, tensor in shapes.items() if _CHANGED.fullmatch(name))
        total = sum(tensor.nbytes for tensor in shapes.values())
        if not changed:
            return total
        number = index - FIRST_TRANSFORMER_LAYER
        old, new = (args.head_geometry(number).head_dim for args in (self._neox_args, self._grown_args))
        return total + changed * (new / old - 1)

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
