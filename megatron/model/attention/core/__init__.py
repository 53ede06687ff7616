"""Attention kernels behind one signature: `attend` and `refusal`, see eager.py.

To add a kernel, write a module with these two functions and name it in KERNELS.
"""

from types import ModuleType

import torch

from megatron.errors import BackendError
from megatron.geometry import HeadGeometry
from megatron.model.attention.core import eager, flash

KERNELS = {"global": eager, "flash": flash}
"""By the names of attention_config."""


def select_kernel(kind: str, geometry: HeadGeometry, dtype: torch.dtype, device: torch.device, neox_args) -> ModuleType:
    """The kernel that attention_config asks for. An explicit choice never falls back.

    Raises BackendError saying why the kernel cannot run this layer and what to use instead.
    """
    if kind not in KERNELS:
        raise BackendError(f"attention_config={kind} is not built; choose one of {', '.join(KERNELS)}")
    reason = KERNELS[kind].refusal(geometry, dtype, device, neox_args)
    if reason is not None:
        raise BackendError(f"attention_config={kind} cannot run this model: {reason}; or use attention_config=global")
    return KERNELS[kind]
