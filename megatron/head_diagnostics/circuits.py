"""The two matrices that a head is made of, seen from the residual stream (Elhage et al. 2021, A Mathematical Framework
for Transformer Circuits): which tokens it looks for, W_q^T W_k, and what it moves, W_o W_v. Both [h, h], of rank d at
most. Norms and rotations inside the layer are left out."""

from typing import Dict

import torch

from megatron.head_diagnostics.ranks import effective_rank, product_singular_values


def circuit_spectra(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output_weight: torch.Tensor
) -> Dict[str, torch.Tensor]:
    """Singular values of each query head's circuits, {"qk": [n, d], "ov": [n, d]}, largest first (fewer where h < d).

    q [n, d, h], k and v [m, d, h]: rows of the QKV weight by head; output_weight [h, n·d].
    """
    heads, width = q.shape[:2]
    k, v = (x.repeat_interleave(heads // x.shape[0], dim=0) for x in (k, v))
    out = output_weight.unflatten(-1, (heads, width)).transpose(0, 1)  # [n, h, d]
    return {"qk": product_singular_values(q.mT, k), "ov": product_singular_values(out, v)}


def circuit_figures(spectra: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """{"qk_rank", "ov_rank"}: effective ranks, {"qk_norm", "ov_norm"}: largest singular values; [n] each."""
    figures = {}
    for name, values in spectra.items():
        figures[f"{name}_rank"] = effective_rank(values)
        figures[f"{name}_norm"] = values[..., 0]
    return figures
