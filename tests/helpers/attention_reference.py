"""Attention stated once more, in fp64 and with einsum, from the definition and not from the code under test.

`attention_reference` is a whole layer with every setting; gradients of it are autograd's, in fp64.
Letters: s query tokens, t key tokens, b batch, h hidden, n query heads, m kv heads, d head_dim, r rotated dimensions.
"""

import math
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch


@dataclass(frozen=True)
class AttentionFunction:
    """What one layer computes. Names of settings, and their values, are those of the config.

    window counts the tokens before the query itself; scale None is d^-0.5; norm is that of queries and keys.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_ndims: int = 0
    base: float = 10000
    scale: Optional[float] = None
    window: Optional[int] = None
    softcap: Optional[float] = None
    qk_norm: Optional[str] = None
    norm: str = "rmsnorm"
    eps: float = 0.0
    positions: Optional[str] = None
    rpe_num_buckets: int = 32
    rpe_max_distance: int = 128


def attention_reference(parameters, hidden, function, stored=None):
    """hidden [s, b, h] -> [s, b, h] with bias. parameters: the state dict in fp64, whole; biases may be missing.

    stored: (k, v) [s, b, heads, d] -> what a cache makes of them, after the rotation. rpe's weight is "rpe.weight".
    """
    n, m, d, r = function.heads, function.kv_heads, function.head_dim, function.rotary_ndims
    mixed = torch.einsum("sbh,oh->sbo", hidden, parameters["query_key_value.weight"])
    q, k, v = split_reference(mixed + parameters.get("query_key_value.bias", 0), n, m, d)
    q, k = norm_reference(q, k, parameters, function)
    q, k = (rotary_reference(x, r, function.base) for x in (q, k))
    k, v = (k, v) if stored is None else stored(k, v)
    scale = d**-0.5 if function.scale is None else function.scale
    bias = bias_reference(function, hidden.shape[0], parameters)
    context = core_reference(q, k, v, scale, window=function.window, bias=bias, softcap=function.softcap)
    weight = parameters["dense.weight"].reshape(-1, n, d)
    return torch.einsum("sbnd,ond->sbo", context, weight) + parameters.get("dense.bias", 0)


def value_and_gradients(parameters, hidden, function, upstream):
    """(output, {name: gradient of sum(output * upstream)}), the input's under "input"."""
    given = {name: values.double().requires_grad_() for name, values in {**parameters, "input": hidden}.items()}
    output = attention_reference(given, given["input"], function)
    gradients = torch.autograd.grad(output, list(given.values()), upstream.double())
    return output.detach(), dict(zip(given, gradients, strict=True))


def layer_reference(parameters, hidden, geometry, scale, base=10000, window=None):
    """attention_reference without norms and biases on scores. geometry: a record of the configured numbers."""
    numbers = (geometry.num_attention_heads, geometry.num_kv_heads, geometry.head_dim, geometry.rotary_ndims)
    return attention_reference(parameters, hidden, AttentionFunction(*numbers, base, scale, window))


def split_reference(mixed, heads, kv_heads, width):
    """The rows of GPT-NeoX's fused projection, taken apart one head at a time. mixed [s, b, (n + 2m)·d]."""
    blocks = list(mixed.split(width, dim=-1))
    if heads == kv_heads:
        q, k, v = (blocks[kind::3] for kind in range(3))
    else:
        q, k, v = blocks[:heads], blocks[heads : heads + kv_heads], blocks[heads + kv_heads :]
    return tuple(torch.stack(list(x), dim=2) for x in (q, k, v))


def norm_reference(q, k, parameters, function):
    """q [s, b, n, d] and k [s, b, m, d] normed; under joint there is a key for each query head afterwards."""
    kind = function.qk_norm
    if kind is None:
        return q, k
    names = ("qk_layernorm",) * 2 if kind == "joint" else ("q_layernorm", "k_layernorm")
    if kind == "joint":
        n, m = q.shape[2], k.shape[2]
        k = torch.stack([k[:, :, i * m // n] for i in range(n)], dim=2)
    both_dims = kind == "full_width" or (kind == "joint" and function.norm == "layernorm")
    over = (-2, -1) if both_dims else (-1,)
    return tuple(_normed(x, name, parameters, function, over) for x, name in zip((q, k), names, strict=True))


def _normed(x, name, parameters, function, over):
    """Statistics over the dimensions `over`, by Zhang and Sennrich 2019 or Ba et al. 2016."""
    shape = x.shape[-2:] if function.qk_norm == "full_width" else x.shape[-1:]
    shape = x.shape[-2:] if function.qk_norm == "joint" else shape
    if function.norm == "rmsnorm":
        gain = parameters[f"{name}.scale"].reshape(shape)
        return x / (x.square().mean(over, keepdim=True) + function.eps).sqrt() * gain
    gain, shift = (parameters[f"{name}.{part}"].reshape(shape) for part in ("weight", "bias"))
    centred = x - x.mean(over, keepdim=True)
    return centred / (centred.square().mean(over, keepdim=True) + function.eps).sqrt() * gain + shift


def rotary_reference(x, rotary_ndims, base, offset=0):
    """x [s, b, n, d]: pair i of the first r dimensions is turned by position * base^(-2i/r), as complex numbers."""
    half = rotary_ndims // 2
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    frequencies = [base ** (-2.0 * i / rotary_ndims) for i in range(half)]
    angles = [[(position + offset) * frequency for frequency in frequencies] for position in range(x.shape[0])]
    angles = torch.tensor(angles, dtype=torch.float64).reshape(x.shape[0], 1, 1, half)
    turned = pairs * torch.complex(angles.cos(), angles.sin()).to(pairs.dtype)
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


def bias_reference(function, tokens, parameters):
    """What is added to the scaled scores, [n, s, s]; None if nothing is. Keys after the query get 0."""
    if function.positions == "alibi":
        slopes = torch.tensor(_alibi_slopes(function.heads), dtype=torch.float64)
        back = [[max(0, i - j) for j in range(tokens)] for i in range(tokens)]
        return -torch.einsum("n,st->nst", slopes, torch.tensor(back, dtype=torch.float64))
    if function.positions == "rpe":
        numbers = function.rpe_num_buckets, function.rpe_max_distance
        buckets = [[_rpe_bucket(max(0, i - j), *numbers) for j in range(tokens)] for i in range(tokens)]
        return math.sqrt(function.head_dim) * parameters["rpe.weight"][torch.tensor(buckets)].permute(2, 0, 1)
    return None


def _alibi_slopes(heads):
    """Press et al. 2022: a geometric series from 2^(-8/n) on; for n that is no power of two, that of the power below,
    then the odd members of the series of twice as many."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    odd_members = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)] + odd_members


def _rpe_bucket(distance, buckets, farthest):
    """Raffel et al. 2020: one distance each in the lower half, logarithmic up to `farthest` in the upper."""
    exact = buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(farthest / exact)
    return min(buckets - 1, exact + int(share * (buckets - exact)))


def core_reference(q, k, v, scale, offset=0, window=None, bias=None, softcap=None):
    """q [s, b, n, d], k [t, b, m', d], v [t, b, m, d] -> [s, b, n, d]; loops over queries, no mask tensor."""
    n = q.shape[2]
    k = torch.stack([k[:, :, i * k.shape[2] // n] for i in range(n)], dim=2)
    v = torch.stack([v[:, :, i * v.shape[2] // n] for i in range(n)], dim=2)
    rows = []
    for i in range(q.shape[0]):
        first = 0 if window is None else max(0, i + offset - window)
        seen = slice(first, i + offset + 1)
        scores = torch.einsum("bnd,tbnd->bnt", q[i], k[seen]) * scale
        if bias is not None:
            scores = scores + bias[None, :, i, seen]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        rows.append(torch.einsum("bnt,tbnd->bnd", weights, v[seen]))
    return torch.stack(rows)


def e4m3_reference(x):
    """Nearest 1.mmm times 2^e with e >= -6, ties to even, at most 448; fp32 -> fp64."""
    values = x.double().numpy()
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(values), 1e-30))), -6)
    step = 2.0 ** (exponent - 3)
    return torch.from_numpy(np.clip(np.rint(values / step) * step, -448, 448))


def int8_reference(x):
    """Nearest multiple of amax / 127 in each row [..., d]; the division in fp32, as the format says. -> fp64."""
    rows = x.float().numpy()
    scale = np.abs(rows).max(-1, keepdims=True) / np.float32(127)
    return torch.from_numpy(np.rint(rows / scale).astype(np.float64) * scale)


CACHE_REFERENCES = {"fp8_e4m3": e4m3_reference, "int8": int8_reference}
"""By kv_cache_dtype: what comes out of the cache for a number that went in."""
