"""Floating-point operations of the model: 2 for each multiplication with its addition.

Counted are the matrix products: projections, scores and their use, MLP and output layer. The embedding is a lookup and
costs none; norms, activations and the softmax are left out, as everyone does. Recomputed activations do not count:
these are the model's operations, not the hardware's.

Sources: Narayanan et al. 2021 (arXiv:2104.04473, appendix) and Chowdhery et al. 2022 (PaLM, arXiv:2204.02311,
appendix B), with the true projection widths in the place of hidden_size.
"""

from typing import Dict, Optional

from megatron.costs.parameters import adapted

PARTS = ("qkv", "scores", "values", "output", "mlp", "head")
_WEIGHTS = ("qkv", "output", "mlp", "head")
"""Products with a weight of the base."""


def flops_per_token(neox_args, seq_length: Optional[int] = None) -> float:
    """Operations per token of a training step, forward and backward, in texts of `seq_length` tokens.

    3 times `forward_flops`: the gradients of both factors of each product cost as much as the product. Weights that
    `lora` freezes have no gradient; that of the first layer's input is counted, though nothing needs it then. The
    causal half is not taken off, so that figures compare with those of others; what a layer's window hides is. The
    training log's TFLOP/s and MFU count these.
    """
    flops = forward_flops(neox_args, seq_length)
    frozen = 0.0 if neox_args.lora is None else sum(flops[part] for part in _WEIGHTS)
    return 3.0 * sum(flops.values()) - frozen


def forward_flops(
    neox_args, seq_length: Optional[int] = None, *, causal: bool = False, windows: bool = True
) -> Dict[str, float]:
    """Operations per token of the forward pass by part, the mean over a text of `seq_length` tokens.

    qkv, output: 2 per weight of the projection. scores, values: 2 · query width for each key that a query meets, see
    `keys_per_query`. mlp: both branches of a gated one. head: hidden_size times the padded vocabulary. With `lora`
    also adapters: the products with A and with B, in which every row takes what the A of all its weight's parts give.
    """
    seq_length = neox_args.seq_length if seq_length is None else seq_length
    flops = dict.fromkeys(PARTS, 0.0)
    for number in range(neox_args.num_layers):
        geometry, mlp = neox_args.head_geometry(number), neox_args.mlp_geometry(number)
        window = neox_args.layer_attention(number).window if windows else None
        products = 2.0 * geometry.query_hidden_size * keys_per_query(seq_length, causal=causal, window=window)
        flops["qkv"] += 2.0 * geometry.hidden_size * geometry.qkv_hidden_size
        flops["scores"] += products
        flops["values"] += products
        flops["output"] += 2.0 * geometry.query_hidden_size * geometry.hidden_size
        flops["mlp"] += 2.0 * mlp.hidden_size * (mlp.linear1_width + mlp.ffn_hidden_size)
        for target in adapted(neox_args, number):
            width = (target.parts or 1) * target.rank
            flops["adapters"] = flops.get("adapters", 0.0) + 2.0 * width * (target.rows + target.columns)
    flops["head"] = 2.0 * neox_args.padded_vocab_size * neox_args.hidden_size
    return flops


def keys_per_query(seq_length: int, *, causal: bool, window: Optional[int] = None) -> float:
    """How many keys a query of a text meets, on average. window: tokens beside the query itself, None for all.

    Not causal: all, or as many as a full window has, which is how kernels that skip nothing but blocks outside of a
    window are credited. Causal: exact, sum over queries i of min(i + 1, window + 1), over seq_length.
    """
    span = seq_length if window is None else min(seq_length, window + 1)
    if not causal:
        return float(span)
    return (span * (span + 1) / 2 + (seq_length - span) * span) / seq_length


def decode_flops(neox_args, past_tokens: int) -> float:
    """Operations to generate one token after `past_tokens` in the KV cache."""
    flops = forward_flops(neox_args, 1)
    total = flops["qkv"] + flops["output"] + flops["mlp"] + flops["head"] + flops.get("adapters", 0.0)
    for number in range(neox_args.num_layers):
        window = neox_args.layer_attention(number).window
        keys = past_tokens + 1 if window is None else min(past_tokens, window) + 1
        total += 4.0 * neox_args.head_geometry(number).query_hidden_size * keys
    return total
