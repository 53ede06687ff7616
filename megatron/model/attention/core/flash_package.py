"""The flash_attn package (FlashAttention 2), the only file that imports it. CUDA only."""

import functools
import inspect
from typing import Callable, Optional

import torch


@functools.cache
def _flash_attn_func() -> Optional[Callable]:
    """The package's function, or None where its CUDA or ROCm library is absent or built for another torch.

    Counts as absent: a release before 2.6, which has no soft cap, and the Triton kernels for AMD, which (in 2.8.3) take
    a window and a soft cap and compute without them, and drop the same probabilities in each step.
    """
    try:
        from flash_attn import flash_attn_interface as package
    except ImportError:
        return None
    if getattr(package, "USE_TRITON_ROCM", False):
        return None
    return package.flash_attn_func if "softcap" in inspect.signature(package.flash_attn_func).parameters else None


def is_usable(device, dtype) -> bool:
    """Whether the package is installed and runs on this device and dtype."""
    if torch.device(device).type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return _flash_attn_func() is not None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal_offset: int,
    window: Optional[int] = None,
    softcap: Optional[float] = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q [b, s, n, d], k and v [b, t, m, d] -> [b, s, n, d].

    The package aligns its causal rule to the bottom right corner (since 2.1), so causal_offset = t - s needs nothing.
    Its window counts the tokens before the query, as GPT-NeoX's does. 0.0 is no soft cap.
    """
    return _flash_attn_func()(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window, 0),
        softcap=0.0 if softcap is None else softcap,
    )
