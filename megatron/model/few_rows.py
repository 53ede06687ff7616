"""A linear layer applied to few rows, as generation does for each token: its time is that of reading the weight once.

Matrix libraries are made for many rows. On the CPU, other ways to the same product read the weight faster. GB/s of
weights, all linear layers of a model of 65 M parameters, two cores without AMX that read memory at 28 GB/s:

                F.linear    w @ x.t()   batch of blocks   F.linear, no oneDNN   compiled
    fp32 1 row      11          11            31                  11               28
    fp32 4 rows      5          17            17                   5               25
    bf16 1 row    9-14        8-14             9                  29               27
    bf16 4 rows  11-13          10             9                   9               22

With more rows F.linear catches up, and nothing else has been measured.
"""

from typing import Optional

import torch
import torch.nn.functional as F

MOST_ROWS = 4


def linear(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """F.linear(x [..., i], weight [o, i], bias [o]) -> [..., o] without gradient, in the fastest way for few rows."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > MOST_ROWS or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():
        product = _sums(rows, weight)
    elif weight.dtype == torch.float32:
        product = _fp32(rows, weight)
    else:
        product = F.linear(rows, weight) if len(rows) > 1 else _without_onednn(rows, weight)
    output = product.view(*x.shape[:-1], len(weight))
    return output if bias is None else output + bias


def _fp32(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[r, i] and [o, i] -> [r, o]. One product of a matrix and a vector runs on one thread, a batch of them on all."""
    blocks = torch.get_num_threads()
    if len(rows) > 1:
        return (weight @ rows.t()).t()
    if len(weight) % blocks:
        return F.linear(rows, weight)
    return torch.bmm(weight.view(blocks, -1, weight.shape[1]), rows.t().expand(blocks, -1, -1)).view(1, -1)


def _without_onednn(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """F.linear by torch's own loop, in fp32 as well. The public switch would set, and warn of, other things too."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return F.linear(rows, weight)
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _sums(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[r, i] and [o, i] -> [r, o] as sums of products in fp32, of which inductor makes one loop over the weight."""
    halves = 2 if len(weight) % 2 == 0 else 1  # two outputs at a time: sums that do not wait for each other
    blocks, wide = weight.float().chunk(halves), rows.float()
    sums = torch.cat([(block * row).sum(-1) for row in wide.unbind() for block in blocks])
    return sums.view(len(rows), -1).to(rows.dtype)
