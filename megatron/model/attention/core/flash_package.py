"""The flash_attn package (FlashAttention 2), the only file that imports it. CUDA only."""

import functools
import inspect
from typing import Optional

import torch


@functools.cache
def _flash_attn_func():
    """The package's function, or None where it is absent, built for another torch, or older than 2.6 (no soft cap)."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None
    return flash_attn_func if "softcap" in inspect.signature(flash_attn_func).parameters else None


def is_usable(device, dtype) -> bool:
    """Whether the package is installed and runs on this device and dtype."""
    if torch.device(device).type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return _flash_attn_func() is not None


def attend(q, k, v, *, scale, causal_offset, window: Optional[int], softcap: Optional[float], dropout_p):
    """q [b, s, n, d], k and v [b, t, m, d] -> [b, s, n, d].

    The package aligns its causal rule to the bottom right corner (since 2.1), so causal_offset = t - s needs nothing.
    Its window counts the tokens before the query, as GPT-NeoX's does.
    """
    return _flash_attn_func()(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window, 0),
        softcap=softcap or 0.0,
    )
