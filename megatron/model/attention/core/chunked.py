"""The "chunked" kernel: attention block by block in plain torch, on any device, in any dtype, at any head_dim.

FlashAttention-2 (Dao 2023, arXiv:2307.08691, algorithms 1 and 2): the forward pass keeps a running softmax over blocks
of keys and saves q, k, v, the output and the log-sum-exp of each row; the backward pass computes the scores of each
block again. Memory grows with the number of tokens, not with its square. There is no double backward.

On the CPU the forward pass is torch's own flash kernel where that can run the layer (no soft cap, no dropout); its
backward pass is the slower part of that kernel and is done here. Scores and running sums are fp32 at least.
"""

from dataclasses import dataclass
from typing import Iterator, List, Optional

import torch
from torch.autograd.function import once_differentiable

from megatron import mpu
from megatron.errors import BackendError
from megatron.model.attention.core.blocks import BlockProducts, Range
from megatron.model.attention.core.masks import hidden_keys, visible_keys
from megatron.model.attention.core.request import AttentionRequest

BLOCK = {"cpu": 128, "cuda": 512}
"""Queries and keys of a block by device. On the CPU measured: 64, 256 and 512 are not faster. On CUDA not measured."""
MASKED_ROWS = 512
"""Queries for which torch's CPU kernel is called at once where it needs a mask, [rows, t]."""


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
    """As eager.attend. Scores and softmax are fp32, so softmax_in_fp32 and score_divisor change nothing.

    Raises BackendError for a bias.
    """
    if bias is not None:
        raise BackendError("attention_config=chunked takes no score bias; use attention_config=global")
    dropout_p = dropout_p if training else 0.0
    seed = _draw_seed(q.device) if dropout_p else 0
    function = _Function(scale, causal_offset, window, softcap, dropout_p, seed)
    return _Blockwise.apply(q, k, v, function)


@dataclass(frozen=True)
class _Function:
    """What is computed, beside the tensors."""

    scale: float
    offset: int
    window: Optional[int]
    softcap: Optional[float]
    dropout_p: float
    seed: int

    def query_blocks(self, query_tokens: int, size: int) -> Iterator[Range]:
        """All queries."""
        for first in range(0, query_tokens, size):
            yield first, min(first + size, query_tokens)

    def visible(self, rows: Range, key_tokens: int) -> Range:
        """The keys that any of the queries sees."""
        return visible_keys(rows[1] - rows[0], key_tokens, rows[0] + self.offset, self.window)

    def key_blocks(self, rows: Range, key_tokens: int, size: int) -> List[Range]:
        """Those keys in blocks, the same in both passes, because dropout goes by them."""
        first, end = self.visible(rows, key_tokens)
        return [(start, min(start + size, end)) for start in range(first, end, size)]

    def hidden(self, rows: Range, columns: Range, device) -> Optional[torch.Tensor]:
        """Boolean [rows, columns], True where a query may not see a key; None where all see all."""
        shift = rows[0] + self.offset - columns[0]
        return hidden_keys(rows[1] - rows[0], columns[1] - columns[0], shift, self.window, device)


def _draw_seed(device: torch.device) -> int:
    """Of this layer's dropout masks. Each model-parallel rank holds other heads, so each must draw another one.

    Drawn where the activations are, for activation checkpointing to draw it again; on CUDA this waits for the device.
    """
    with mpu.get_cuda_rng_tracker().fork():
        return int(torch.randint(2**62, (), device=device))


class _Blockwise(torch.autograd.Function):
    """q [s, b, n, d], k [t, b, m', d], v [t, b, m, d] -> [s, b, n, d]."""

    @staticmethod
    def forward(ctx, q, k, v, function):
        torch_kernel = _torch_kernel_can(q, k, v, function)
        output, log_sums = (_forward_of_torch if torch_kernel else _forward)(q, k, v, function)
        ctx.save_for_backward(q, k, v, output, log_sums)
        ctx.function = function
        return output.permute(2, 0, 1, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        return (*_backward(*ctx.saved_tensors, upstream.permute(1, 2, 0, 3), ctx.function), None)


def _size(device: torch.device) -> int:
    return BLOCK.get(device.type, BLOCK["cuda"])


def _forward(q, k, v, function: _Function):
    """Algorithm 1. Returns the output [b, n, s, d] and the log-sum-exp of each row of scores [b, n, s, 1]."""
    products, size = BlockProducts(q, k, v), _size(q.device)
    output = torch.empty_like(q).permute(1, 2, 0, 3)  # [b, n, s, d]
    log_sums = products.zeros((0, q.shape[0]), 1)
    for rows in function.query_blocks(q.shape[0], size):
        queries, context = products.queries(rows), products.zeros(rows, q.shape[-1])
        total = products.zeros(rows, 1)
        highest = torch.full_like(total, torch.finfo(total.dtype).min)
        for columns in function.key_blocks(rows, k.shape[0], size):
            scores, _ = _scores(products, queries, rows, columns, function)
            previous, highest = highest, torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights = scores.sub_(highest).exp_()  # [b, n, rows, columns]
            shrink = previous.sub_(highest).exp_()
            total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
            if function.dropout_p:
                weights.mul_(_kept(products, weights.shape, rows, columns, function))
            products.add_context(context.mul_(shrink), weights, columns)
        output[:, :, slice(*rows)] = context.div_(total)
        log_sums[:, :, slice(*rows)] = total.log_().add_(highest)
    return output, log_sums


def _backward(q, k, v, output, log_sums, upstream, function: _Function):
    """Algorithm 2, the loop over queries outside. output and upstream [b, n, s, d] -> gradients of q, k and v."""
    products, size = BlockProducts(q, k, v), _size(q.device)
    # What a row's softmax takes off the gradients of its weights: their mean, and so the output times its gradient.
    means = (upstream * output).sum(-1, keepdim=True, dtype=products.dtype)  # [b, n, s, 1]
    dq = torch.empty_like(q).permute(1, 2, 0, 3)  # [b, n, s, d]
    dk, dv = products.key_and_value_sums()
    for rows in function.query_blocks(q.shape[0], size):
        here = slice(*rows)
        queries, pulled = products.queries(rows), products.of_values(upstream[:, :, here])
        query_sum = products.zeros(rows, q.shape[-1])
        for columns in function.key_blocks(rows, k.shape[0], size):
            weights, slope = _scores(products, queries, rows, columns, function, with_slope=True)
            weights.sub_(log_sums[:, :, here]).exp_()  # [b, n, rows, columns]
            gradient = products.weight_gradients(pulled, columns)
            used = weights
            if function.dropout_p:
                kept = _kept(products, weights.shape, rows, columns, function)
                gradient.mul_(kept)
                used = kept.mul_(weights)
            products.add_value_gradient(dv, used, pulled, columns)
            gradient.sub_(means[:, :, here]).mul_(weights)
            if slope is not None:
                gradient.mul_(slope)
            products.add_query_and_key_gradients(query_sum, dk, gradient, queries, columns)
        dq[:, :, here] = query_sum.mul_(function.scale)
    dq, dk, dv = dq.permute(2, 0, 1, 3), dk.mul_(function.scale), dv
    return dq, _unstacked(dk, k), _unstacked(dv, v)


def _unstacked(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[b·m, t, d] -> [t, b, m, d], in the dtype of `like`."""
    return x.view(like.shape[1], like.shape[2], *x.shape[1:]).permute(2, 0, 1, 3).to(like.dtype)


def _scores(products: BlockProducts, queries, rows, columns, function: _Function, with_slope: bool = False):
    """Capped and masked scores [b, n, rows, columns], and the derivative of the cap where asked for and capped."""
    scores, slope = products.scores(queries, columns, function.scale), None
    if function.softcap is not None:
        scores.div_(function.softcap).tanh_()
        if with_slope:
            slope = torch.mul(scores, scores, out=products.scratch("slope", scores.shape)).neg_().add_(1.0)
        scores.mul_(function.softcap)
    hidden = function.hidden(rows, columns, queries.device)
    if hidden is not None:
        # Finite, so that a row of which nothing is visible in this block makes no NaN: a later block outweighs it.
        scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
    return scores, slope


def _kept(products: BlockProducts, shape, rows, columns, function: _Function) -> torch.Tensor:
    """Dropout's factors of a block: 0 or 1 / (1 - p), the same in both passes."""
    factors = products.scratch("kept", shape)
    generator = torch.Generator(factors.device)
    generator.manual_seed(hash((function.seed, rows, columns)) % 2**63)
    return factors.bernoulli_(1.0 - function.dropout_p, generator=generator).div_(1.0 - function.dropout_p)


def _torch_kernel_can(q, k, v, function: _Function) -> bool:
    on_cpu = q.device.type == "cpu"
    return on_cpu and function.softcap is None and not function.dropout_p and k.shape[2] == v.shape[2]


def _forward_of_torch(q, k, v, function: _Function):
    """As _forward, by torch's flash kernel for the CPU."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query_tokens, key_tokens = q.shape[0], k.shape[0]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, heads, s or t, d]
    plain = function.offset == 0 and query_tokens == key_tokens
    if plain and (function.window is None or function.window >= key_tokens - 1):
        output, log_sums = kernel(q, k, v, 0.0, True, scale=function.scale)
        return output, log_sums.unsqueeze(-1)
    parts = []
    for rows in function.query_blocks(query_tokens, MASKED_ROWS):
        columns = function.visible(rows, key_tokens)
        hidden = function.hidden(rows, columns, q.device)
        mask = None if hidden is None else q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        keys, values = (x[:, :, slice(*columns)] for x in (k, v))
        parts.append(kernel(q[:, :, slice(*rows)], keys, values, scale=function.scale, attn_mask=mask))
    output, log_sums = (torch.cat(x, dim=2) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
    return output, log_sums.unsqueeze(-1)
