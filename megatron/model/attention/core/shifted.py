"""The backward pass of the chunked kernel in bfloat16 on the CPU, with all products in bfloat16.

A product rounds its result to bfloat16, and a rounded score of 1000 is off by 2. So what is subtracted from the scores
before the exponential is subtracted inside of the product: the highest score of the row, in three bfloat16 numbers,
stands in further columns of the queries, and ones in those of the keys. What is rounded then is small where the weight
is not: an error of at most |score - highest| / 512 of a weight. The mean of the gradients of a row's weights is
subtracted in the same way; what it is off by, as it comes from a rounded output, is taken away as blocks.py says.
"""

import functools
from typing import Hashable, Tuple

import torch

from megatron.model.attention.core.blocks import Scratch, unstacked
from megatron.model.attention.core.spec import Spec

ALIGNMENT = 16
"""Inner widths are filled up to multiples of this: others are slower."""
_PARTS = 3


def can(q: torch.Tensor, spec: Spec) -> bool:
    """Whether this is the backward pass, with the kernel's own forward pass.

    Time of both passes relative to torch's forward and backward, 8 heads and 4 kv heads, 512 and 2048 tokens: at
    head_dim 128 0.7 and 0.9, at 64 0.8 and 1.05, at 32 0.93 and 1.36. Not measured with AMX, where torch's forward is
    fast.
    """
    return suits(q.dtype, q.device) and spec.softcap is None and not spec.dropout_p


def suits(dtype: torch.dtype, device: torch.device) -> bool:
    """The part of that which a layer's attention function has no say in."""
    return dtype == torch.bfloat16 and device.type == "cpu" and not _has_amx()


@functools.cache
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def backward(q, k, v, output, log_sums, highest, upstream, spec: Spec, size: int) -> Tuple[torch.Tensor, ...]:
    """q [s, b, n, d], k [t, b, m', d], v [t, b, m, d]; output, upstream [b, n, s, d]; log_sums, highest [b, n, s, 1]
    -> the gradients of q, k and v, in their layouts. size: queries of a block."""
    width, scratch = q.shape[-1], Scratch(q)
    # exp(score - highest) times the share of the highest is a weight; upstream takes the factor, for all its uses.
    shares = (highest - log_sums).exp_()  # [b, n, s, 1]
    pulled = upstream * shares  # [b, n, s, d] in fp32
    means = (pulled * output).sum(-1, keepdim=True)
    queries = _with_columns(q.permute(1, 2, 0, 3), _in_parts(highest / -spec.scale))  # [b, n, s, d + 16]
    pulled = _with_columns(pulled, _in_parts(-means))
    keys, values = (_with_columns(_by_head(x), x.new_ones(_PARTS)) for x in (k, v))  # [b·m', t, d + 16], [b·m, ...]
    dq = torch.empty_like(q).permute(1, 2, 0, 3)
    dk, dv = (torch.zeros_like(x[..., :width], dtype=torch.float32) for x in (keys, values))
    for rows in spec.query_blocks(q.shape[0], size):
        asking, pull = (_stacked(x[:, :, slice(*rows)], len(y)) for x, y in ((queries, keys), (pulled, values)))
        rest, held = 0.0, []
        for number, columns in enumerate(spec.key_blocks(rows, k.shape[0], 2 * size)):
            here, shape = slice(*columns), (*q.shape[1:3], rows[1] - rows[0], columns[1] - columns[0])
            weights = _product(scratch, ("weights", number), asking, keys[:, here].mT).view(shape)
            gradient = _product(scratch, ("gradient", number), pull, values[:, here].mT).view(shape)
            spec.hide_(weights, rows, columns, torch.finfo(weights.dtype).min)
            gradient.mul_(weights.mul_(spec.scale).exp_())
            dv[:, here].add_(_product(scratch, "narrow", _stacked(weights, len(values)).mT, pull[..., :width]))
            rest = rest + gradient.sum(-1, keepdim=True, dtype=torch.float32)
            held.append((here, weights, gradient))
        query_sum = torch.zeros_like(asking[..., :width], dtype=torch.float32)
        rest = (rest * shares[:, :, slice(*rows)]).to(q.dtype)
        for here, weights, gradient in held:
            gradient = _stacked(gradient.addcmul_(weights, rest, value=-1), len(keys))
            dk[:, here].add_(_product(scratch, "narrow", gradient.mT, asking[..., :width]))
            query_sum.add_(_product(scratch, "narrow", gradient, keys[:, here, :width]))
        dq[:, :, slice(*rows)] = query_sum.mul_(spec.scale).view_as(dq[:, :, slice(*rows)])
    return dq.permute(2, 0, 1, 3), unstacked(dk.mul_(spec.scale), k), unstacked(dv, v)


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """[t, b, m, d] -> [b·m, t, d]"""
    return x.permute(1, 2, 0, 3).flatten(0, 1)


def _stacked(x: torch.Tensor, count: int) -> torch.Tensor:
    """[b, n, rows, c] -> [b·m, (n/m)·rows, c], count being b·m."""
    return x.reshape(count, -1, x.shape[-1])


def _in_parts(x: torch.Tensor) -> torch.Tensor:
    """fp32 [..., 1] -> three bfloat16 numbers [..., 3] whose sum it is, to 24 bits."""
    parts = []
    for _ in range(_PARTS):
        parts.append(x.to(torch.bfloat16))
        x = x - parts[-1]
    return torch.cat(parts, -1)


def _with_columns(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """x [..., d] in bfloat16, with the columns and zeros behind: [..., d + 16] with d a multiple of 16."""
    width = x.shape[-1]
    result = x.new_zeros(*x.shape[:-1], -(-(width + _PARTS) // ALIGNMENT) * ALIGNMENT, dtype=torch.bfloat16)
    result[..., :width] = x
    result[..., width : width + _PARTS] = columns
    return result


def _product(scratch: Scratch, name: Hashable, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a, b, out=scratch(name, (a.shape[0], a.shape[1], b.shape[2]), a.dtype))
