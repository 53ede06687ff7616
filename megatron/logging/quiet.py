"""DeepSpeed and torch print a page at start-up that says nothing about the run; it is held back."""

import logging
import re
import sys
import warnings
from contextlib import contextmanager

_NOISE = re.compile(
    r"Using topology:|SEED_LAYERS=|stage=\d+ layers=\d+|\s+\d+: \w+|\s+loss: \w+|Using \S+ as PyTorch extensions root"
    r"|Emitting ninja build file|Building extension module|Loading extension module|Time to load .* op"
    r"|(begin|end) bf16_ ?optimizer|(before|after) initializing group|MA [\d.]+ GB|CPU Virtual Memory:"
)
_WARNINGS = (
    r".*c10d::\w+.* an autograd kernel was not registered.*",
    r".*Plan failed with a cudnnException.*",
    r".*torch\.distributed\..* is deprecated.*",
    r".*barrier\(\): using the device under current context.*",
)
_LOGGED = ("You are using ZeRO with an untested optimizer", "BF16 gradient accumulation is not safe")
"""The first is about optimizers that this project tests under ZeRO itself. The second comes for every bf16 pipeline;
it matters for long accumulation only, and `data_types: {grad_accum_dtype: fp32}` with ZeRO 1 answers it."""


def is_verbose(neox_args) -> bool:
    """Settings that ask to see what DeepSpeed does."""
    return bool(neox_args.wall_clock_breakdown or neox_args.dump_state)


def quiet_libraries(neox_args) -> None:
    """Raise DeepSpeed's log level to warnings and drop torch warnings that users cannot act on, unless
    wall_clock_breakdown or dump_state asks for more."""
    if is_verbose(neox_args):
        return
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_is_for_users)
    for pattern in _WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)


def _is_for_users(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _LOGGED)


class _WithoutNoise:
    def __init__(self, stream):
        self._stream = stream
        self._line = ""

    def write(self, text: str) -> int:
        self._line += text
        *complete, self._line = self._line.split("\n")
        for line in complete:
            if not _NOISE.match(line):
                self._stream.write(line + "\n")
        return len(text)

    def finish(self) -> None:
        if self._line:
            self._stream.write(self._line)
            self._line = ""

    def __getattr__(self, name):
        return getattr(self._stream, name)


@contextmanager
def without_library_prints(neox_args):
    """Drop the lines that DeepSpeed prints (not logs) while it builds a model; all other output passes."""
    if is_verbose(neox_args):
        yield
        return
    before = sys.stdout
    sys.stdout = _WithoutNoise(before)
    try:
        yield
    finally:
        sys.stdout.finish()
        sys.stdout = before
