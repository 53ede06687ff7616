"""Pages of mapped files that are in memory, given back without closing the files."""

import ctypes
import mmap
import sys
from typing import Iterable

import torch

_DONT_NEED = 4
"""MADV_DONTNEED of Linux."""


def forget_pages(tensors: Iterable[torch.Tensor]) -> bool:
    """Take the memory that mapped tensors are in out of this process; it comes back from the file when it is used.

    They must be mapped, and nothing written to them: of any other memory the contents would be lost. Returns whether it
    was done: only on Linux is this what the call means.
    """
    if not sys.platform.startswith("linux"):
        return False
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for storage in (tensor.untyped_storage() for tensor in tensors):
        start = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = storage.data_ptr() + storage.nbytes() - start
        if storage.nbytes() and advise(start, size, _DONT_NEED):
            return False
    return True
