"""A layer's projections, and their gradients, cut into heads: this rank's, whatever the row order and the sharding; for
each group of heads of one width.
"""

from typing import Callable, List, Tuple

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

from megatron.errors import NeoXError
from megatron.geometry import HeadGeometry
from megatron.model.attention import ParallelSelfAttention
from megatron.model.attention.kv_replicas import own_heads

HeadMatrices = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""q [n, d, h], k and v [m, d, h], and the output projection [h, n·d]."""


def head_weights(attention: ParallelSelfAttention) -> List[HeadMatrices]:
    """The weights. All ranks that share a parameter (ZeRO 3) or a key/value head call it together."""
    return _cut(attention, _whole)


def head_gradients(attention: ParallelSelfAttention) -> List[HeadMatrices]:
    """The gradients, between a backward pass and the update. Raises NeoXError where there is none."""
    return _cut(attention, _gradient)


def _cut(attention: ParallelSelfAttention, of: Callable) -> List[HeadMatrices]:
    rows = of(attention.query_key_value.weight).detach().mT.unsqueeze(1)  # as activations: [h, 1, rows]
    columns = (
        of(attention.dense.weight)
        .detach()
        .split(  # [h, n·d]
            [group.query_hidden_size for group in attention.partition.groups], dim=-1
        )
    )
    parts = zip(rows.split(attention.rows_of_groups(), dim=-1), attention.geometry.groups, columns, strict=True)
    return [_matrices(*part) for part in parts]


def _matrices(rows: torch.Tensor, group: HeadGeometry, columns: torch.Tensor) -> HeadMatrices:
    q, k, v = (x.squeeze(1).permute(1, 2, 0) for x in own_heads(rows, group))
    return q, k, v, columns


def _whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    return safe_get_full_fp32_param(parameter) if hasattr(parameter, "ds_id") else parameter


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad if parameter.grad is not None else safe_get_full_grad(parameter)
    if gradient is None:
        raise NeoXError("there are no gradients: head diagnostics look at them after a backward pass")
    return gradient
