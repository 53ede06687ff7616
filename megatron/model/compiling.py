"""Compiling parts of the model with torch.compile: when, and with which settings.

On the CPU, inductor turns a chain of elementwise operations into one loop in C++, which reads and writes memory once.
The first call of a compiled function costs seconds, and inductor keeps its work on disk for the next run. inductor is
imported where it is used: that takes a second, which a run without it should not pay.
"""

import functools
from typing import Callable, Optional

import torch

from megatron import mpu
from megatron.errors import BackendError
from megatron.initialize import print_rank_0

AUTO_FROM_ITERS = 1000
"""compile=auto compiles runs of at least so many optimizer steps: fewer do not win the compilation's time back."""

_OPTIONS = {"fallback_random": True}
"""inductor's settings. fallback_random: random numbers are drawn by torch's own operators, as uncompiled."""


def wants_compile(neox_args) -> bool:
    """What `compile` says on this machine. auto: on a CPU with a C++ compiler, for a run that is long enough.

    It depends on the config and the machine only, so a resumed run computes what the first one did.
    Raises BackendError for compile=True on a CPU without a C++ compiler.
    """
    on_cpu = mpu.current_device().type == "cpu"
    if neox_args.compile == "auto":
        return on_cpu and (neox_args.train_iters or 0) >= AUTO_FROM_ITERS and has_compiler()
    if neox_args.compile and on_cpu and not has_compiler():
        raise BackendError(
            "compile=True needs a C++ compiler on the CPU, and there is none; install g++, set the environment "
            "variable CXX to one, or set compile: false"
        )
    return bool(neox_args.compile)


def compiled(function: Callable, enabled: bool, dynamic: Optional[bool] = None) -> Callable:
    """torch.compile of a function with our settings, which is announced once; the function itself if not enabled.

    dynamic: compile once for all sizes (True), or for each (False); None leaves that to torch.
    """
    if not enabled:
        return function
    _announce()
    return torch.compile(function, options=_OPTIONS, dynamic=dynamic)


@functools.cache
def has_compiler() -> bool:
    """Whether inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


@functools.cache
def _announce() -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    print_rank_0(f"> compiling the layers at the first step: 10 to 40 s, cached in {cache_dir()}")
