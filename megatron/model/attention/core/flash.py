"""The "flash" kernel: torch's flash SDPA (CPU and CUDA), or the flash_attn package on CUDA where installed.

A kernel is forced, never suggested: SDPA may not fall back to its math path behind the user's back.
Unlike the package (2.1 and later), SDPA's `is_causal` is aligned to the top left corner, so with a cache (s < t)
the causal rule must be given in another way: see `_sdpa`.

In half precision torch's backward pass on the CPU has what blocks.py says of rounded outputs: under an attention sink
gradients of q and k are off, at a score of 11 on the first of 300 to 1100 tokens by 4 to 17 %. The chunked kernel's are
right there.
"""

import functools
from contextlib import nullcontext
from typing import Any, Dict, Optional

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron import mpu
from megatron.errors import BackendError
from megatron.model.attention.core import flash_package
from megatron.model.attention.core.masks import first_visible_key, hidden_keys
from megatron.model.attention.core.request import AttentionRequest

CUDA_MAX_HEAD_DIM = 256
"""Limit of flash-attn 2 and of the same kernels inside torch; their head sizes are multiples of 8."""
HEAD_DIM_MULTIPLE = 8
INSTALL = "; the flash-attn package (2.6 or newer, with its CUDA library) has one, on a GPU"
_PRECISION = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bfloat16"}


def refusal(request: AttentionRequest) -> Optional[str]:
    """Why this kernel cannot run the layer, with the setting to change; None if it can."""
    if request.score_bias:
        return f"{request.score_bias} adds a bias to the scores, which the flash kernel does not take"
    if flash_package.is_usable(request.device, request.dtype):
        return _too_wide(request) or _package_refusal(request)
    if request.softcap is not None:
        return f"attn_logit_softcap={request.softcap}: torch's flash kernel has no soft cap{INSTALL}"
    if torch.device(request.device).type == "cuda":
        return _cuda_refusal(request)
    if request.dropout_p > 0:
        return f"attention_dropout={request.dropout_p}: torch's flash kernel for CPU has no dropout"
    return None


def _package_refusal(request: AttentionRequest) -> Optional[str]:
    if request.softcap is None or request.dropout_p == 0:
        return None
    return (
        f"attn_logit_softcap={request.softcap} with attention_dropout={request.dropout_p}: flash-attn has no dropout "
        "under a soft cap"
    )


def _cuda_refusal(request: AttentionRequest) -> Optional[str]:
    if request.dtype not in (torch.float16, torch.bfloat16):
        name = _PRECISION.get(request.dtype, request.dtype)
        return f"precision={name}: flash kernels on CUDA run in fp16 and bfloat16"
    if request.window is not None:
        return f"sliding_window_width={request.window}: torch's flash kernel for CUDA has no window{INSTALL}"
    return _too_wide(request)


def _too_wide(request: AttentionRequest) -> Optional[str]:
    if request.geometry.head_dim <= CUDA_MAX_HEAD_DIM:
        return None
    return f"head_dim={request.geometry.head_dim}: flash kernels on CUDA go up to {CUDA_MAX_HEAD_DIM}"


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
    """As eager.attend. The kernel sums scores in fp32, so softmax_in_fp32 and score_divisor change nothing.

    Raises BackendError for a bias, and for dropout on the CPU and a soft cap where flash-attn is not usable.
    """
    dropout_p = dropout_p if training else 0.0
    if bias is not None:
        raise BackendError("attention_config=flash takes no score bias; use attention_config=global")
    packaged = flash_package.is_usable(q.device, q.dtype)
    if not packaged and softcap is not None:
        raise BackendError(
            f"attn_logit_softcap={softcap}: torch's flash kernel has no soft cap; use attention_config=chunked"
        )
    if not packaged and dropout_p and q.device.type != "cuda":
        raise BackendError(
            f"attention_dropout={dropout_p}: the flash kernel for CPU has no dropout; use attention_config=chunked"
        )
    width = q.shape[-1]
    start = first_visible_key(causal_offset, window)
    k, v, causal_offset = k[start:], v[start:], causal_offset - start
    if k.shape[2] != v.shape[2]:
        v = v.repeat_interleave(k.shape[2] // v.shape[2], dim=2)
    q, k, v = (_pad_head_dim(x.transpose(0, 1)) for x in (q, k, v))  # [b, s or t, heads, d rounded up]
    kernel = functools.partial(flash_package.attend, softcap=softcap) if packaged else _sdpa
    with mpu.get_cuda_rng_tracker().fork() if dropout_p else nullcontext():
        context = kernel(q, k, v, scale=scale, causal_offset=causal_offset, window=window, dropout_p=dropout_p)
    return context[..., :width].transpose(0, 1)  # [s, b, n, d]


def _pad_head_dim(x: torch.Tensor) -> torch.Tensor:
    """Zeros in q and k add nothing to a score, and zeros in v only make columns that are cut off again."""
    return F.pad(x, (0, -x.shape[-1] % HEAD_DIM_MULTIPLE))


def _sdpa(q, k, v, *, scale, causal_offset, window, dropout_p):
    """torch's kernel. q [b, s, n, d], k and v [b, t, m, d] -> [b, s, n, d]."""
    query_tokens = q.shape[1]
    if causal_offset and query_tokens > 1 and not _takes_masks(q.device):
        # Stand-in queries for the cached tokens make the top left corner the right one.
        q, causal_offset = F.pad(q, (0, 0, 0, 0, causal_offset, 0)), 0
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, heads, s or t, d]
    causal = _causal(q.shape[2], k.shape[2], causal_offset, window, q.device)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        context = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **causal
        )
    return context.transpose(1, 2)[:, -query_tokens:]


def _takes_masks(device: torch.device) -> bool:
    """Whether torch's flash kernel takes a mask: the CPU one does, the CUDA one only knows is_causal."""
    return device.type != "cuda"


def _causal(query_tokens, key_tokens, causal_offset, window, device) -> Dict[str, Any]:
    """How to tell SDPA which keys are visible: nothing at all, its own causal rule, or a mask."""
    effective_window = None if window is None or key_tokens - 1 <= window else window
    if effective_window is None and causal_offset == 0 and query_tokens == key_tokens:
        return {"is_causal": True}
    hidden = hidden_keys(query_tokens, key_tokens, causal_offset, effective_window, device)
    return {} if hidden is None else {"attn_mask": ~hidden}
