"""Bytes that the forward pass of one micro batch keeps for the backward pass, on one rank.

Korthikanti et al. 2022 (arXiv:2205.05198), section 4, with this model's own widths and kernels in the place of theirs:
what is counted are the tensors that autograd saves here, each storage once. Letters: T tokens of the micro batch, t
those of this rank's residual stream (T / p under sequence_parallel), h hidden_size, n query and m key/value heads of
this rank, d head_dim, f this rank's MLP width, c bytes of a number.

A layer keeps, for a layernorm, biases and no dropout:

    input of each norm 2cth, its output 2cth; per attention kernel (see `attention`): q, k, v, scores and context;
    MLP: linear1's output, the activation's, and their product if it is gated: 2cTf, or 4cTf
"""

from dataclasses import dataclass
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch

from megatron.costs.parameters import share
from megatron.costs.states import precision_bytes
from megatron.geometry import HeadGeometry
from megatron.model.attention.cache import cached_key_heads
from megatron.model.attention.core import AUTO_ORDER, KERNELS, AttentionRequest, shifted
from megatron.model.attention.core.chunked import EXPLICIT_KEYS
from megatron.model.attention.core.cpu_flash import OWN_BACKWARD_WIDTH
from megatron.model.attention.core.flash import HEAD_DIM_MULTIPLE

_LAYER_NORMS = ("layernorm", "non_parametric_layernorm")


@dataclass(frozen=True)
class Batch:
    """One micro batch on one rank. device: "cuda" or "cpu", whose kernels keep different things."""

    texts: int
    length: int
    ranks: int
    number_bytes: int
    sequence_parallel: bool = False
    device: str = "cuda"

    @classmethod
    def of(cls, neox_args, device: str = "cuda") -> "Batch":
        """The micro batch of a config."""
        return cls(
            neox_args.train_micro_batch_size_per_gpu or 1,
            neox_args.seq_length,
            neox_args.model_parallel_size,
            precision_bytes(neox_args),
            neox_args.sequence_parallel,
            device,
        )

    @property
    def tokens(self) -> int:
        """T"""
        return self.texts * self.length

    @property
    def stream_tokens(self) -> int:
        """t"""
        return self.tokens // self.ranks if self.sequence_parallel else self.tokens

    @property
    def mask_bytes(self) -> int:
        """Of an element in dropout's mask: a bool, but on the CPU torch multiplies by numbers."""
        return self.number_bytes if self.device == "cpu" else 1


def layer_activations(neox_args, number: int, batch: Batch) -> Dict[str, int]:
    """Bytes that transformer layer `number` keeps: norms with their outputs, attention, mlp, dropout."""
    c, hidden, rows = batch.number_bytes, neox_args.hidden_size, batch.stream_tokens
    one = norm_bytes(neox_args, rows, hidden, batch)
    norms = {"pre": 2, "post": 2, "sandwich": 4}[neox_args.norm_placement] * one
    if neox_args.gpt_j_residual:  # both norms have the same input; the tied form has one norm
        norms = one if neox_args.gpt_j_tied else 2 * one - (c * rows * hidden if _keeps_input(neox_args, c) else 0)
    inputs = 1 if neox_args.gpt_j_residual and neox_args.gpt_j_tied else 2
    dropped = batch.tokens if neox_args.gpt_j_residual else rows
    return {
        "norms": norms + inputs * c * rows * hidden,
        "attention": sum(attention_bytes(neox_args, number, batch).values()),
        "mlp": mlp_bytes(neox_args, number, batch),
        "dropout": 2 * batch.mask_bytes * dropped * hidden if neox_args.hidden_dropout > 0 else 0,
    }


def _keeps_input(neox_args, c: int) -> bool:
    """Whether a norm saves its input itself, not a copy in fp32."""
    if c == 4:
        return True
    return neox_args.norm in _LAYER_NORMS and not neox_args.zero_centered_gamma


def norm_bytes(neox_args, rows: int, width: int, batch: Batch, weights: Optional[int] = None) -> int:
    """What a norm of `rows` rows saves, its input included, its output not. weights: numbers in its scale."""
    c, weights = batch.number_bytes, width if weights is None else weights
    zero_centered = neox_args.zero_centered_gamma
    if neox_args.norm in _LAYER_NORMS:
        kept = c if _keeps_input(neox_args, c) else 4
        statistics = 2 * (kept if batch.device == "cpu" else 4)
        made = 4 * weights * (1 if c == 4 else 2) if zero_centered else 0
        return rows * (kept * width + statistics) + made
    fused = neox_args.norm == "rmsnorm" and neox_args.rmsnorm_fusion
    made = 4 * weights if neox_args.norm == "rmsnorm" and (zero_centered or (c == 2 and not fused)) else 0
    if fused and batch.device != "cpu":
        return rows * ((4 if zero_centered else c) * width + 4)
    if neox_args.norm in ("rmsnorm", "scalenorm"):  # the input and the normed input, in fp32
        return rows * (8 * width + (4 if neox_args.norm == "rmsnorm" else 8)) + made
    return rows * (c * width + 8)  # Transformer Engine's


def mlp_bytes(neox_args, number: int, batch: Batch) -> int:
    """linear1's output and what the activation and linear2 save."""
    mlp = neox_args.mlp_geometry(number).shard(batch.ranks)
    if mlp.gated:
        kept = 3 if neox_args.activation == "bilinear" else 4
    else:
        kept = {"relu": 1, "softsign": 3}.get(neox_args.activation, 2)
    return kept * batch.number_bytes * batch.tokens * mlp.ffn_hidden_size


def kernels_of(neox_args, number: int, batch: Batch) -> List[Tuple[str, HeadGeometry]]:
    """What each group of a layer's heads runs on batch.device, and this rank's share of the group. The kernel: global,
    flash, chunked, or explicit, which chunked takes for short texts."""
    groups = neox_args.head_geometry(number).groups
    return [(_kernel_of(neox_args, number, group, batch), group.shard(batch.ranks)) for group in groups]


def _kernel_of(neox_args, number: int, group: HeadGeometry, batch: Batch) -> str:
    kind = neox_args.attention_config[number]
    if kind == "auto":
        request = AttentionRequest.of_layer(neox_args, number, group.shard(batch.ranks), torch.device(batch.device))
        kind = next(name for name in AUTO_ORDER[batch.device] if KERNELS[name].refusal(request) is None)
    if kind != "chunked" or batch.length > EXPLICIT_KEYS[batch.device]:
        return kind
    return "explicit" if batch.number_bytes == 2 or not _plain_on_cpu(neox_args, number, group, batch) else "chunked"


def _plain_on_cpu(neox_args, number: int, group: HeadGeometry, batch: Batch) -> bool:
    """Whether chunked takes torch's CPU kernel for both passes."""
    layer = neox_args.layer_attention(number)
    if batch.device != "cpu" or layer.logit_softcap is not None or neox_args.attention_dropout > 0:
        return False
    if layer.qk_norm == "joint" and group.is_gqa:  # keys are repeated, values are not
        return False
    hides = layer.window is not None and layer.window < batch.length - 1
    return not hides and group.head_dim < OWN_BACKWARD_WIDTH


def _keeps_highest(neox_args, number: int, batch: Batch) -> bool:
    """Whether chunked has the backward pass of core/shifted.py."""
    if neox_args.layer_attention(number).logit_softcap is not None or neox_args.attention_dropout > 0:
        return False
    return shifted.suits(neox_args.params_dtype, torch.device(batch.device))


def attention_bytes(neox_args, number: int, batch: Batch) -> Dict[str, int]:
    """What is saved from the QKV projection's output to the input of the output projection.

    norm: on queries, keys and values. heads: what the kernel has as queries, keys and values, and where one of
    these or a norm's input is a view, the projection's whole output. scores: kept by the explicit kernels only.
    context: the input of the output projection, and what the kernel keeps of its own output, the log-sum-exp of
    each row with it (with a shifted backward pass its highest score too).
    """
    geometry = neox_args.head_geometry(number)
    groups = [_group_bytes(neox_args, number, group, batch) for group in range(len(geometry.groups))]
    kept = {name: sum(getattr(group, name) for group in groups) for name in ("norm", "heads", "scores", "context")}
    if any(group.keeps_projection for group in groups):
        kept["heads"] += batch.number_bytes * batch.tokens * share(geometry.qkv_hidden_size, batch.ranks)
    if len(groups) > 1 or not groups[0].gives_context:  # several are put side by side in a tensor of its own
        kept["context"] += batch.number_bytes * batch.tokens * geometry.shard(batch.ranks).query_hidden_size
    return kept


class _Group(NamedTuple):
    """Bytes that a group of heads keeps, as in attention_bytes. context: of the kernel's own output; gives_context: and
    that is the input of the output projection, if there is no other group."""

    norm: int
    heads: int
    scores: int
    context: int
    keeps_projection: bool
    gives_context: bool


def _group_bytes(neox_args, number: int, group: int, batch: Batch) -> _Group:
    geometry, layer = neox_args.head_geometry(number).groups[group], neox_args.layer_attention(number, group)
    own, c, tokens = geometry.shard(batch.ranks), batch.number_bytes, batch.tokens
    d, n, keys = own.head_dim, own.num_attention_heads, cached_key_heads(neox_args, number, own)
    fresh = layer.rotary is not None or layer.qk_norm is not None
    kernel = _kernel_of(neox_args, number, geometry, batch)
    context = scores = 0
    gives_context = False
    norm, keeps_projection = _qk_norm_bytes(neox_args, number, own, batch)
    normed_values = own.num_kv_heads if layer.v_norm else 0
    if layer.v_norm:  # each row's root mean square, and the values in fp32, which are a view of fp32 ones
        norm += tokens * normed_values * (4 if c == 4 else 4 + 4 * d)
        keeps_projection = keeps_projection or c == 4
    has_views = not (fresh and layer.v_norm)  # among queries, keys and values, of the projection's output
    if kernel == "flash":
        wide = -(-d // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
        heads = c * tokens * (n + 2 * keys) * wide
        context, gives_context = c * tokens * n * wide + 4 * tokens * n, wide == d
    elif kernel == "chunked":
        heads = c * tokens * ((n + keys if fresh else 0) + normed_values) * d
        keeps_projection = keeps_projection or has_views
        context = c * tokens * n * d + 4 * tokens * n * (2 if _keeps_highest(neox_args, number, batch) else 1)
        gives_context = True
    else:
        scores = _score_bytes(neox_args, number, own, batch, in_fp32=kernel == "explicit")
        copied = n + keys + own.num_kv_heads
        alone = len(neox_args.head_geometry(number).groups) == 1
        if batch.texts == 1 or own.num_kv_heads == 1 or (alone and not geometry.is_gqa):  # where a view will do
            copied = (n if fresh or n > keys else 0) + (keys if fresh else 0) + normed_values
            keeps_projection = keeps_projection or has_views
        heads = c * tokens * copied * d
    return _Group(norm, heads, scores, context, keeps_projection, gives_context)


def _qk_norm_bytes(neox_args, number: int, own: HeadGeometry, batch: Batch) -> Tuple[int, bool]:
    """What the norms of queries and keys save, and whether that is a view of the QKV projection's output besides.

    own: this rank's share of a group of the layer's heads.
    """
    layer = neox_args.layer_attention(number)
    if layer.qk_norm is None:
        return 0, False
    tokens, d, n = batch.tokens, own.head_dim, own.num_attention_heads
    keys, c = cached_key_heads(neox_args, number, own), batch.number_bytes
    if layer.qk_norm == "full_width" and neox_args.norm in _LAYER_NORMS:  # centred and normed, in fp32
        made = 4 * (n + keys) * d if c == 2 or neox_args.zero_centered_gamma else 0
        return 2 * tokens * 4 + 8 * tokens * (n + keys) * d + made, False
    rows, width, weights = tokens * (n + keys), d, {"per_head": 2 * d, "joint": 2 * n * d}.get(layer.qk_norm)
    by_token = layer.qk_norm == "full_width" or (layer.qk_norm == "joint" and neox_args.norm in _LAYER_NORMS)
    total = norm_bytes(neox_args, rows, width, batch, weights or (n + keys) * d)
    if by_token:  # a row's statistics are those of all heads
        per_row = norm_bytes(neox_args, 1, 0, batch, 0)
        total -= (rows - 2 * tokens) * per_row
    if not _keeps_input(neox_args, c):
        return total, False
    if layer.qk_norm == "joint":  # keys are repeated, if only once
        views = n
    else:  # of several heads each with its q, k and v, those of all heads are not side by side
        views = 0 if layer.qk_norm == "full_width" and n == own.num_kv_heads > 1 else n + keys
    return total - c * tokens * views * d, views > 0


def _score_bytes(neox_args, number: int, own: HeadGeometry, batch: Batch, in_fp32: bool) -> int:
    """The explicit scores: after the soft cap, the softmax, and dropout; the mask; rpe's buckets."""
    layer, c, square = neox_args.layer_attention(number), batch.number_bytes, batch.length**2
    in_fp32 = in_fp32 or neox_args.attention_softmax_in_fp32 or neox_args.apply_query_key_layer_scaling
    softmax = 4 if in_fp32 else c
    each = softmax if layer.logit_softcap is None else 2 * softmax
    if neox_args.attention_dropout > 0:
        each += c + batch.mask_bytes
    elif softmax != c:
        each += c
    return (
        batch.texts * own.num_attention_heads * square * each
        + square
        + (8 * square if neox_args.pos_emb == "rpe" else 0)
    )
