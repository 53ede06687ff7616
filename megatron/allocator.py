"""glibc's malloc, told to keep large blocks: on a CPU a training step frees and takes the same gigabytes every time.

By default glibc gives each block above 32 MiB back to the system when it is freed, and the next step's first touch of
each page goes through the kernel again. Raised thresholds keep them; resident memory then stays at its high-water mark.
"""

import ctypes
import os
import sys
from typing import Optional

from megatron.neox_arguments.resources import count_gpus

OFF = "NEOX_DEFAULT_MALLOC"
"""Environment variable: 1 leaves malloc as it is."""
MMAP_THRESHOLD, TRIM_THRESHOLD = 1 << 30, (1 << 31) - 1
"""Bytes. mallopt takes an int, so that the second is 2 GiB less one."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""mallopt's parameters, as glibc's malloc.h numbers them."""
_OTHERS = ("jemalloc", "tcmalloc", "mimalloc", "tbbmalloc", "hoard")


_kept = False


def keep_large_blocks() -> bool:
    """Raise malloc's thresholds for this process, where that is of use; True if it was done.

    For the main of a program that computes on the CPU, before anything large is allocated. Left alone: other systems
    and C libraries (and glibc before 2.35, which allows no such threshold), processes with a GPU, and users who chose
    for themselves (NEOX_DEFAULT_MALLOC, MALLOC_*, GLIBC_TUNABLES, another allocator in LD_PRELOAD).
    """
    global _kept
    if not _is_glibc() or _user_chose() or count_gpus():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    _kept = all((mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD), mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)))
    return _kept


def note() -> Optional[str]:
    """What was changed in this process, for the log; None if nothing was."""
    if not _kept:
        return None
    return (
        f"malloc keeps freed blocks of up to {MMAP_THRESHOLD >> 30} GiB for the next step ({OFF}=1: glibc's defaults)"
    )


def _is_glibc() -> bool:
    try:
        return sys.platform.startswith("linux") and os.confstr("CS_GNU_LIBC_VERSION") is not None
    except (ValueError, OSError):  # a C library that does not know the name
        return False


def _user_chose() -> bool:
    off = os.environ.get(OFF, "0") not in ("", "0")
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(n.startswith("MALLOC_") for n in os.environ)
    return off or tuned or any(name in os.environ.get("LD_PRELOAD", "") for name in _OTHERS)
