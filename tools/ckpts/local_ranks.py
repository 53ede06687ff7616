"""Run a function on several gloo ranks of this machine, from a tool that was started as one process."""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, Callable, Iterator, List

from megatron.errors import NeoXError

_GRACE = 5.0
"""Seconds that the other ranks get to report their own error, before they are ended."""


def run_on_ranks(world_size: int, function: Callable, *arguments: Any) -> Any:
    """Call function(*arguments) on each rank, with torch.distributed initialised; returns rank 0's result.

    One rank is this process itself, without any process group of its own. `function` must be importable, arguments
    and result picklable. The ranks meet through a file: no address, no port.

    Raises the first error that a rank met, NeoXError if one was killed; the other ranks are ended then.
    """
    if world_size == 1:
        describe_process(0, 1)
        return function(*arguments)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        results = context.SimpleQueue()
        common = (world_size, os.path.join(folder, "store"), results, function, arguments)
        ranks = [context.Process(target=_rank_main, args=(rank, *common), daemon=True) for rank in range(world_size)]
        with _sigterm_as_exit():
            try:
                for process in ranks:
                    process.start()
                return _first_result(ranks, results)
            finally:
                _end(ranks)


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """A tool that is told to end ends its ranks too, and removes what it had begun to write."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first_result(ranks: List[multiprocessing.Process], results: Any) -> Any:
    """Rank 0's result, when all ranks have ended well."""
    result = None
    running = {process.sentinel: process for process in ranks}
    number_of = {process.sentinel: number for number, process in enumerate(ranks)}
    while running or not results.empty():
        wait([*running, results._reader])
        while not results.empty():
            value, error = results.get()
            if error is not None:
                raise error
            result = value if value is not None else result
        for sentinel in [each for each in running if running[each].exitcode is not None]:
            process = running.pop(sentinel)
            if process.exitcode and results.empty():
                raise NeoXError(
                    f"rank {number_of[sentinel]} was ended from outside (exit code {process.exitcode}); is the memory "
                    f"enough for {len(ranks)} processes?"
                )
    return result


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
        code = 1
        results.put((None, error))
    except BaseException:
        code = 1
        results.put((None, RuntimeError(f"rank {rank} failed:\n{traceback.format_exc()}")))
    os._exit(code)  # gloo's threads must not hold up the end


def describe_process(rank: int, world_size: int) -> None:
    """Set the variables by which launchers tell a process its place, whichever launcher started the tool."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
