"""Attention of one new token for each row of a batch, which sees every key: no mask, no gradient, no dropout.

Not one of the KERNELS: the step of megatron/model/decoding.py uses it in the place of any of them.
"""

from typing import Optional

import torch
import torch.nn.functional as F

FUSED_KEYS = 256
"""Tokens times rows up to which torch's fused kernel is the fastest in half precision; measured on two cores."""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, softcap: Optional[float] = None
) -> torch.Tensor:
    """q [1, b, n, d]; k [t, b, m', d] and v [t, b, m, d], in any order of t -> [1, b, n, d]. The softmax is fp32.

    As eager.attend for a single query: query head i uses key head i // (n/m').
    """
    if torch.compiler.is_compiling():
        return _sums(q, k, v, scale, softcap).view_as(q)
    fused = softcap is None and q.dtype != torch.float32 and k.shape == v.shape and k.shape[:2].numel() <= FUSED_KEYS
    return (_fused if fused else _products)(q, k, v, scale, softcap).view_as(q)


def _fused(q, k, v, scale: float, softcap: None) -> torch.Tensor:
    """By torch's kernel, to which the query heads of a key head are queries that all see every key."""
    keys, values = (x.permute(1, 2, 0, 3) for x in (k, v))  # [b, m, t, d]
    queries = q.view(*keys.shape[:2], -1, q.shape[-1])  # [b, m, n/m, d]
    return F.scaled_dot_product_attention(queries, keys, values, scale=scale)


def _products(q, k, v, scale: float, softcap: Optional[float]) -> torch.Tensor:
    """By matrix products on the cache as it lies in memory."""
    tokens, width = len(k), q.shape[-1]
    keys = k.flatten(1, 2).transpose(0, 1)  # [b·m', t, d]
    queries = q.reshape(len(keys), -1, width).transpose(1, 2)  # [b·m', d, n/m']
    scores = (
        torch.bmm(keys, queries).transpose(1, 2).float().mul_(scale)
    )  # [b·m', n/m', t]; q·k is slower in half precision
    probabilities = _capped(scores, softcap).softmax(-1).to(v.dtype)
    values = v.flatten(1, 2).transpose(0, 1)  # [b·m, t, d]
    return torch.bmm(probabilities.reshape(len(values), -1, tokens), values)  # [b·m, n/m, d]


def _sums(q, k, v, scale: float, softcap: Optional[float]) -> torch.Tensor:
    """As sums of products in fp32, for inductor to make loops of."""
    tokens, batch, width = *k.shape[:2], q.shape[-1]
    queries = q.reshape(batch, k.shape[2], -1, width).float() * scale  # [b, m', n/m', d]
    scores = (queries * k.unsqueeze(3).float()).sum(-1)  # [t, b, m', n/m']
    probabilities = _capped(scores, softcap).softmax(0)
    probabilities = probabilities.reshape(tokens, batch, v.shape[2], -1, 1)  # [t, b, m, n/m, 1]
    return (probabilities * v.unsqueeze(3).float()).sum(0).to(v.dtype)  # [b, m, n/m, d]


def _capped(scores: torch.Tensor, softcap: Optional[float]) -> torch.Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)
