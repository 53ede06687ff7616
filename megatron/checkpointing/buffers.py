"""Memory that tensors leave to those after them."""

import weakref
from threading import Lock
from typing import List, Sequence

import numpy as np
import torch

_LEAST = 1 << 20
"""Bytes from which it is worth the trouble; the C library keeps smaller pieces itself."""

_MOST = 1 << 29
"""Bytes kept, at most, while others are taken."""


class Buffers:
    """`empty` as torch's. Large tensors get the memory of one of the same size that nothing refers to any more.

    By default memory of a large tensor goes back to the system, and that of the next one arrives cleared, page by page:
    in a model's layers, which are all alike, that takes as long as all that is done to their weights.
    """

    def __init__(self) -> None:
        self._free: List[np.ndarray] = []
        self._lock = Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU with any contents."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if size < _LEAST:
            return torch.empty(shape, dtype=dtype)
        memory = self._take(size)
        lease = memory[:]  # the tensor and its views hold on to it, and when the last is gone, it is
        weakref.finalize(lease, self._free.append, memory).atexit = False
        return torch.from_numpy(lease).view(dtype).view(shape)

    def _take(self, size: int) -> np.ndarray:
        with self._lock:
            for number, memory in enumerate(self._free):
                if memory.nbytes == size:
                    return self._free.pop(number)
            while sum(memory.nbytes for memory in self._free) > _MOST:
                self._free.pop(0)  # the oldest
        return torch.empty(size, dtype=torch.uint8).numpy()
