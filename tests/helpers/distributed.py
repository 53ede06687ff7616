"""Run a function on several gloo ranks on this machine, without ports.

The ranks are forked from one server process that has torch and deepspeed imported already, so a start costs
well under a second; a rank that fails or hangs fails the test.
"""

import multiprocessing
import os
import traceback

import pytest

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.helpers.preload"])


def run_distributed(world_size, function, *args, tmp_path, timeout=120):
    """Call function(rank, world_size, *args) on each rank; return the ranks' return values in order.

    `function` must be importable (module level) and its arguments and result picklable; return numpy arrays or
    plain Python rather than tensors. torch.distributed is initialised (gloo, file store) before the call.
    """
    store = os.path.join(str(tmp_path), f"store_{os.urandom(6).hex()}")
    results = _context.Queue()
    ranks = [
        _context.Process(target=_rank_main, args=(rank, world_size, store, results, function, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    returned = {}
    try:
        while len(returned) < world_size:
            rank, value, error = results.get(timeout=timeout)
            if error is not None:
                pytest.fail(f"rank {rank} of {world_size} failed:\n{error}")
            returned[rank] = value
    except multiprocessing.queues.Empty:
        missing = sorted(set(range(world_size)) - set(returned))
        pytest.fail(f"ranks {missing} of {world_size} did not finish within {timeout} s")
    finally:
        for process in ranks:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    return [returned[rank] for rank in range(world_size)]


def _rank_main(rank, world_size, store, results, function, args):
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        value = function(rank, world_size, *args)
        results.put((rank, value, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    finally:
        results.close()
        results.join_thread()
        os._exit(0)  # gloo's threads must not outlive the result or hold up the exit
