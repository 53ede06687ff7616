"""The "global" kernel: explicit scores, any device, any dtype, any bias. The reference for the others."""

from typing import Optional

import torch
import torch.nn.functional as F

from megatron import mpu
from megatron.model.attention.core.masks import hidden_keys
from megatron.model.attention.core.request import AttentionRequest


def refusal(request: AttentionRequest) -> Optional[str]:
    """Nothing is refused: this kernel is the alternative that the other kernels name."""
    return None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal_offset: int,
    window: Optional[int] = None,
    softcap: Optional[float] = None,
    bias: Optional[torch.Tensor] = None,
    dropout_p: float = 0.0,
    training: bool = False,
    softmax_in_fp32: bool = False,
    score_divisor: float = 1.0,
) -> torch.Tensor:
    """Scaled dot-product attention, causal by position.

    q [s, b, n, d]; k [t, b, m', d] and v [t, b, m, d] with m' and m dividing n (query head i uses head i // (n/m)).
    causal_offset: tokens before the first query (t - s with a cache, else 0). window: see masks.hidden_keys.
    softcap: scaled scores become softcap * tanh(score / softcap) (Gemma 2, arXiv:2408.00118, section 2).
    bias [n, s, t] is added to the scaled scores. score_divisor keeps the half-precision scores small and is
    multiplied back in fp32 (GPT-NeoX's apply_query_key_layer_scaling; as there, the bias is multiplied too).
    Returns [s, b, n, d].
    """
    scores = _scores(q, k, scale / score_divisor)  # [b, n, s, t]
    if softmax_in_fp32:
        scores = scores.float()
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if score_divisor != 1.0:
        scores = scores * score_divisor
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = hidden_keys(q.shape[0], k.shape[0], causal_offset, window, q.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    probabilities = F.softmax(scores, dim=-1).to(v.dtype)
    return _context(_dropout(probabilities, dropout_p, training), v)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """q·k * scale. The query heads of one key head are stacked along s, so keys are never repeated."""
    query_tokens, batch, heads, width = q.shape
    key_tokens, _, key_heads, _ = k.shape
    stacked = q.permute(1, 2, 0, 3).reshape(batch * key_heads, -1, width)  # [b·m', (n/m')·s, d]
    keys = k.permute(1, 2, 3, 0).reshape(batch * key_heads, width, key_tokens)  # [b·m', d, t]
    unused = stacked.new_empty(1, 1, 1)
    scores = torch.baddbmm(unused, stacked, keys, beta=0.0, alpha=scale)  # [b·m', (n/m')·s, t]
    return scores.view(batch, heads, query_tokens, key_tokens)


def _context(probabilities: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """probabilities [b, n, s, t] times v [t, b, m, d] -> [s, b, n, d]."""
    batch, heads, query_tokens, key_tokens = probabilities.shape
    _, _, value_heads, width = v.shape
    values = v.permute(1, 2, 0, 3).reshape(batch * value_heads, key_tokens, width)  # [b·m, t, d]
    stacked = probabilities.reshape(batch * value_heads, -1, key_tokens)  # [b·m, (n/m)·s, t]
    context = torch.bmm(stacked, values).view(batch, heads, query_tokens, width)
    return context.permute(2, 0, 1, 3)  # [s, b, n, d]


def _dropout(probabilities: torch.Tensor, dropout_p: float, training: bool) -> torch.Tensor:
    """Each model-parallel rank holds other heads, so each must draw another mask."""
    if not training or dropout_p == 0.0:
        return probabilities
    with mpu.get_cuda_rng_tracker().fork():
        return F.dropout(probabilities, dropout_p)
