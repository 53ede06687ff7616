"""Gradients of the chunked kernel in half precision where one key has nearly all of a row's weight, against fp64.

The gradients of the row's scores are then small differences of large numbers, and errors are relative to them.
"""

import itertools

import pytest
import torch

from megatron.model.attention.core import chunked, cpu_flash, shifted
from tests.helpers.tolerances import FORWARD

SIZE = 16
TOKENS = 75
SCORES = {torch.bfloat16: (0, 5, 11, 20), torch.float16: (0, 5, 11)}
"""With 20 the other weights are less than fp16 has numbers for."""
HEADS = ((6, 2, 24), (3, 3, 16), (5, 1, 12), (4, 2, 128))
"""Query and key-value heads and head_dim, as in tests/helpers/geometries.py, and one that is wide."""


@pytest.fixture(params=("torch forward", "own", "shifted"))
def attend(request, monkeypatch):
    """The kernel, in many small blocks, by one of its ways."""
    monkeypatch.setattr(chunked, "BLOCK", {"cpu": SIZE, "cuda": SIZE})
    monkeypatch.setattr(cpu_flash, "MASKED_ROWS", SIZE)
    monkeypatch.setattr(shifted, "_has_amx", lambda: request.param != "shifted")
    monkeypatch.setattr(chunked, "_explicit_is_faster", lambda *a: False)
    if request.param == "own":
        monkeypatch.setattr(cpu_flash, "can", lambda *a: False)
    return lambda *x, **options: chunked.attend(*x, causal_offset=0, **options)


def _tensors(heads, score, where, dtype):
    """q, k and v of one text; the score is that of every query with the first key, or with its own."""
    n, m, width = heads
    generator = torch.Generator().manual_seed(score + n)
    q, k, v = (torch.randn(TOKENS, 1, h, width, generator=generator, dtype=torch.float64) for h in (n, m, m))
    if where == "first":
        q[..., 0], k[..., 0] = width**0.5, 0.0
        k[0, ..., 0] = score
    else:
        k = torch.nn.functional.normalize(k, dim=-1) * (score * width**0.5) ** 0.5
        q = k.repeat_interleave(n // m, dim=2) + 0.1 * q
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


def _reference(q, k, v, scale, window=None, softcap=None):
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    back = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    hidden = (back < 0) | (back > (TOKENS if window is None else window))
    return torch.einsum("bnst,tbnd->sbnd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def _errors(attend, heads, score, where, dtype, **options):
    """Of the gradients of q, k and v: the norm of the difference over the norm."""
    tensors, scale = _tensors(heads, score, where, dtype), heads[2] ** -0.5
    wide = [x.detach().double().requires_grad_() for x in tensors]
    pull = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    attend(*tensors, scale=scale, **options).backward(pull)
    _reference(*wide, scale, **options).backward(pull.double())
    return [((x.grad - y.grad).norm() / y.grad.norm()).item() for x, y in zip(tensors, wide, strict=True)]


@pytest.mark.parametrize("where", ("first", "own"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_a_key_that_has_nearly_all_the_weight_leaves_the_gradients_right(attend, where, dtype):
    """With the mean of a row's gradients from the rounded output, a score of 11 makes errors of 0.1 to 0.3."""
    for heads, score in itertools.product(HEADS, SCORES[dtype][0 if where == "first" else 1 :]):
        for options in ({}, dict(window=20), dict(softcap=15.0), dict(softcap=30.0, window=50)):
            found = _errors(attend, heads, score, where, dtype, **options)
            assert max(found) <= FORWARD[dtype], (heads, score, options, found)
