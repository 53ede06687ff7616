"""Attention stated once more, in fp64 and with einsum, from the definition and not from the code under test."""

import math

import torch


def rotary_reference(x, rotary_ndims, base, offset=0):
    """x [s, b, n, d]: pair i of the first r dimensions is turned by position * base^(-2i/r), written as complex."""
    r = rotary_ndims
    out = x.clone()
    for i in range(r // 2):
        for position in range(x.shape[0]):
            angle = (position + offset) * base ** (-2.0 * i / r)
            a, b = x[position, ..., i], x[position, ..., i + r // 2]
            out[position, ..., i] = a * math.cos(angle) - b * math.sin(angle)
            out[position, ..., i + r // 2] = a * math.sin(angle) + b * math.cos(angle)
    return out


def core_reference(q, k, v, scale, offset=0, window=None, bias=None):
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
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        rows.append(torch.einsum("bnt,tbnd->bnd", weights, v[seen]))
    return torch.stack(rows)


def split_reference(mixed, heads, kv_heads, width):
    """The rows of GPT-NeoX's fused projection, taken apart one head at a time. mixed [s, b, (n + 2m)·d]."""
    blocks = list(mixed.split(width, dim=-1))
    if heads == kv_heads:
        q, k, v = (blocks[kind::3] for kind in range(3))
    else:
        q, k, v = blocks[:heads], blocks[heads : heads + kv_heads], blocks[heads + kv_heads :]
    return tuple(torch.stack(list(x), dim=2) for x in (q, k, v))


def layer_reference(parameters, hidden, geometry, scale, base=10000, window=None):
    """Whole attention in fp64: hidden [s, b, h] -> [s, b, h] with bias. parameters: the state dict, fp64.

    geometry: HeadGeometry, used as a record of the configured numbers only.
    """
    n, m, d, r = geometry.num_attention_heads, geometry.num_kv_heads, geometry.head_dim, geometry.rotary_ndims
    mixed = torch.einsum("sbh,oh->sbo", hidden, parameters["query_key_value.weight"])
    mixed = mixed + parameters["query_key_value.bias"]
    q, k, v = split_reference(mixed, n, m, d)
    q, k = (rotary_reference(x, r, base) for x in (q, k))
    context = core_reference(q, k, v, scale, window=window)
    weight = parameters["dense.weight"].reshape(-1, n, d)
    return torch.einsum("sbnd,ond->sbo", context, weight) + parameters["dense.bias"]
