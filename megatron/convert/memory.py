"""What the C library does with memory that was freed."""

import ctypes
import sys
from functools import cache
from typing import Any, Optional

_ARENAS, _TRIM_THRESHOLD, _MOST_MAPPED = -8, -1, -4
"""Of <malloc.h>: M_ARENA_MAX, M_TRIM_THRESHOLD, M_MMAP_MAX."""

_kept = False


def keep_freed_memory() -> None:
    """Call once, when a program that converts starts: tensors then take the memory of those before them.

    By default memory of a large tensor is given back to the system, and what is asked for next arrives page by page
    and cleared, which takes longer than anything else that is done to a weight. It holds for the whole process, so no
    library should call this. It does nothing on systems without glibc.
    """
    global _kept
    if _glibc() is not None:
        _kept = all(
            [
                _glibc().mallopt(_ARENAS, 1),
                _glibc().mallopt(_MOST_MAPPED, 0),
                _glibc().mallopt(_TRIM_THRESHOLD, 2**31 - 1),
            ]
        )


def give_back() -> None:
    """Call between layers, so that what they leave does not add up. Nothing to do after `keep_freed_memory`.

    Tensors under 32 MiB come from the C library's pools, of which each thread has its own. One layer is made in one
    thread and freed in another, while the next is being made. Depending on which is first, glibc fills the holes or
    takes new memory, up to 50 MiB a layer where this was measured.
    """
    if _glibc() is not None and not _kept:
        _glibc().malloc_trim(0)


@cache
def _glibc() -> Optional[Any]:
    """None on other systems, or with another C library, such as musl."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
