"""A large file being written: the disk works on what is there already, instead of on everything at the end."""

import ctypes
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, Callable, Optional

_PIECE = 1 << 17
"""Bytes of one call, as cp's: for large ones Linux looks for large pages, which took three to ten times as long where
this was measured (6.18, ext4)."""

_STEP = 1 << 25
"""Bytes written before the disk is told of them."""

_SYNC_FILE_RANGE_WRITE = 2
"""Of <fcntl.h>: begin writing, don't wait."""


class OutputFile:
    """A new file for writing; its methods raise OSError as a file's do.

    Left alone, Linux begins to write when a tenth of the memory is waiting for it, so a model of a few GB would be
    waited for at the end. Here a thread has every 32 MiB written at once. Nothing is promised by that: a file is on the
    disk after os.fsync.
    """

    def __init__(self, path: str):
        self._file = open(path, "wb")
        self._written = self._begun = 0
        self._running: Optional[Future] = None

    def write(self, contents: Any) -> int:
        """Append bytes, or anything with a buffer of them; returns their number."""
        view = memoryview(contents)
        for start in range(0, len(view), _PIECE):
            self._file.write(view[start : start + _PIECE])
        self._written += len(view)
        self._begin()
        return len(view)

    def flush(self) -> None:
        """Hand over to the system what is buffered here."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def _begin(self) -> None:
        busy = self._running is not None and not self._running.done()
        if busy or self._written - self._begun < _STEP:
            return
        descriptor = os.dup(self._file.fileno())  # the file may be closed before its turn comes
        self._running = _worker().submit(_begin_writing, descriptor, self._begun, self._written - self._begun)
        self._begun = self._written


def _begin_writing(descriptor: int, start: int, size: int) -> None:
    """Best effort: where it cannot be done, fsync does everything. What fails in it, fsync reports."""
    try:
        _sync_file_range()(descriptor, start, size, _SYNC_FILE_RANGE_WRITE)
    finally:
        os.close(descriptor)


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="write-back")


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int]:
    if not sys.platform.startswith("linux"):
        return lambda *_: 0
    function = ctypes.CDLL(None).sync_file_range
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function
