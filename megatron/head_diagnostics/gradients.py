"""How large the gradient of each head's weights is."""

from typing import Dict

import torch


def gradient_figures(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output_weight: torch.Tensor, queries_per_kv: int
) -> Dict[str, torch.Tensor]:
    """{"gradient_norm": [n]}: L2 norm over a query head's rows of q, its columns of the output projection and, of the
    key/value head that it shares, an equal part of the squares.

    The four are gradients: q [n, d, h], k and v [m, d, h], output_weight [h, n·d]. queries_per_kv is that of the whole
    layer: ranks can have fewer of a key/value head's queries each.
    """
    heads, width = q.shape[:2]
    squares = q.float().square().sum((1, 2))
    squares = squares + output_weight.float().unflatten(-1, (heads, width)).square().sum((0, 2))
    for shared in (k, v):
        squares = squares + (shared.float().square().sum((1, 2)) / queries_per_kv).repeat_interleave(
            heads // k.shape[0]
        )
    return {"gradient_norm": squares.sqrt()}


def largest_ratio(norms: torch.Tensor) -> float:
    """Largest norm of a layer's heads by the smallest, inf if one is 0."""
    smallest = norms.min()
    return float(norms.max() / smallest) if smallest > 0 else float("inf")
