"""A stand-in for flash_attn_2_cuda: what the docstring of flash_attn_func promises, in fp64."""

from typing import Any, Dict, List

import torch


class CudaLibrary:
    """The two functions that flash_attn_func calls. `calls` keeps the arguments of each forward call.

    Refused is what the library refuses: dtypes, head sizes, dropout under a soft cap. Dropout itself is left out.
    """

    def __init__(self):
        self.calls: List[Dict[str, Any]] = []

    def fwd(self, q, k, v, out, slopes, dropout_p, scale, causal, left, right, softcap, return_softmax, generator):
        assert out is None and slopes is None and not return_softmax and generator is None
        assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
        assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, "head_size"
        assert not (softcap and dropout_p), "Softcapping does not support dropout for now"
        assert q.shape[2] % k.shape[2] == 0 and k.shape == v.shape
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        self.calls.append(dict(shape=tuple(q.shape), key_shape=tuple(k.shape), dropout_p=dropout_p))
        context, sums = _attention(*(x.double() for x in (q, k, v)), scale, causal, left, right, softcap)
        return context.to(q.dtype), sums.float(), q.new_empty(0), torch.zeros(2, dtype=torch.int64)

    def bwd(
        self, dout, q, k, v, out, sums, dq, dk, dv, slopes, dropout_p, scale, causal, left, right, softcap,
        deterministic, generator, rng_state,
    ):  # fmt: skip
        given = (x.double() for x in (dout, q, k, v))
        gradients = _gradients(*given, scale, causal, left, right, softcap)
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            target.copy_(gradient)
        return dq, dk, dv, sums.clone()  # an operator may not return its input


def _attention(q, k, v, scale, causal, left, right, softcap):
    """q [b, s, n, d], k and v [b, t, m, d] -> the output [b, s, n, d] and the log-sum-exps [b, n, s]."""
    scores = _scores(q, k, scale, softcap).masked_fill(_hidden(q.shape[1], k.shape[1], causal, left, right), -torch.inf)
    return torch.einsum("bnst,btnd->bsnd", scores.softmax(-1), _repeated(v, q)), scores.logsumexp(-1)


def _gradients(upstream, q, k, v, scale, causal, left, right, softcap):
    """Of q, k and v. Written out, because there is no autograd inside an operator."""
    scores = _scores(q, k, scale, softcap)
    hidden = _hidden(q.shape[1], k.shape[1], causal, left, right)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    of_weights = torch.einsum("bsnd,btnd->bnst", upstream, _repeated(v, q))
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    if softcap > 0:
        of_scores = of_scores * (1 - (scores / softcap) ** 2)
    of_q = torch.einsum("bnst,btnd->bsnd", of_scores, _repeated(k, q)) * scale
    of_k = torch.einsum("bnst,bsnd->btnd", of_scores, q) * scale
    of_v = torch.einsum("bnst,bsnd->btnd", weights, upstream)
    return of_q, *(x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (of_k, of_v))


def _repeated(x, q):
    """Consecutive query heads share a head."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _scores(q, k, scale, softcap):
    scores = torch.einsum("bsnd,btnd->bnst", q, _repeated(k, q)) * scale
    return softcap * torch.tanh(scores / softcap) if softcap > 0 else scores


def _hidden(queries, keys, causal, left, right):
    """Query i sees the keys from i + t - s - left to i + t - s + right; -1 is no limit; causal ends at i + t - s."""
    distance = torch.arange(queries).unsqueeze(1) + keys - queries - torch.arange(keys)  # [s, t]
    limits = [(left >= 0, distance > left), (right >= 0, -distance > right), (causal, distance < 0)]
    return sum((beyond for limited, beyond in limits if limited), torch.zeros_like(distance, dtype=torch.bool))
