"""log_dir: everything printed is kept in a file as well."""

import os
import socket
import sys
from contextlib import contextmanager


class Tee:
    """Writes to a stream and to a file; in all else it is the stream."""

    def __init__(self, stream, file):
        self._stream = stream
        self._file = file

    def write(self, text: str) -> int:
        """Write to both; the file is flushed at each line, so that it survives a kill."""
        self._file.write(text)
        if "\n" in text:
            self._file.flush()
        return self._stream.write(text)

    def file_only(self, text: str) -> None:
        """What the terminal shows in another form, such as a progress bar."""
        self._file.write(text)
        self._file.flush()

    @property
    def terminal(self):
        """The stream without the file."""
        return self._stream

    def __getattr__(self, name):
        return getattr(self._stream, name)


@contextmanager
def tee_output(log_dir: str | None, rank: int = 0):
    """While active, stdout and stderr of this process are also appended to files in `log_dir`.

    The files are <host>_rank<rank>_stdout.txt and ..._stderr.txt. Without log_dir nothing changes.
    """
    if not log_dir:
        yield
        return
    os.makedirs(log_dir, exist_ok=True)
    prefix = os.path.join(log_dir, f"{socket.gethostname()}_rank{rank}")
    before = sys.stdout, sys.stderr
    with (
        open(f"{prefix}_stdout.txt", "a", encoding="utf-8") as out,
        open(f"{prefix}_stderr.txt", "a", encoding="utf-8") as err,
    ):
        sys.stdout, sys.stderr = Tee(sys.stdout, out), Tee(sys.stderr, err)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
