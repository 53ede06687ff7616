"""One process prepares a file, the others wait for it; every process hears of a failure."""

import os
from typing import Optional

import torch
import torch.distributed as dist

from megatron.errors import DataError


def is_distributed() -> bool:
    """More than one process may be running and they can talk."""
    return dist.is_available() and dist.is_initialized()


def is_builder(use_shared_fs: bool) -> bool:
    """This process builds shared files: rank 0, or the first rank of each host if hosts share no file system."""
    if use_shared_fs:
        return not is_distributed() or dist.get_rank() == 0
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def agree(error: Optional[DataError], what: str) -> None:
    """Wait for every process. Raises `error` here if given, and DataError elsewhere if any process has one."""
    failures = 0 if error is None else 1
    if is_distributed():
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
        flag = torch.tensor([failures], device=device)
        dist.all_reduce(flag)
        failures = int(flag.item())
    if error is not None:
        raise error
    if failures:
        raise DataError(f"{what} could not be built on another rank; its message says why")


def print_rank_0(message: str) -> None:
    """Print once for the whole run."""
    if not is_distributed() or dist.get_rank() == 0:
        print(message, flush=True)
