"""The parameters of GPT-NeoX's attention as Transformer Engine's attention holds them, by counting rows."""

import torch

NAMES = {
    "query_key_value.weight": "qkv.weight",
    "query_key_value.bias": "qkv.bias",
    "dense.weight": "proj.weight",
    "dense.bias": "proj.bias",
}
"""Native name -> TE's, inside `attention`."""


def te_row_order(geometry):
    """For each row of TE's whole QKV weight, the number of that row in GPT-NeoX's.

    TE: for each kv head its q heads, its k, its v. GPT-NeoX: q, k and v of each head in turn without grouped queries;
    all q, all k, all v with them.
    """
    n, m, d = geometry.num_attention_heads, geometry.num_kv_heads, geometry.head_dim
    if m == n:
        first = {(kind, head): (3 * head + "qkv".index(kind)) * d for kind in "qkv" for head in range(n)}
    else:
        first = {("q", head): head * d for head in range(n)}
        first.update({("k", head): (n + head) * d for head in range(m)})
        first.update({("v", head): (n + m + head) * d for head in range(m)})
    heads = []
    for kv_head in range(m):
        heads += [("q", head) for head in range(n) if head * m // n == kv_head]
        heads += [("k", kv_head), ("v", kv_head)]
    return torch.tensor([first[head] + row for head in heads for row in range(d)])


def as_te(native, geometry):
    """{native name: whole tensor} -> {TE's name: tensor with TE's rows}; also for gradients."""
    order = te_row_order(geometry)
    return {
        NAMES[name]: tensor[order] if name.startswith("query_key_value") else tensor for name, tensor in native.items()
    }
