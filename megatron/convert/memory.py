"""Memory that was freed goes back to the system."""

import ctypes
import sys
from functools import cache
from typing import Callable


def give_back() -> None:
    """Call between layers. Tensors under 32 MiB come from the C library's pools, of which each thread has its own.

    One layer is made in one thread and freed in another, while the next is being made. Depending on which is first,
    glibc fills the holes or takes new memory, up to 50 MiB a layer where this was measured. It has none to give back
    on other systems, where this does nothing.
    """
    _trim()(0)


@cache
def _trim() -> Callable[[int], int]:
    if not sys.platform.startswith("linux"):
        return lambda _: 0
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # glibc's; musl has no such function
