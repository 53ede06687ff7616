"""Run a function on several gloo ranks of this machine, from a tool that was started as one process."""

import math
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from typing import Any, Callable, List

from megatron.errors import NeoXError
from tools.ending import sigterm_as_exit

_GRACE = 5.0
"""Seconds that the other ranks get to report their own error, before they are ended."""

_REPORTED = 79
"""Exit code of a rank that has sent its error. Signals and the interpreter's own failures have others."""

_BY_THEMSELVES = (_REPORTED, -signal.SIGABRT)
"""How a rank may end because another did: gloo's threads abort when a connection breaks."""


def run_on_ranks(world_size: int, function: Callable, *arguments: Any) -> Any:
    """Call function(*arguments) on each rank, with torch.distributed initialised; returns rank 0's result.

    One rank is this process itself, without any process group of its own. `function` must be importable, arguments
    and result picklable. The ranks meet through a file: no address, no port.

    If anything goes wrong, the other ranks get a moment to report too, and are ended. Then NeoXError is raised if a
    rank was killed; else the first NeoXError that a rank met, else its first other error. For one rank's end makes
    others fail, with errors about their connections.
    """
    if world_size == 1:
        describe_process(0, 1)
        return function(*arguments)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        results = context.SimpleQueue()
        common = (world_size, os.path.join(folder, "store"), results, function, arguments)
        ranks = [context.Process(target=_rank_main, args=(rank, *common), daemon=True) for rank in range(world_size)]
        with sigterm_as_exit():
            try:
                for process in ranks:
                    process.start()
                return _first_result(ranks, results)
            finally:
                _end(ranks)


def _first_result(ranks: List[multiprocessing.Process], results: Any) -> Any:
    """Rank 0's result, when all ranks have ended well. Raises as run_on_ranks does."""
    result, errors, ended_at = None, [], math.inf
    running = {process.sentinel: process for process in ranks}
    while (running or not results.empty()) and (left := ended_at - time.monotonic()) > 0:
        wait([*running, results._reader], None if left == math.inf else left)
        while not results.empty():
            value, error = results.get()
            result = value if value is not None else result
            errors += [] if error is None else [error]
        running = {sentinel: process for sentinel, process in running.items() if process.exitcode is None}
        _raise_if_ended(ranks, *_BY_THEMSELVES)
        if errors or any(process.exitcode for process in ranks):
            ended_at = min(ended_at, time.monotonic() + _GRACE)
    errors.sort(key=lambda error: not isinstance(error, NeoXError))
    if errors and isinstance(errors[0], NeoXError):
        raise errors[0]
    _raise_if_ended(ranks, _REPORTED)
    if errors:
        raise errors[0]
    return result


def _raise_if_ended(ranks: List[multiprocessing.Process], *excused: int) -> None:
    """NeoXError about the first rank with an exit code other than 0 and those excused."""
    for number, process in enumerate(ranks):
        if process.exitcode not in (None, 0, *excused):
            raise NeoXError(
                f"rank {number} was ended from outside (exit code {process.exitcode}); is the memory enough for "
                f"{len(ranks)} processes?"
            )


def _end(ranks: List[multiprocessing.Process]) -> None:
    for process in ranks:
        if process.pid is not None and process.is_alive():
            process.terminate()
    for process in ranks:
        if process.pid is not None:
            process.join(_GRACE)
            if process.is_alive():
                process.kill()


def _rank_main(rank: int, world_size: int, store: str, results: Any, function: Callable, arguments: tuple) -> None:
    describe_process(rank, world_size)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    code = 0
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        value = function(*arguments)
        if rank == 0:
            results.put((value, None))
        dist.barrier()
    except NeoXError as error:
        code = _REPORTED
        results.put((None, error))
    except BaseException:
        code = _REPORTED
        results.put((None, RuntimeError(f"rank {rank} failed:\n{traceback.format_exc()}")))
    os._exit(code)  # gloo's threads must not hold up the end


def describe_process(rank: int, world_size: int) -> None:
    """Set the variables by which launchers tell a process its place, whichever launcher started the tool."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
