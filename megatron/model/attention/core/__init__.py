"""Attention kernels behind one signature: `attend` and `refusal`, see eager.py.

To add a kernel, write a module with these two functions and name it in KERNELS.
"""

from types import ModuleType

from megatron.errors import BackendError
from megatron.model.attention.core import eager, flash
from megatron.model.attention.core.request import AttentionRequest

KERNELS = {"global": eager, "flash": flash}
"""By the names of attention_config."""

AUTO_ORDER = ("flash", "global")
"""attention_config=auto takes the first of these that can run the layer."""


def select_kernel(kind: str, request: AttentionRequest) -> ModuleType:
    """The kernel that attention_config asks for. An explicit choice never falls back.

    Raises BackendError saying why the kernel cannot run this layer and what to use instead.
    """
    if kind == "auto":
        return next(KERNELS[name] for name in AUTO_ORDER if KERNELS[name].refusal(request) is None)
    if kind not in KERNELS:
        raise BackendError(f"attention_config={kind} is not built; choose one of {', '.join(KERNELS)}")
    reason = KERNELS[kind].refusal(request)
    if reason is not None:
        raise BackendError(f"attention_config={kind} cannot run this model: {reason}; or use attention_config=global")
    return KERNELS[kind]


__all__ = ["AUTO_ORDER", "KERNELS", "AttentionRequest", "select_kernel"]
