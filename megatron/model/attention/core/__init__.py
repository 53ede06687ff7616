"""Attention kernels behind one signature: `attend` and `refusal`, see eager.py.

To add a kernel, write a module with these two functions and name it in KERNELS and AUTO_ORDER.

Time relative to flash on the CPU, by which AUTO_ORDER goes (forward and backward, 8 heads and 4 kv heads, 1 thread,
medians of interleaved runs; fp32 at head_dim 24, 64, 128 and bf16 at 24, 64; chunked passes on to flash and global
what they do faster):

    tokens              fp32 global     fp32 chunked    bf16 global   bf16 chunked
    128                 1.5  1.0  0.9   1.0  1.0  1.0   0.3  0.4      0.4  0.4
    512                 2.7  1.7  1.2   1.1  1.0  0.8   0.8  0.6      1.0  1.0
    2048                5.4  3.5  2.6   1.0  1.0  1.0   3.0  1.6      1.0  1.0
    2048, window 256    2.7  1.8  1.5   0.4  0.3  0.3   1.6  0.9      0.5  0.4
    1 after 511 cached  0.5  0.6  0.5   0.6  0.5  0.5   0.5  0.4      0.5  0.4

Not measured on CUDA: flash first there, because it is one fused kernel; chunked and global are many.
"""

import functools
from types import ModuleType

import torch

from megatron.errors import BackendError
from megatron.initialize import print_rank_0
from megatron.model.attention.core import chunked, eager, flash
from megatron.model.attention.core.request import AttentionRequest

KERNELS = {"global": eager, "flash": flash, "chunked": chunked}
"""By the names of attention_config."""

AUTO_ORDER = {"cpu": ("chunked", "flash", "global"), "cuda": ("flash", "chunked", "global")}
"""By device: attention_config=auto takes the first of these that can run the layer."""


def select_kernel(kind: str, request: AttentionRequest) -> ModuleType:
    """The kernel that attention_config asks for. An explicit choice never falls back; auto says what it took, once.

    Raises BackendError saying why the kernel cannot run this layer and what to use instead.
    """
    if kind == "auto":
        return _fastest(request)
    if kind not in KERNELS:
        raise BackendError(f"attention_config={kind} is not built; choose one of {', '.join(KERNELS)} or auto")
    reason = KERNELS[kind].refusal(request)
    if reason is not None:
        able = [name for name in _order(request) if KERNELS[name].refusal(request) is None]
        raise BackendError(
            f"attention_config={kind} cannot run {request.what}: {reason}; or use attention_config={' or '.join(able)}"
        )
    return KERNELS[kind]


def _order(request: AttentionRequest):
    return AUTO_ORDER.get(torch.device(request.device).type, AUTO_ORDER["cuda"])


def _fastest(request: AttentionRequest) -> ModuleType:
    passed_over = []
    for name in _order(request):
        reason = KERNELS[name].refusal(request)
        if reason is None:
            break
        passed_over.append(f"not {name}: {reason}")
    device, dtype = torch.device(request.device).type, str(request.dtype).removeprefix("torch.")
    because = "; ".join(passed_over) or f"the fastest on {device}"
    _say_once(f"> attention kernel: {name} (attention_config=auto, {device}, {dtype}; {because})")
    return KERNELS[name]


@functools.cache
def _say_once(message: str) -> None:
    print_rank_0(message)


__all__ = ["AUTO_ORDER", "KERNELS", "AttentionRequest", "select_kernel"]
