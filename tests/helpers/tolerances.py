"""The one table of tolerances. Largest absolute difference allowed, at values of order one to ten."""

import torch

FORWARD = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Activations, logits, losses."""

GRADIENT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-1}
"""Gradients of parameters and inputs."""

LOSS = 1e-5
"""fp32 loss of one step."""

TRAJECTORY = 1e-4
"""fp32 loss after tens of optimizer steps at another parallel layout: sums run in another order."""


def assert_close(actual, expected, table=FORWARD, what=""):
    """Compare two tensors with the tolerance of the coarser of their dtypes."""
    atol = max(table[actual.dtype], table[expected.dtype])
    difference = (actual.double() - expected.double()).abs().max().item() if actual.numel() else 0.0
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    assert difference <= atol, f"{what}: largest difference {difference:.3g} > {atol:g}"
