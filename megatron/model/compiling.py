"""Compiling parts of the model with torch.compile: when, and with which settings.

On the CPU, inductor turns a chain of elementwise operations into one loop in C++, which reads and writes memory once.
The first call of a compiled function costs seconds, and inductor keeps its work on disk for the next run. inductor is
imported where it is used: that takes a second, which a run without it should not pay.
"""

import functools
from typing import Callable

import torch
from torch import nn

from megatron import mpu
from megatron.errors import BackendError
from megatron.initialize import print_rank_0
from megatron.neox_arguments.support import TE_LAYERS

AUTO_FROM_ITERS = 1000
"""compile=auto compiles runs of at least so many optimizer steps: fewer do not win the compilation's time back."""

MOST_SHAPES = 128
"""A piece is compiled for each shape of its arguments, so for each width where layers differ. By itself torch gives up
after 8 and runs the rest uncompiled."""


def wants_compile(neox_args) -> bool:
    """What `compile` says on this machine. auto: on a CPU with a C++ compiler, for a run that is long enough and whose
    layers are not Transformer Engine's.

    It depends on the config and the machine only, so a resumed run computes what the first one did.
    Raises BackendError for compile=True on a CPU without a C++ compiler.
    """
    on_cpu = mpu.current_device().type == "cpu"
    if neox_args.compile == "auto":
        own_layers = not any(getattr(neox_args, name) for name in TE_LAYERS)
        is_long = (neox_args.train_iters or 0) >= AUTO_FROM_ITERS
        return on_cpu and own_layers and is_long and has_compiler()
    if neox_args.compile and on_cpu and not has_compiler():
        raise BackendError(
            "compile=True needs a C++ compiler on the CPU, and there is none; install g++, set the environment "
            "variable CXX to one, or set compile: false"
        )
    return bool(neox_args.compile)


def compile_pieces(module: nn.Module) -> None:
    """Compile what the modules inside this one name in `pieces`: their attributes that are functions of tensors, of
    elementwise operations and sums, without parameters, communication or random numbers of their own.

    So nothing that surrounds them has to know: matrix products, attention kernels, collectives, dropout, hooks.
    """
    for part in module.modules():
        for name in getattr(part, "pieces", ()):
            setattr(part, name, compiled(getattr(part, name)))


@functools.cache
def compiled(function: Callable) -> Callable:
    """The function, compiled for each kind of arguments where gradients are computed, and as it is elsewhere: lengths
    change in generation, and each would be compiled. Equal functions share the work; the first is announced."""
    _announce()
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_SHAPES)
    fast = torch.compile(function, dynamic=False)

    def run(*arguments):
        return (fast if torch.is_grad_enabled() else function)(*arguments)

    return run


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
