"""A folder that appears complete, or not at all."""

import os
import shutil
from contextlib import contextmanager
from typing import Iterator

from megatron.checkpointing.folders import sync_folder
from megatron.errors import ConversionError

UNFINISHED = ".unfinished"
"""At the end of the name of a folder that is being written, or whose writing was killed."""


@contextmanager
def new_folder(out: str) -> Iterator[str]:
    """`out` under a temporary name beside it, renamed on leaving; gone again after an error.

    What a killed run left under the temporary name is removed first. Raises ConversionError if `out` is there already
    and not an empty folder, or cannot be made.
    """
    target = os.path.abspath(out)
    check_new(target)
    unfinished = target + UNFINISHED
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
    except OSError as error:
        raise ConversionError(f"{out} cannot be made: {error}") from None
    try:
        yield unfinished
        sync_folder(unfinished)
        os.rename(unfinished, target)  # takes the place of an empty folder
        sync_folder(os.path.dirname(target))
    except OSError as error:
        raise ConversionError(f"{out} cannot be written: {error}; nothing of it was kept") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_new(out: str) -> None:
    """Raises ConversionError if there is something under that name; nothing is overwritten."""
    if os.path.isdir(out) and not os.listdir(out):
        return
    if os.path.lexists(out):
        raise ConversionError(f"{out} is there already; name a new folder, nothing is overwritten")
