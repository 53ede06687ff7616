"""How a tool ends that is told to."""

import signal
import sys
import threading
from contextlib import contextmanager
from typing import Iterator


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM raises SystemExit inside, so that what was begun is ended and removed, as after an error.

    Does nothing outside the main thread, where signals cannot be handled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
