"""torch's flash kernel for the CPU, block of queries by block of queries, with the log-sum-exp of each row.

`scaled_dot_product_attention` hides the log-sum-exp, which the backward pass of the chunked kernel needs, and makes a
mask [s, t] for a window or a cache; these functions make one for MASKED_ROWS queries at a time.
"""

from typing import Tuple

import torch

from megatron.model.attention.core.spec import Spec

MASKED_ROWS = 512
OWN_BACKWARD_WIDTH = 128
"""From this head_dim on, the chunked kernel's backward pass in fp32 is faster than torch's (0.8 to 1.0 of its time)."""


def can(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> bool:
    """Whether this kernel runs the forward pass."""
    return q.device.type == "cpu" and spec.softcap is None and not spec.dropout_p and k.shape[2] == v.shape[2]


def can_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> bool:
    """Whether its backward pass does too, and faster than the chunked kernel's.

    Not in half precision, in which it has the error that blocks.py tells of.
    """
    whole = q.dtype not in (torch.float16, torch.bfloat16)
    return whole and can(q, k, v, spec) and spec.is_plain(k.shape[0]) and q.shape[-1] < OWN_BACKWARD_WIDTH


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> Tuple[torch.Tensor, torch.Tensor]:
    """q [s, b, n, d], k and v [t, b, m, d] -> output [b, n, s, d] and log-sum-exp [b, n, s, 1]."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query_tokens, key_tokens = q.shape[0], k.shape[0]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, heads, s or t, d]
    if spec.is_plain(key_tokens):
        output, log_sums = kernel(q, k, v, 0.0, True, scale=spec.scale)
        return output, log_sums.unsqueeze(-1)
    parts = []
    for rows in spec.query_blocks(query_tokens, MASKED_ROWS):
        columns = spec.visible(rows, key_tokens)
        hidden = spec.hidden(rows, columns, q.device)
        mask = None if hidden is None else q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        keys, values = (x[:, :, slice(*columns)] for x in (k, v))
        parts.append(kernel(q[:, :, slice(*rows)], keys, values, scale=spec.scale, attn_mask=mask))
    output, log_sums = (torch.cat(x, dim=2) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
    return output, log_sums.unsqueeze(-1)


def backward(q, k, v, output, log_sums, upstream, spec: Spec):
    """For what can_backward allows; output and upstream [b, n, s, d] -> gradients of q, k and v in their layouts."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    gradients = kernel(upstream, q, k, v, output, log_sums.squeeze(-1), 0.0, True, scale=spec.scale)
    return tuple(x.permute(2, 0, 1, 3) for x in gradients)
