"""The "chunked" kernel: attention block by block in plain torch, on any device, in any dtype, at any head_dim.

FlashAttention-2 (Dao 2023, arXiv:2307.08691, algorithms 1 and 2): the forward pass keeps a running softmax over blocks
of keys and saves q, k, v, the output and the log-sum-exp of each row; the backward pass computes the scores of each
block again. Memory grows with the number of tokens, not with its square. There is no double backward.

What is faster in another way is left to it: up to EXPLICIT_KEYS keys, and for a single query, the explicit scores of
eager.py; on the CPU the forward pass of torch's own flash kernel, and its backward pass where that is the faster one
(cpu_flash.py), or products in bfloat16 only (shifted.py).
"""

from dataclasses import replace
from typing import Optional

import torch
from torch.autograd.function import once_differentiable

from megatron import mpu
from megatron.errors import BackendError
from megatron.model.attention.core import cpu_flash, eager, shifted
from megatron.model.attention.core.blocks import BlockProducts, centre_, unstacked
from megatron.model.attention.core.request import AttentionRequest
from megatron.model.attention.core.spec import Spec

BLOCK = {"cpu": 128, "cuda": 512}
"""Queries of a block by device, and half the keys. CPU: measured. CUDA: not measured."""
LONG = 1024
"""From so many keys on, blocks have twice as many queries and keys. CPU: measured at 512 and 2048."""
EXPLICIT_KEYS = {"cpu": 256, "cuda": 512}


def refusal(request: AttentionRequest) -> Optional[str]:
    """Why this kernel cannot run the layer; None if it can."""
    if request.score_bias:
        return f"{request.score_bias} adds a bias to the scores, which the chunked kernel does not take"
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
    """As eager.attend. The softmax is fp32, whatever softmax_in_fp32 says.

    Raises BackendError for a bias.
    """
    if bias is not None:
        raise BackendError("attention_config=chunked takes no score bias; use attention_config=global")
    dropout_p = dropout_p if training else 0.0
    spec = Spec(scale, causal_offset, window, softcap, dropout_p)
    if _explicit_is_faster(q, k, v, spec):
        options = dict(dropout_p=dropout_p, training=training, softmax_in_fp32=True, score_divisor=score_divisor)
        return eager.attend(
            q, k, v, scale=scale, causal_offset=causal_offset, window=window, softcap=softcap, **options
        )
    if dropout_p:
        spec = replace(spec, seed=_draw_seed(q.device))
    return _Blockwise.apply(q, k, v, spec)


def _explicit_is_faster(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> bool:
    if q.shape[0] == 1:
        return True
    if k.shape[0] > _by_device(EXPLICIT_KEYS, q.device):
        return False
    return not cpu_flash.can_backward(q, k, v, spec)


def _by_device(table, device: torch.device) -> int:
    return table.get(device.type, table["cuda"])


def _block(k: torch.Tensor) -> int:
    """Queries of a block, and half its keys: the same in both passes, because dropout goes by them."""
    return _by_device(BLOCK, k.device) * (2 if k.shape[0] >= LONG else 1)


def _draw_seed(device: torch.device) -> int:
    """Of this layer's dropout masks. Each model-parallel rank holds other heads, so each must draw another one.

    Drawn where the activations are, for activation checkpointing to draw it again; on CUDA this waits for the device.
    """
    with mpu.get_cuda_rng_tracker().fork():
        return int(torch.randint(2**62, (), device=device))


class _Blockwise(torch.autograd.Function):
    """q [s, b, n, d], k [t, b, m', d], v [t, b, m, d] -> [s, b, n, d]."""

    @staticmethod
    def forward(ctx, q, k, v, spec):
        shifts = shifted.can(q, spec)
        run = cpu_flash.forward if cpu_flash.can(q, k, v, spec) and not shifts else _forward
        output, log_sums, *highest = run(q, k, v, spec)
        ctx.save_for_backward(q, k, v, output, log_sums, *(highest if shifts else ()))
        ctx.spec = spec
        return output.permute(2, 0, 1, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        # Read once: under activation checkpointing this computes them.
        q, k, v, output, log_sums, *highest = ctx.saved_tensors
        spec, upstream = ctx.spec, upstream.permute(1, 2, 0, 3)
        if highest:
            return (*shifted.backward(q, k, v, output, log_sums, *highest, upstream, spec, _block(k)), None)
        run = cpu_flash.backward if cpu_flash.can_backward(q, k, v, spec) else _backward
        return (*run(q, k, v, output, log_sums, upstream, spec), None)


def _forward(q, k, v, spec: Spec):
    """Algorithm 1. Returns the output [b, n, s, d] and of each row of scores the log-sum-exp and the highest,
    [b, n, s, 1]."""
    products, size = BlockProducts(q, k, v, spec.scale), _block(k)
    output = torch.empty_like(q).permute(1, 2, 0, 3)  # [b, n, s, d]
    log_sums, tops = (products.zeros((0, q.shape[0]), 1) for _ in range(2))
    for rows in spec.query_blocks(q.shape[0], size):
        queries, context = products.for_scores(products.queries(rows)), products.zeros(rows, q.shape[-1])
        total = products.zeros(rows, 1)
        highest = torch.full_like(total, torch.finfo(total.dtype).min)
        for columns in spec.key_blocks(rows, k.shape[0], 2 * size):
            scores, _ = _scores(products, queries, rows, columns, spec)
            previous, highest = highest, torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights = scores.sub_(highest).exp_()  # [b, n, rows, columns]
            shrink = previous.sub_(highest).exp_()
            total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
            if spec.dropout_p:
                weights.mul_(_kept(products, weights.shape, rows, columns, spec))
            products.add_context(context.mul_(shrink), weights, columns)
        output[:, :, slice(*rows)] = context.div_(total)
        log_sums[:, :, slice(*rows)] = total.log_().add_(highest)
        tops[:, :, slice(*rows)] = highest
    return output, log_sums, tops


def _backward(q, k, v, output, log_sums, upstream, spec: Spec):
    """Algorithm 2, the loop over queries outside. output and upstream [b, n, s, d] -> gradients of q, k and v.

    In half precision the gradients of a row's scores are held until their sum is known: see blocks.py.
    """
    products, size = BlockProducts(q, k, v, spec.scale), _block(k)
    # What a row's softmax takes off the gradients of its weights: their mean, and so the output times its gradient.
    means = (upstream.to(products.dtype) * output).sum(-1, keepdim=True)  # [b, n, s, 1]
    dq = torch.empty_like(q).permute(1, 2, 0, 3)  # [b, n, s, d]
    dk, dv = products.key_and_value_sums()
    for rows in spec.query_blocks(q.shape[0], size):
        here = slice(*rows)
        queries, pulled = products.queries(rows), products.of_values(upstream[:, :, here])
        scored, query_sum = products.for_scores(queries), products.zeros(rows, q.shape[-1])
        rest, held = products.zeros(rows, 1), []
        for number, columns in enumerate(spec.key_blocks(rows, k.shape[0], 2 * size)):
            weights, slope = _scores(products, scored, rows, columns, spec, with_slope=True)
            weights.sub_(log_sums[:, :, here]).exp_()  # [b, n, rows, columns]
            gradient = products.weight_gradients(pulled, columns)
            used = weights
            if spec.dropout_p:
                kept = _kept(products, weights.shape, rows, columns, spec)
                gradient.mul_(kept)
                used = kept.mul_(weights)
            products.add_value_gradient(dv, used, pulled, columns)
            gradient.sub_(means[:, :, here]).mul_(weights)
            if products.half:
                parts = (gradient, weights) if slope is None else (gradient, weights, slope)
                held.append((columns, *(products.hold((number, part), x) for part, x in enumerate(parts))))
                rest.add_(held[-1][1].sum(-1, keepdim=True, dtype=rest.dtype))
                continue
            if slope is not None:
                gradient.mul_(slope)
            products.add_query_and_key_gradients(query_sum, dk, gradient, queries, columns)
        for columns, gradient, weights, *slope in held:
            centre_(gradient, weights, rest)
            for factor in slope:
                gradient.mul_(factor)
            products.add_query_and_key_gradients(query_sum, dk, gradient, queries, columns)
        dq[:, :, here] = query_sum.mul_(spec.scale)
    return dq.permute(2, 0, 1, 3), unstacked(dk.mul_(spec.scale), k), unstacked(dv, v)


def _scores(products: BlockProducts, queries, rows, columns, spec: Spec, with_slope: bool = False):
    """Capped and masked scores [b, n, rows, columns], and the derivative of the cap where asked for and capped."""
    scores, slope = products.scores(queries, columns), None
    if spec.softcap is not None:
        scores.div_(spec.softcap).tanh_()
        if with_slope:
            slope = torch.mul(scores, scores, out=products.scratch("slope", scores.shape)).neg_().add_(1.0)
        scores.mul_(spec.softcap)
    # Finite, so that a row of which nothing is visible in this block makes no NaN: a later block outweighs it.
    spec.hide_(scores, rows, columns, torch.finfo(scores.dtype).min)
    return scores, slope


def _kept(products: BlockProducts, shape, rows, columns, spec: Spec) -> torch.Tensor:
    """Dropout's factors of a block: 0 or 1 / (1 - p), the same in both passes."""
    factors = products.scratch("kept", shape)
    generator = torch.Generator(factors.device)
    generator.manual_seed(hash((spec.seed, rows, columns)) % 2**63)
    return factors.bernoulli_(1.0 - spec.dropout_p, generator=generator).div_(1.0 - spec.dropout_p)
