"""What GPT-NeoX needs to run on a machine without a GPU, put in place without touching a line of it.

For a program that runs in a process of its own, before anything of GPT-NeoX is imported:

    import shims
    shims.install()                  # torch.cuda answers with the CPU, missing packages are stubs
    shims.use_checkout(folder)       # its `megatron` is the one that is imported
    shims.start_ranks(store_file)    # gloo over a file; RANK and WORLD_SIZE from the environment

This file imports nothing of this project: a process can hold one package `megatron` only.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import types

CPU_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

STUBS = ("lm_dataformat", "boto3", "hf_transfer", "ftfy", "wandb", "best_download", "zstandard", "jsonlines")
"""Packages that GPT-NeoX imports and that no test here uses. Installed ones are left alone."""


def install():
    """Make torch, DeepSpeed and the imports of GPT-NeoX work on a CPU."""
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(tempfile.gettempdir(), f"extensions_{os.getpid()}"))
    _stub_packages()
    _cuda_is_cpu()
    _deepspeed_without_kernels()


def use_checkout(folder):
    """Import GPT-NeoX's packages from `folder` and nothing of this project. Raises ValueError if it is too late."""
    if "megatron" in sys.modules:
        raise ValueError("megatron is imported already")
    here = os.path.dirname(os.path.abspath(__file__))
    project = os.path.dirname(os.path.dirname(here))
    sys.path[:] = [str(folder)] + [path for path in sys.path if os.path.abspath(path or ".") not in (here, project)]
    importlib.invalidate_caches()


def start_ranks(store_file):
    """torch.distributed over gloo and a file store: no address, no port."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.distributed.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=world_size)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    return rank, world_size


def _stub_packages():
    for name in STUBS:
        if importlib.util.find_spec(name) is None:
            _module(name)
    if importlib.util.find_spec("pkg_resources") is None:  # setuptools dropped it
        import packaging
        import packaging.version  # noqa: F401

        _module("pkg_resources", packaging=packaging)
    if "lm_dataformat" in sys.modules:
        sys.modules["lm_dataformat"].Reader = object


def _module(name, **attributes):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


def _cuda_is_cpu():
    import torch

    cpu = torch.device("cpu")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    functions = dict(
        current_device=lambda: cpu,
        device_count=lambda: world_size,
        set_device=_always(None),
        synchronize=_always(None),
        empty_cache=_always(None),
        memory_allocated=_always(0),
        max_memory_allocated=_always(0),
        memory_reserved=_always(0),
        max_memory_reserved=_always(0),
        reset_peak_memory_stats=_always(None),
        get_rng_state=lambda *device: torch.get_rng_state(),
        set_rng_state=_always(None),
        manual_seed=_always(None),
        LongTensor=torch.LongTensor,
        FloatTensor=torch.FloatTensor,
        ByteTensor=torch.ByteTensor,
        HalfTensor=torch.HalfTensor,
        IntTensor=torch.IntTensor,
    )
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = lambda self, *args, **kwargs: self
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = _always(None), _always(None)


def _deepspeed_without_kernels():
    import deepspeed
    import deepspeed.ops
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at start, under a lock file
    with contextlib.suppress(ImportError):
        import deepspeed.comm.torch

        deepspeed.comm.torch.build_shm_op = lambda: None

    class FusedAdam(torch.optim.AdamW):
        """AdamW's sums, which the fused kernel does too."""

        def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **unused):
            super().__init__(params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)

    import deepspeed.ops.adam

    deepspeed.ops.adam.FusedAdam = FusedAdam


def _always(value):
    """A new function for each name: torch.compile keeps a table of them, and refuses one under two names."""
    return lambda *args, **kwargs: value
