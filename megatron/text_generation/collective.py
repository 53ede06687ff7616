"""One rank reads or decides, all ranks know: prompts, their errors and the chosen tokens."""

import threading
from typing import Any, Callable

import torch.distributed as dist

from megatron.errors import NeoXError


def is_rank_0() -> bool:
    """True on the one rank that talks to the user and writes files."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_rank_0(function: Callable[[], Any]) -> Any:
    """Call function() on rank 0 and return its (picklable) result on every rank.

    A NeoXError raised by it is raised on every rank, so that no rank waits for one that has stopped.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    message = [None, None]
    if dist.get_rank() == 0:
        try:
            message[0] = function()
        except NeoXError as error:
            message[1] = error
    dist.broadcast_object_list(message, src=0)
    if message[1] is not None:
        raise message[1]
    return message[0]


def from_rank_0_when_ready(function: Callable[[], Any], interval: float = 60.0) -> Any:
    """`from_rank_0` for a function that may wait for a person longer than a collective operation may take.

    The other ranks hear from rank 0 every `interval` seconds, so none runs into the process group's timeout.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    answer = _InBackground(function) if dist.get_rank() == 0 else None
    while not from_rank_0(lambda: answer.wait(interval)):
        pass
    return from_rank_0(lambda: answer.result())


class _InBackground:
    """Runs a function in a thread of its own and keeps its result or error."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self._error = self._value = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # handed to the thread that asks for the result
            self._error = error

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value
